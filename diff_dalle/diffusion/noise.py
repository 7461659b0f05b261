"""Noise for training: white, with an offset per channel, or with large spots (pyramid noise)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch import Tensor
from torch.nn import functional as F

from ..config import InputError

#: (purpose, shape of a sample) → standard normal numbers [N, *shape], the same for the same purpose: ``Draw.normal``.
Normal = Callable[[str, Sequence[int]], Tensor]

PYRAMID_OCTAVES = 9
PYRAMID_SIDE = 16  # largest height and width of an octave


def training_noise(normal: Normal, shape: Sequence[int], offset: float = 0.0, pyramid: float = 0.0) -> Tensor:
    """[N, *shape]: noise to train on.

    normal:  where all random numbers come from.
    shape:   [C, …] of a sample.
    offset:  standard deviation of a constant added to each channel of each sample, which trains brightness (Guttenberg
             2023). The variance grows by its square.
    pyramid: as for ``pyramid_noise``; 0 = white noise.
    """
    noise = pyramid_noise(normal, shape, pyramid) if pyramid else normal("noise", shape)
    if offset:
        constant = normal("offset noise", shape[:1])
        noise = noise + offset * constant.view(*constant.shape, *[1] * (len(shape) - 1))
    return noise


def pyramid_noise(normal: Normal, shape: Sequence[int], factor: float) -> Tensor:
    """[N, C, H, W] of unit variance: white noise, and ``factor``^i times noise of 2^i times lower resolution for
    i = 1 … 9, each enlarged without smoothing.

    Octaves higher or wider than 16 are left out; the last one has a single position. Raises InputError for samples that
    are not [C, H, W].
    """
    if len(shape) != 3:
        raise InputError(f"pyramid_noise is {factor:g}, but samples of shape {list(shape)} have no height and width")
    channels, height, width = shape
    noise, variance = normal("noise", shape), 1.0
    for i in range(1, PYRAMID_OCTAVES + 1):
        small = max(height >> i, 1), max(width >> i, 1)
        if max(small) <= PYRAMID_SIDE:
            octave = normal(f"pyramid noise {i}", (channels, *small))
            noise = noise + factor**i * F.interpolate(octave, size=(height, width), mode="nearest")
            variance += factor ** (2 * i)
        if small == (1, 1):
            break
    return noise / math.sqrt(variance)
