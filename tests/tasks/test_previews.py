"""Previews: settings that cannot be sampled are refused before training, and grids of every kind of signal."""

import numpy as np
import pytest
import torch
from checkpoint_making import make_run
from network_making import seeded
from refusing import refused

from diff_dalle.batch import Batch, Conditioning
from diff_dalle.diffusion import DiffusionConfig, GuidanceConfig
from diff_dalle.diffusion.sampling import PreviewConfig
from diff_dalle.distributed.world import ALONE
from diff_dalle.images.signal import PixelSignal
from diff_dalle.recipes.generator import previews_of

UNCONDITIONAL = {"enc_attn_dim": 0, "caption_dropout": 0}
FEW = {"preview_steps": 2, "sample_interval": 1, "preview_samples": 2, "preview_share": "none"}


def test_guidance_of_an_unconditional_generator_is_refused_at_the_start():
    with refused("guidance_scale is 3, but there is no caption, class or image embedding"):
        make_run(**UNCONDITIONAL, guidance_scale=3)
    for flags in ({}, {"guidance_scale": 1}):
        make_run(**UNCONDITIONAL, **flags)
    with refused("guidance_scale is 3, but there is no caption"):  # also without previews
        PreviewConfig(0, guidance=GuidanceConfig(guidance_scale=3)).check(DiffusionConfig(), PixelSignal(), False)
    make_run(guidance_scale=3)
    make_run(**UNCONDITIONAL, guidance_scale=3, num_classes=2)


def test_other_settings_that_cannot_be_sampled_are_refused_at_the_start():
    with refused("preview_steps is 60, but must be at most 50"):
        make_run(preview_steps=60)
    signal = PixelSignal()
    PreviewConfig().check(DiffusionConfig(), signal, True)
    unbounded = type("Unbounded", (PixelSignal,), {"value_range": None})()
    with refused("thresholding is static, .* set it to none"):
        PreviewConfig().check(DiffusionConfig(), unbounded, True)
    PreviewConfig(guidance=GuidanceConfig(thresholding="none")).check(DiffusionConfig(), unbounded, True)
    PreviewConfig(sample_interval=0).check(DiffusionConfig(), unbounded, True)


class Images:
    """Random images of these channels."""

    def __init__(self, channels):
        self.channels = channels

    def first(self, count):
        index = torch.arange(count)
        rough = torch.rand(9, self.channels, 4, 4, generator=torch.Generator().manual_seed(0))[index] * 2 - 1
        return Batch(torch.nn.functional.interpolate(rough, (16, 16)), Conditioning(), index)


@pytest.mark.parametrize("small_size", [0, 8])
@pytest.mark.parametrize("channels", [1, 3])
def test_grids_are_rgb_with_equal_channels_for_grayscale(channels, small_size):
    run = make_run(**UNCONDITIONAL, **FEW, image_channels=channels, small_size=small_size)
    previews = previews_of(run.recipe(), ALONE, None, Images(channels))
    model = run.recipe().open(ALONE).network()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * seeded(parameter.shape, seed=1)
    grid = previews(model)["samples"]
    cells = grid[4:100, 4:100] if not small_size else grid[4:100, 4:300]
    assert grid.shape[2] == 3 and cells.std() > 10
    equal = all(np.array_equal(cells[..., 0], cells[..., channel]) for channel in (1, 2))
    assert equal == (channels == 1)


def test_the_spacing_of_the_steps_is_that_of_sampling():
    """The network sees the trained steps that each spacing takes; leading ones that cannot be are refused at once."""
    for spacing, expected in (("even", {0, 49}), ("trailing", {24, 49}), ("leading", {0, 25})):
        run, seen = make_run(**UNCONDITIONAL, **FEW, spacing=spacing), set()
        model = run.recipe().open(ALONE).network()
        model.register_forward_pre_hook(lambda module, inputs, seen=seen: seen.update(inputs[1].tolist()))
        previews_of(run.recipe(), ALONE, None, Images(3))(model)
        assert seen == expected
    with refused("spacing leading has no stride that takes 30 of 50 steps"):
        make_run(preview_steps=30, spacing="leading")


def test_previews_of_a_flow_are_at_its_times():
    run, seen = make_run(**UNCONDITIONAL, **FEW, noise_schedule="flow", diffusion_steps=1000), []
    model = run.recipe().open(ALONE).network()
    model.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[1].tolist()))
    previews_of(run.recipe(), ALONE, None, Images(3))(model)
    assert seen == [pytest.approx([1000.0] * 2, rel=1e-3), pytest.approx([500.0] * 2)]


def test_previews_take_the_memory_of_a_micro_batch_and_look_the_same():
    flags = {**UNCONDITIONAL, **FEW, "preview_samples": 5, "batch_size": 16, "num_classes": 3, "caption_dropout": 0.1}
    sizes, grids = [], []
    for size in (0, 4):
        run = make_run(**flags, microbatch=size)
        model = run.recipe().open(ALONE).network()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1 * seeded(parameter.shape, seed=1)
        model.register_forward_hook(lambda _, __, output: sizes.append(len(output)))
        data = Images(3)
        first = data.first
        data.first = lambda count, first=first: with_labels(first(count))
        grids.append(previews_of(run.recipe(), ALONE, None, data)(model)["samples"])
        largest = max(sizes)
        sizes.clear()
        assert largest == 2 * (size or 5)  # with and without the class at once: no gradients, so less than in training
    assert np.abs(grids[0].astype(int) - grids[1]).max() <= 1


def with_labels(batch):
    return Batch(batch.images, Conditioning(labels=batch.index % 3), batch.index)
