"""How good up-samplers are: real pictures made small, enlarged, and compared with what they were."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..distributed.world import World
from ..errors import InputError
from ..evaluation.fidelity import downsample
from ..evaluation.report import Section
from ..evaluation.upsampling_report import UpsamplingReport, evaluate_upsampling, upsampling_sections
from ..sampling.pipeline import Pipeline
from ..sampling.request import StageSettings


def up_samplers(pipeline: Pipeline) -> Pipeline:
    """The same pipeline without its base."""
    return Pipeline([stage for stage in pipeline.stages if stage.config.is_upsampler])


def judge_upsampling(pipeline: Pipeline, settings: Sequence[StageSettings], real: np.ndarray, captions: Sequence[str],
                     seed: int, world: World) -> tuple[UpsamplingReport, list[Section]]:  # fmt: skip
    """The up-samplers of a pipeline alone, on real pictures, uint8 [N, H, W, 3], that the area filter made small.

    Raises InputError for pictures that are not of the size that the last up-sampler makes.
    """
    alone = up_samplers(pipeline)
    if real.shape[1:3] != (alone.image_size, alone.image_size):
        raise InputError(f"the pictures are {real.shape[2]}×{real.shape[1]}, but must be of the {alone.image_size} "
                         "pixels that the up-samplers were trained on")  # fmt: skip
    low_res = downsample(real, alone.factor)
    reads = any(stage.tokenizer is not None for stage in alone.stages)
    ours = alone.sample(
        captions if reads else [""] * len(real), seed, upsampling=settings, low_res=low_res, world=world
    )
    report = evaluate_upsampling(low_res, ours, real)
    return report, upsampling_sections(report, low_res, ours, real, captions)
