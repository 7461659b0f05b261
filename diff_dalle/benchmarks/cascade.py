"""The memory of sampling through a cascade of three stages against that of its largest stage alone."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ..checkpoints.checkpoint import save_file
from ..commands.train_generator import GeneratorRun
from ..diffusion.sampling import SamplerConfig
from ..models.generator import GeneratorConfig
from ..models.super_resolution import LowResConfig
from ..models.text_encoder import TextEncoderConfig
from ..models.unet import UNetConfig
from ..sampling.pipeline import Pipeline, load
from ..sampling.request import StageSettings
from ..tasks.previews import PreviewConfig
from .timing import in_fresh_process

# Sides of what goes in and comes out, and channels: stages of 18, 18 and 28 million parameters, which weigh more than
# what sampling a single small picture computes, so that a stage which was not forgotten would show.
STAGES = ((0, 16, 160), (16, 32, 160), (32, 64, 200))
STEPS = SamplerConfig(sampler="ddim", timestep_respacing="2")


def write_stages(folder: str) -> list[str]:
    """Checkpoints of the three stages, with their first weights."""
    paths = []
    for small, size, channels in STAGES:
        unet = UNetConfig(image_size=size, num_channels=channels, channel_mult=(1, 2, 3), num_res_blocks=1,
                          attention_resolutions=())  # fmt: skip
        model = GeneratorConfig(unet, TextEncoderConfig(enc_attn_dim=0), LowResConfig(small))
        run = GeneratorRun(model=model, preview=PreviewConfig(sample_interval=0))
        paths.append(str(Path(folder) / f"{size}.pt"))
        save_file(paths[-1], "ema", run.identity(None), 0, 0, run.build_model(None).state_dict())
    return paths


def _pipeline(whole: bool, keep_loaded: bool = False) -> Pipeline:
    folder = tempfile.mkdtemp(prefix="diff_dalle_benchmark_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    base, *up = in_fresh_process(write_stages, folder)  # else the networks would count as memory that was in use before
    if whole:
        return load(base, "cpu", upsampler_paths=up, keep_loaded=keep_loaded)
    return load("", "cpu", upsampler_paths=up[-1:], keep_loaded=keep_loaded)


def _work(pipeline: Pipeline) -> Callable[[], np.ndarray]:
    if pipeline.has_base:
        options = {"sampler": STEPS}
    else:
        side = pipeline.stages[0].config.low_res.small_size
        options = {"low_res": np.full((1, side, side, 3), 128, np.uint8)}
    return lambda: pipeline.sample("", upsampling=StageSettings(sampler=STEPS), progress=False, **options)


def largest_alone() -> Callable[[], np.ndarray]:
    return _work(_pipeline(whole=False))


def whole_cascade() -> Callable[[], np.ndarray]:
    return _work(_pipeline(whole=True))


def gate() -> dict[str, tuple[float, float]]:
    """Largest difference, in levels, between pictures of a cascade that forgets its stages and one that keeps them."""
    forgetting, keeping = (_work(_pipeline(whole=True, keep_loaded=keep))().astype(int) for keep in (False, True))
    return {"pictures": (float(abs(forgetting - keeping).max()), 0.0)}
