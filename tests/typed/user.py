"""A user's file, which mypy checks: the public names have types."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from typing_extensions import assert_type

import diff_dalle
from diff_dalle import (
    LOSSES,
    TASKS,
    Batch,
    Conditioning,
    DiffusionConfig,
    GeneratorConfig,
    GeneratorRun,
    Pipeline,
    TrainedRun,
    load,
)
from diff_dalle.randomness import Draw
from diff_dalle.tasks.denoising import DenoisingTask

pipeline = load("emoji")
assert_type(pipeline, Pipeline)
assert_type(diff_dalle.load("emoji").sample(["red heart"], seed=3), np.ndarray)
assert_type(GeneratorConfig().text.text_length, int)
assert_type(DiffusionConfig().diffusion_steps, int)
assert_type(Conditioning(), Conditioning)
assert_type(diff_dalle.models()["emoji"].card, str)


def train(shards: list[Path]) -> dict[str, str]:
    run = diff_dalle.train("shapes_32", "path/to/shards", iterations=100, logdir=Path("runs/first"))
    assert_type(run, TrainedRun)
    diff_dalle.train(GeneratorRun(), shards, optim={"lr": 1e-4})
    diff_dalle.train("shapes_32", 3)  # type: ignore[arg-type]  # no shards
    return run.checkpoints


@LOSSES.register
def absolute(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).abs()


assert_type(absolute(torch.zeros(1), torch.ones(1)), Tensor)


@TASKS.register
class OwnTask(DenoisingTask):
    def losses(self, batch: Batch, draw: Draw) -> dict[str, Tensor]:
        return super().losses(batch, draw)


def own_step(pipeline: Pipeline) -> str:
    return pipeline.samplee(["red heart"])  # type: ignore[attr-defined]  # no such method
