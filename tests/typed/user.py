"""A user's file, which mypy checks: the public names have types."""

import numpy as np
from typing_extensions import assert_type

import diff_dalle
from diff_dalle import Conditioning, DiffusionConfig, GeneratorConfig, Pipeline, load

pipeline = load("emoji")
assert_type(pipeline, Pipeline)
assert_type(diff_dalle.load("emoji").sample(["red heart"], seed=3), np.ndarray)
assert_type(GeneratorConfig().text.text_length, int)
assert_type(DiffusionConfig().diffusion_steps, int)
assert_type(Conditioning(), Conditioning)
assert_type(diff_dalle.models()["emoji"].card, str)


def own_step(pipeline: Pipeline) -> str:
    return pipeline.samplee(["red heart"])  # type: ignore[attr-defined]  # no such method
