"""Tiled evaluation of a network against the same network on the whole image."""

from dataclasses import replace

import pytest
import torch
from network_making import seeded
from refusing import refused
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from diff_dalle.batch import Conditioning
from diff_dalle.diffusion import DiffusionConfig, GuidanceConfig, create_gaussian_diffusion
from diff_dalle.diffusion.sampling import SampleBatch, SamplerConfig, sample_batch
from diff_dalle.diffusion.tiling import Tiled, check_tiles, tile_starts, tile_weights
from diff_dalle.images.signal import PixelSignal

SIZES = [(32, 32), (32, 48), (40, 16), (44, 68), (8, 20), (20, 36)]  # multiples of 4; the tile is 16


class Local(nn.Module):
    """A small U-Net of 3×3 convolutions over x and low_res, for even sizes. No output pixel depends on one more than 4
    away. Records its calls."""

    def __init__(self, out_channels=6):
        super().__init__()
        torch.manual_seed(0)
        self.calls, self.encoded = [], 0
        self.first, self.inner = nn.Conv2d(6, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.last = nn.Conv2d(16, out_channels, 1)

    def encode_text(self, cond):
        self.encoded += 1
        return cond

    def forward(self, x, t, cond):
        self.calls.append((x, t, cond))
        low_res = F.interpolate(cond.low_res, x.shape[2:], mode="bilinear", align_corners=False)
        labels = 0.0 if cond.labels is None else 0.1 * cond.labels[:, None, None, None]
        outer = torch.tanh(self.first(torch.cat([x, low_res], 1)) + labels)
        inner = F.interpolate(torch.tanh(self.inner(F.avg_pool2d(outer, 2))), scale_factor=2)
        return self.last(torch.cat([outer, inner], 1))


def inputs(size, n=2):
    height, width = size
    cond = Conditioning(labels=torch.arange(n), low_res=seeded(n, 3, height // 4, width // 4, seed=1))
    return seeded(n, 3, *size), torch.arange(n), cond


@pytest.mark.parametrize("overlap", [0, 2, 6, 8, 12, 14])
@pytest.mark.parametrize(("length", "tile"), [(16, 16), (17, 16), (31, 16), (33, 16), (100, 16), (100, 18), (7, 16)])
def test_weights_sum_to_1_and_are_0_near_the_ends_of_a_tile(length, tile, overlap):
    starts = tile_starts(length, tile, overlap)
    weights = tile_weights(length, starts, tile, overlap)
    total = torch.zeros(length, dtype=torch.float64)
    for start, row in zip(starts, weights, strict=True):
        total[start : start + len(row)] += row
        if start:
            assert (row[: overlap // 4] == 0).all()
        if start + len(row) < length:
            assert (row[len(row) - overlap // 4 :] == 0).all()
    assert_close(total, torch.ones_like(total), atol=1e-6, rtol=0)
    assert (weights >= 0).all() and starts[-1] + weights.shape[1] == length


def test_tiles_are_blended_linearly():
    starts = tile_starts(24, 16, 8)
    assert starts == [0, 8]
    left, right = tile_weights(24, starts, 16, 8)
    assert_close(left[8:], torch.tensor([1, 1, 0.875, 0.625, 0.375, 0.125, 0, 0]))
    assert_close(right[:8], 1 - left[8:])
    assert (left[:8] == 1).all() and (right[8:] == 1).all()


@pytest.mark.parametrize("size", SIZES)
def test_a_local_network_returns_the_same_as_for_the_whole_image(size):
    """With an overlap of four times its receptive field's radius; learned variance and conditions included."""
    network, (x, t, cond) = Local(), inputs(size)
    with torch.no_grad():
        found, whole = Tiled(network, 24, 16, 2)(x, t, cond=cond), network(x, t, cond)
    assert found.shape == (2, 6, *size)
    assert_close(found, whole, atol=1e-5, rtol=0)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("overlap", [0, 4, 8, 12])
def test_low_res_is_upsampled_as_a_whole_and_constants_stay(size, overlap):
    """A network that returns its upsampled low-resolution image gives that of the whole image, and a constant image."""

    def upsample(x, t, cond):
        return F.interpolate(cond.low_res, x.shape[2:], mode="bilinear", align_corners=False)

    x, t, cond = inputs(size)
    tiled = Tiled(upsample, 16, overlap, 4)
    assert_close(tiled(x, t, cond=cond), upsample(x, t, cond), atol=1e-6, rtol=0)
    constant = replace(cond, low_res=torch.full_like(cond.low_res, 0.7))
    assert_close(tiled(x, t, cond=constant), torch.full_like(x, 0.7), atol=1e-6, rtol=0)


class Patches(nn.Module):
    """Adds a semantic map, resized to its patches of 2×2 pixels, to each of their pixels."""

    def forward(self, x, t, cond):
        positions = x.shape[2] // 2, x.shape[3] // 2
        semantic = cond.semantic
        if semantic.shape[2:] != positions:
            semantic = F.interpolate(semantic, positions, mode="bilinear", align_corners=True)
        return x + semantic.repeat_interleave(2, 2).repeat_interleave(2, 3)


@pytest.mark.parametrize("size", SIZES)
def test_a_semantic_map_is_resized_for_the_whole_image_and_cut(size):
    x, cond = torch.randn(2, 3, *size), Conditioning(semantic=torch.randn(2, 3, 5, 7))
    whole = Patches()(x, torch.zeros(2), cond)
    assert_close(Tiled(Patches(), 16, 4, 2, patch=2)(x, torch.zeros(2), cond=cond), whole)


@pytest.mark.parametrize("size", SIZES)
def test_the_network_sees_no_more_than_a_tile(size):
    """The documented number of tiles, each at a multiple of the divisor; t and the other conditions unchanged."""
    network, (x, t, cond) = Local(), inputs(size)
    height, width = size
    with torch.no_grad():
        Tiled(network, 16, 4, 4)(x, t, cond=cond)
    count = -(-max(height - 4, 12) // 12) * -(-max(width - 4, 12) // 12)
    assert len(network.calls) == count
    corners = [(i, j) for i in range(0, height, 4) for j in range(0, width, 4)]
    for part, steps, seen in network.calls:
        assert part.shape == (2, 3, min(16, height), min(16, width)) and steps is t
        assert seen.low_res.shape == part.shape and seen.labels is cond.labels
        h, w = part.shape[2:]
        assert len([1 for i, j in corners if torch.equal(x[..., i : i + h, j : j + w], part)]) == 1


def test_an_image_no_larger_than_a_tile_is_evaluated_as_a_whole():
    network, (x, t, cond) = Local(), inputs((16, 12))
    assert torch.equal(Tiled(network, 16, 8, 4)(x, t, cond=cond), network(x, t, cond))
    assert all(seen is x and conditions is cond for seen, _, conditions in network.calls)


def test_without_low_res_or_any_condition():
    """Half precision, in which sums are inexact, becomes float32."""

    def network(x, t, cond):
        assert cond is None or cond.low_res is None
        return (x + 1).half()

    x, t, _ = inputs((32, 20))
    for cond in (None, Conditioning(labels=t)):
        found = Tiled(network, 16, 8, 4)(x, t, cond=cond)
        assert found.dtype == torch.float32
        assert_close(found, (x + 1).half().float(), atol=1e-5, rtol=0)


def test_gradients_pass_through():
    network, (x, t, cond) = Local(3), inputs((32, 20))
    gradients = []
    for model in (network, Tiled(network, 24, 16, 2)):
        leaf = x.clone().requires_grad_()
        gradients.append(torch.autograd.grad(model(leaf, t, cond=cond).sin().sum(), leaf)[0])
    assert_close(*gradients, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_it_replaces_the_network_in_sampling(scale):
    """Guided or not, the images are those of the network itself; text is encoded once."""
    network, (_, _, cond) = Local(), inputs((32, 40))
    null = replace(cond, labels=torch.zeros_like(cond.labels))
    process = create_gaussian_diffusion(DiffusionConfig(100, prediction="x_start", variance="learned_range"), "4")
    batch = SampleBatch(PixelSignal(), (32, 40), [3, 4], cond, null)

    def images(generator):
        return sample_batch(generator, process, batch, SamplerConfig(), GuidanceConfig(guidance_scale=scale))

    whole = images(network)
    network.encoded = 0
    assert_close(images(Tiled(network, 24, 16, 2)), whole, atol=1e-4, rtol=0)
    assert network.encoded == 2  # cond and null


@pytest.mark.parametrize(
    ("tile", "overlap", "message"),
    [
        (18, 4, "tile_size is 18.*multiple of 4"),
        (0, 0, "tile_size is 0"),
        (16, 6, "tile_overlap is 6"),
        (16, -4, "tile_overlap is -4"),
        (16, 16, "tile_overlap is 16.*smaller than tile_size"),
    ],
)
def test_impossible_tiles_are_refused(tile, overlap, message):
    for make in (check_tiles, lambda *settings: Tiled(Local(), *settings)):
        with refused(message):
            make(tile, overlap, 4)


def test_an_image_that_the_network_does_not_divide_is_refused():
    with refused("20×30, but both must be multiples of 4"):
        Tiled(Local(), 16, 4, 4)(*inputs((30, 20)))
