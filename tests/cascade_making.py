"""Tiny cascades, and sampling with them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from checkpoint_making import FEW, make_run, save_model

from diff_dalle.checkpoints.loading import SavedNetwork
from diff_dalle.diffusion import GuidanceConfig
from diff_dalle.diffusion.editing import EditConfig
from diff_dalle.sampling.pipeline import Pipeline
from diff_dalle.sampling.pixel_stages import UPSAMPLER_DEFAULTS
from diff_dalle.sampling.request import ImageEdit, Request
from diff_dalle.sampling.stage import Stage
from diff_dalle.sampling.stage_settings import UPSAMPLERS, StageSettings, UpsamplersConfig, settings_of_stages

SMALL = {
    "image_size": 8,
    "num_channels": 8,
    "attention_resolutions": 4,
    "enc_attn_dim": 8,
    "text_length": 8,
    "prediction": "x_start",
}
NO_TEXT = {"enc_attn_dim": 0, "caption_dropout": 0}
DEGRADED = {"noise_augmentation": 0.5, "gaussian_blur": True}
KINDS = {
    "base": {},
    "middle": {"image_size": 16, "small_size": 8, **NO_TEXT, **DEGRADED},
    "top": {"image_size": 32, "small_size": 16, **DEGRADED},
    "classes": {"image_size": 64, "small_size": 16, "num_classes": 3, **NO_TEXT},
    # With little noise, its x_start is nearly correct whatever it predicts.
    "exact": {"diffusion_steps": 1000, "noise_schedule": "cosine", "prediction": "eps", **NO_TEXT},
}  # 8 → 16 → 32 pixels, or 64
FAST = StageSettings(FEW, GuidanceConfig(guidance_scale=1.0))
PROMPTS = ["a red circle", "", "two blue squares"]


def make_stage(path: Path, **changed) -> str:
    """A checkpoint whose images are neither black nor white nor gray, and depend on all inputs of the network."""
    return save_model(make_run(**{**SMALL, **changed}), path, fresh=1.0, spread=0.05)


def make_stages(folder: Path) -> dict[str, str]:
    """Checkpoints of all KINDS."""
    return {name: make_stage(folder / f"{name}.pt", **settings) for name, settings in KINDS.items()}


def stages(pipeline: Pipeline, prompts=PROMPTS, seed=0, *, upsampling=None, world=None, **options) -> list[np.ndarray]:
    """Every stage's images after a few steps, as signed integers.

    options: of Request and StageSettings, the latter for the base.
    """
    names = {field.name for field in fields(StageSettings)}
    settings = {name: options.pop(name) for name in names & options.keys()}
    if pipeline.has_base:
        settings.setdefault("sampler", FEW)
    if upsampling is None and len(pipeline.stages) > pipeline.has_base:
        upsampling = FAST
    request = Request(prompts, **{"seeds": range(seed, seed + len(prompts)), **options})
    chosen = pipeline.stage_settings(StageSettings(**settings), upsampling)
    images = pipeline.sample_stages(request, chosen, world=world, progress=False)
    return [each.astype(int) for each in images]


def random_images(n: int, height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (n, height, width, 3), dtype=np.uint8)


def upsampling(config: UpsamplersConfig, usual=(UPSAMPLER_DEFAULTS,) * 2) -> list[StageSettings]:
    """The settings of upsamplers whose checkpoints say ``usual``, as the command line makes them."""
    return settings_of_stages([SimpleNamespace(defaults=each, flags=UPSAMPLERS, path="u.pt") for each in usual], config)


def upsamplers(**lists):
    """Settings of two upsamplers, as the command line makes them."""
    defaults = {"upsampler_paths": ("a", "b"), "upsampler_steps": (4,)}
    return upsampling(UpsamplersConfig(**{**defaults, **lists}))


def edited(count=1, size=(16, 16), mask=None, **settings):
    """An ImageEdit of random images, as an option of ``stages``."""
    masks = None if mask is None else [mask]
    return {"edit": ImageEdit(list(random_images(count, *size)), masks, EditConfig(**settings))}


@dataclass(frozen=True)
class Intercepted(SavedNetwork):
    """A checkpoint whose weights come from ``read``."""

    read: Callable | None = None

    def load(self, device):
        return self.read()


def reading(pipeline: Pipeline, read: Callable) -> Pipeline:
    """The same pipeline, without keeping weights, whose stages load their networks by ``read(stage)``."""

    def intercepted(stage: Stage) -> Stage:
        saved = Intercepted(**vars(stage.saved), read=lambda: read(stage))
        return type(stage)(saved, stage.device, stage.precision, keep=False)

    return Pipeline([intercepted(stage) for stage in pipeline.stages])


def idle(pipeline: Pipeline) -> Pipeline:
    """The same pipeline, which fails when a network is loaded."""

    def read(stage):
        raise AssertionError(f"{stage.path} was loaded")

    return reading(pipeline, read)


@contextlib.contextmanager
def watching(stage: Stage):
    """The inputs of a network that is kept: (x, cond) of every evaluation."""
    seen = []
    handle = stage.network().register_forward_pre_hook(
        lambda module, arguments, keywords: seen.append((arguments[0], keywords["cond"])), with_kwargs=True
    )
    try:
        yield seen
    finally:
        handle.remove()


class Share:
    """One of two processes, simulated by threads."""

    values, meeting, size = [None, None], threading.Barrier(2, timeout=60), 2

    def __init__(self, rank):
        self.rank, self.is_main = rank, rank == 0

    def gather(self, value):
        self.values[self.rank] = value
        self.meeting.wait()
        found = list(self.values)
        self.meeting.wait()
        return found


def same(one, other, numbers) -> bool:
    """Whether the images of these stages are identical."""
    return all(np.array_equal(one[n], other[n]) for n in numbers)


def different(one, other, numbers) -> bool:
    """Whether the images differ at each of these stages."""
    return all(not np.array_equal(one[n], other[n]) for n in numbers)


def close(one, other) -> bool:
    """Whether all stages' images are the same up to the rounding of another batch."""
    return all(np.abs(a - b).max() <= 1 for a, b in zip(one, other, strict=True))
