"""Memory of sampling with a cascade of three stages, relative to its largest stage alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from checkpoint_making import save_model

from diff_dalle.diffusion.sampling import PreviewConfig, SamplerConfig
from diff_dalle.models.generator import GeneratorConfig, LowResConfig
from diff_dalle.models.text_encoder import TextEncoderConfig
from diff_dalle.models.transformer import DenoiserConfig
from diff_dalle.recipes.generator import GeneratorRun
from diff_dalle.sampling.pipeline import Pipeline, load
from diff_dalle.sampling.request import Request
from diff_dalle.sampling.stage_settings import StageSettings

from .timing import in_fresh_process, temporary_folder

# Input resolution, output resolution and channels: stages of 18, 18 and 28 million parameters, which need more memory
# than the activations of a single small image, so that a stage whose weights were not freed would show.
STAGES = ((0, 16, 160), (16, 32, 160), (32, 64, 200))
STEPS = SamplerConfig(sampler="ddim", steps=2)


def write_stages(folder: Path) -> list[str]:
    """Checkpoints of the three stages, with their initial weights."""
    paths = []
    for small, size, channels in STAGES:
        unet = DenoiserConfig(
            image_size=size,
            num_channels=channels,
            channel_mult=(1, 2, 3),
            num_res_blocks=1,
            attention_resolutions=(),
        )
        model = GeneratorConfig(unet, TextEncoderConfig(enc_attn_dim=0), LowResConfig(small))
        run = GeneratorRun(model=model, preview=PreviewConfig(sample_interval=0))
        paths.append(save_model(run, folder / f"{size}.pt", fresh=1.0, spread=0.0))
    return paths


def _pipeline(whole: bool, keep_loaded: bool = False) -> Pipeline:
    # In a process of its own, or the networks would raise this one's peak memory.
    base, *up = in_fresh_process(write_stages, temporary_folder())
    if whole:
        return load(base, "cpu", upsampler_paths=up, keep_loaded=keep_loaded)
    return load("", "cpu", upsampler_paths=up[-1:], keep_loaded=keep_loaded)


def _work(pipeline: Pipeline) -> Callable[[], np.ndarray]:
    small_size, low_res = pipeline.stages[0].small_size, None
    if small_size:
        low_res = np.full((1, small_size, small_size, 3), 128, np.uint8)
    request, settings = Request([""], [0], low_res=low_res), [StageSettings(sampler=STEPS)] * len(pipeline.stages)
    return lambda: pipeline.sample_stages(request, settings, progress=False)[-1]


def largest_alone() -> Callable[[], np.ndarray]:
    return _work(_pipeline(whole=False))


def whole_cascade() -> Callable[[], np.ndarray]:
    return _work(_pipeline(whole=True))


def gate() -> dict[str, tuple[float, float]]:
    """Maximum difference, in levels, between images of a cascade that frees its stages and one that keeps them."""
    freed, kept = (_work(_pipeline(whole=True, keep_loaded=keep))().astype(int) for keep in (False, True))
    return {"images": (float(abs(freed - kept).max()), 0.0)}
