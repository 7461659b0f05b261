"""Noise for training."""

import pytest
import torch
from refusing import refused
from torch.nn import functional as F
from torch.testing import assert_close

from diff_dalle.diffusion import LogSnrConfig, LogSnrProcess
from diff_dalle.diffusion.log_snr import pyramid_noise
from diff_dalle.randomness import Draw

DRAW = Draw(5, torch.arange(4000))


def training_noise(normal, shape, offset=0.0, pyramid=0.0):
    return LogSnrProcess(LogSnrConfig(offset_noise=offset, pyramid_noise=pyramid)).noise(normal, shape)


def test_octaves_follow_height_and_width():
    """White noise, and octaves of (H / 2^i, W / 2^i), at least 1, neither side above 16, until both are 1."""
    asked = []

    def normal(purpose, shape):
        asked.append((purpose, tuple(shape)))
        return DRAW.normal(purpose, shape)[:2]

    pyramid_noise(normal, (3, 64, 24), 0.75)
    sizes = {2: (16, 6), 3: (8, 3), 4: (4, 1), 5: (2, 1), 6: (1, 1)}
    assert asked == [("noise", (3, 64, 24)), *((f"pyramid noise {i}", (3, *size)) for i, size in sizes.items())]
    asked.clear()
    pyramid_noise(normal, (1, 1, 1024), 0.75)
    assert [shape for _, shape in asked] == [(1, 1, 1024), (1, 1, 16), (1, 1, 8), (1, 1, 4), (1, 1, 2)]  # i = 6 … 9


def test_pyramid_noise_is_the_weighted_sum_of_its_octaves():
    noise = pyramid_noise(DRAW.normal, (1, 4, 2), 0.5)
    parts = [DRAW.normal("noise", (1, 4, 2))]
    for i, size in ((1, (2, 1)), (2, (1, 1))):
        parts.append(0.5**i * F.interpolate(DRAW.normal(f"pyramid noise {i}", (1, *size)), size=(4, 2)))
    assert_close(noise, sum(parts) / (1 + 0.25 + 0.0625) ** 0.5)


def test_offset_noise_is_constant_in_each_channel():
    plain = training_noise(DRAW.normal, (3, 4, 6))
    assert torch.equal(plain, DRAW.normal("noise", (3, 4, 6)))
    offset = training_noise(DRAW.normal, (3, 4, 6), offset=0.1) - plain
    assert (offset - offset[..., :1, :1]).abs().max() < 1e-6
    assert offset[..., 0, 0].std(0).tolist() == pytest.approx([0.1] * 3, rel=0.05)
    assert torch.corrcoef(offset[..., 0, 0].T).fill_diagonal_(0).abs().max() < 0.07
    both = training_noise(DRAW.normal, (3, 4, 6), offset=0.1, pyramid=0.75)
    assert_close(both, pyramid_noise(DRAW.normal, (3, 4, 6), 0.75) + offset)


def test_pyramids_need_maps():
    with refused(r"pyramid_noise is 0.75, but samples of shape \[8\] have no height"):
        training_noise(DRAW.normal, (8,), pyramid=0.75)
    assert training_noise(DRAW.normal, (8,), offset=0.5).shape == (4000, 8)
