"""Tiny generators that follow one another, and what they make."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
from checkpoint_making import FEW, make_run, save_model

from diff_dalle.diffusion import GuidanceConfig
from diff_dalle.sampling.pipeline import Pipeline
from diff_dalle.sampling.request import StageSettings
from diff_dalle.sampling.stage import Stage

SMALL = {
    "image_size": 8, "num_channels": 8, "attention_resolutions": 4, "enc_attn_dim": 8, "text_length": 8,
    "prediction": "x_start",
}  # fmt: skip
BLIND = {"enc_attn_dim": 0, "caption_dropout": 0}
DEGRADED = {"noise_augmentation": 0.5, "gaussian_blur": True}
KINDS = {
    "base": {},
    "middle": {"image_size": 16, "small_size": 8, **BLIND, **DEGRADED},
    "top": {"image_size": 32, "small_size": 16, **DEGRADED},
    "classes": {"image_size": 64, "small_size": 16, "num_classes": 3, **BLIND},
    # What it expects of a picture with little noise is nearly right, whatever it answers.
    "exact": {"diffusion_steps": 1000, "noise_schedule": "cosine", "prediction": "eps", **BLIND},
}  # 8 → 16 → 32 pixels, or 64
FAST = StageSettings(FEW, GuidanceConfig(guidance_scale=1.0))
PROMPTS = ["a red circle", "", "two blue squares"]


def make_stage(path: Path, **changed) -> str:
    """A checkpoint whose pictures are neither black nor white nor grey, and follow all that the network is shown."""
    return save_model(make_run(**{**SMALL, **changed}), path, fresh=1.0, spread=0.05)


def make_stages(folder: Path) -> dict[str, str]:
    """Checkpoints of all KINDS."""
    return {name: make_stage(folder / f"{name}.pt", **settings) for name, settings in KINDS.items()}


def stages(pipeline: Pipeline, prompts=PROMPTS, *arguments, **options) -> list[np.ndarray]:
    """Every stage's pictures after a few steps, as signed numbers."""
    usual = {"progress": False}
    if pipeline.has_base:
        usual["sampler"] = FEW
    if len(pipeline.stages) > pipeline.has_base:
        usual["upsampling"] = FAST
    return [made.astype(int) for made in pipeline.sample_stages(prompts, *arguments, **{**usual, **options})]


def pictures(n: int, height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (n, height, width, 3), dtype=np.uint8)


def reading(pipeline: Pipeline, read) -> Pipeline:
    """The same pipeline, keeping nothing, whose stages get their networks from ``read(stage)``."""
    return Pipeline([
        Stage(stage.config, stage.diffusion, stage.augmentation, stage.tokenizer, stage.precision, stage.device,
              lambda stage=stage: read(stage), False, path=stage.path)
        for stage in pipeline.stages
    ])  # fmt: skip


def idle(pipeline: Pipeline) -> Pipeline:
    """The same pipeline, whose networks nobody may read."""

    def read(stage):
        raise AssertionError(f"{stage.path} was read")

    return reading(pipeline, read)


@contextlib.contextmanager
def watching(stage: Stage):
    """What a network that is kept is shown: (x, cond) of every evaluation."""
    shown = []
    handle = stage.network().register_forward_pre_hook(
        lambda module, arguments, keywords: shown.append((arguments[0], keywords["cond"])), with_kwargs=True
    )
    try:
        yield shown
    finally:
        handle.remove()


def same(one, other, numbers) -> bool:
    """Whether these stages' pictures are all the same."""
    return all(np.array_equal(one[n], other[n]) for n in numbers)


def different(one, other, numbers) -> bool:
    """Whether none of these stages' pictures are all the same."""
    return all(not np.array_equal(one[n], other[n]) for n in numbers)


def close(one, other) -> bool:
    """Whether all stages' pictures are the same, but for the rounding of another batch."""
    return all(np.abs(a - b).max() <= 1 for a, b in zip(one, other, strict=True))
