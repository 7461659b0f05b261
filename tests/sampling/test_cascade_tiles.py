"""Stages of a cascade that upsample in tiles."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from cascade_making import FAST, NO_TEXT, SMALL, make_stage, stages, watching
from checkpoint_making import make_run

from diff_dalle.batch import Batch, Conditioning
from diff_dalle.checkpoints.checkpoint import save_file
from diff_dalle.diffusion import GuidanceConfig, create_gaussian_diffusion
from diff_dalle.diffusion.sampling import SamplerConfig
from diff_dalle.distributed.world import ALONE
from diff_dalle.randomness import Draw
from diff_dalle.sampling.pipeline import load
from diff_dalle.tasks.denoising import UpsamplingTask


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """An upsampler, 8 to 16 pixels, after 40 steps on smooth images."""
    settings = {**SMALL, **NO_TEXT, "image_size": 16, "small_size": 8, "low_res_skip": True}
    run = make_run(**settings, noise_schedule="cosine", diffusion_steps=1000)
    session = run.recipe().open(ALONE)
    model = session.network()
    task = UpsamplingTask(
        model, create_gaussian_diffusion(run.diffusion), run.denoising, 2, run.augmentation.degradation
    )
    optimizer, generator = torch.optim.Adam(model.parameters(), lr=3e-3), torch.Generator().manual_seed(0)
    for step in range(40):
        corners = torch.rand(4, 3, 3, 3, generator=generator) * 2 - 1
        smooth = torch.nn.functional.interpolate(corners, (16, 16), mode="bilinear", align_corners=True)
        batch = Batch(smooth, Conditioning(), torch.arange(4 * step, 4 * step + 4))
        optimizer.zero_grad()
        task.losses(batch, Draw(0, batch.index))["loss"].mean().backward()
        optimizer.step()
    path = str(tmp_path_factory.mktemp("trained") / "up.pt")
    save_file(path, "ema", session.identity(), 40, 160, model.state_dict())
    return load("", "cpu", upsampler_paths=[path])


def gradient(height, width):
    """An image with a red gradient to the right and a green gradient downwards."""
    rows, columns = np.mgrid[:height, :width]
    levels = (255 * columns / (width - 1), 255 * rows / (height - 1), 128 + 0 * rows)
    return np.stack(levels, -1).round().astype(np.uint8)


def upsample(pipeline, prompts=("",), size=(16, 24), steps=5, **tiles):
    settings = replace(FAST, sampler=SamplerConfig(steps=steps), **tiles)
    return stages(pipeline, prompts, low_res=gradient(*size)[None], upsampling=settings)[0]


def test_tiles_of_a_smooth_image_are_close_to_the_whole(trained):
    """Not equal: norms and attention cover a tile instead of the image."""
    whole, tiled = upsample(trained), upsample(trained, tile_size=16, tile_overlap=8)
    assert np.abs(whole - gradient(32, 48)).max() <= 24  # measured: 11, after so little training
    error = np.abs(tiled - whole)
    assert 0 < error.max() <= 12 and error.mean() <= 3  # measured: 6 and 1.5; with random weights 158 and 23
    assert np.array_equal(upsample(trained, tile_size=48, tile_overlap=8), whole)


def test_the_network_sees_tiles_only(trained):
    with watching(trained.stages[0]) as seen:
        upsample(trained, steps=2, tile_size=16, tile_overlap=8)
    assert {x.shape[2:] for x, _ in seen} == {(16, 16)} and len(seen) == (3 * 5) * 2


def test_tiles_with_a_caption_and_guidance(tmp_path):
    reads = load("", "cpu", upsampler_paths=[make_stage(tmp_path / "up.pt", image_size=16, small_size=8)])
    options = {"size": (8, 12), "steps": 2, "guidance": GuidanceConfig(guidance_scale=2.0)}
    star, ring = (upsample(reads, [prompt], tile_size=8, tile_overlap=4, **options) for prompt in ("a star", "a ring"))
    assert star.shape == (1, 16, 24, 3) and (star != ring).any()
