"""Triton kernels (Tillet et al. 2019) of group norm with what follows it, for channels-last images on GPUs.

Forward and backward pass read an image twice and write one, in its own dtype, and compute in fp32. An image is seen as
[N, rows, C], a row for every position, and cut into tiles of rows and channels. What is summed over an image is summed
in every tile first, and then over the tiles in a fixed order, so that results do not depend on the schedule.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 128  # of a tile
CHANNELS = 64  # of a tile, at most
SUMMED = 2048  # values of tiles that are added up at once


@triton.jit
def _place(rows, channels, per_group, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    """Of a program's tile: its sample; places in the image and which of them exist; channels, which of them exist, and
    their places in [N, C] and in [N, groups]."""
    sample = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    exists = channel < channels
    inside = (row < rows)[:, None] & exists[None, :]
    place = (sample * rows + row)[:, None] * channels + channel[None, :]
    by_group = sample * (channels // per_group) + channel // per_group
    return place, inside, channel, exists, sample * channels + channel, by_group


@triton.jit
def _moments(image, moments, rows, channels, tiles, per_group, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    """Of every channel of a tile: the mean, and the sum of squared deviations from it. moments: [N, tiles, 2, C]."""
    place, inside, channel, exists, _, _ = _place(rows, channels, 1, ROWS, CHANNELS)
    x = tl.load(image + place, mask=inside, other=0.0).to(tl.float32)
    count = tl.minimum(rows - tl.program_id(0) * ROWS, ROWS)
    mean = tl.sum(x, 0) / count
    deviation = tl.where(inside, x - mean[None, :], 0.0)
    out = moments + (tl.program_id(2).to(tl.int64) * tiles + tl.program_id(0)) * 2 * channels + channel
    tl.store(out, mean, mask=exists)
    tl.store(out + channels, tl.sum(deviation * deviation, 0), mask=exists)


@triton.jit
def _statistics(
    moments,
    weight,
    bias,
    scale_shift,
    means,
    rstds,
    factors,
    offsets,
    rows,
    channels,
    tiles,
    per_group,
    eps,
    SCALED: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Of one group of one sample: mean and 1 / standard deviation [N, groups]; what norm, scale and shift amount to,
    factors and offsets [N, C]. Means of tiles are merged as by Chan et al. (1979)."""
    group, sample = tl.program_id(0), tl.program_id(1).to(tl.int64)
    inner = tl.arange(0, CHANNELS)
    exists = inner < per_group
    channel = group * per_group + inner
    total = rows * per_group
    mean = 0.0
    for start in range(0, tiles, TILES):
        tile = start + tl.arange(0, TILES)
        inside = (tile < tiles)[:, None] & exists[None, :]
        of_tile = tl.load(
            moments + (sample * tiles + tile)[:, None] * 2 * channels + channel[None, :], inside, other=0.0
        )
        count = tl.minimum(rows - tile * ROWS, ROWS).to(tl.float32)
        mean += tl.sum(tl.where(inside, of_tile * count[:, None], 0.0)) / total
    squares = 0.0
    for start in range(0, tiles, TILES):
        tile = start + tl.arange(0, TILES)
        inside = (tile < tiles)[:, None] & exists[None, :]
        place = moments + (sample * tiles + tile)[:, None] * 2 * channels + channel[None, :]
        deviation = tl.load(place, inside, other=0.0) - mean
        count = tl.minimum(rows - tile * ROWS, ROWS).to(tl.float32)
        of_tile = tl.load(place + channels, inside, other=0.0)
        squares += tl.sum(tl.where(inside, of_tile + deviation * deviation * count[:, None], 0.0))
    rstd = 1 / tl.sqrt(squares / total + eps)
    by_group = sample * (channels // per_group) + group
    tl.store(means + by_group, mean)
    tl.store(rstds + by_group, rstd)
    factor = tl.load(weight + channel, exists, other=0.0).to(tl.float32) * rstd
    offset = tl.load(bias + channel, exists, other=0.0).to(tl.float32) - mean * factor
    if SCALED:
        scale = 1 + tl.load(scale_shift + sample * 2 * channels + channel, exists, other=0.0).to(tl.float32)
        shift = tl.load(scale_shift + sample * 2 * channels + channels + channel, exists, other=0.0).to(tl.float32)
        factor = factor * scale
        offset = offset * scale + shift
    tl.store(factors + sample * channels + channel, factor, mask=exists)
    tl.store(offsets + sample * channels + channel, offset, mask=exists)


@triton.jit
def _apply(
    image,
    factors,
    offsets,
    out,
    rows,
    channels,
    tiles,
    per_group,
    SILU: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """factor · image + offset, and a SiLU."""
    place, inside, _, exists, by_channel, _ = _place(rows, channels, 1, ROWS, CHANNELS)
    factor = tl.load(factors + by_channel, exists, other=0.0)[None, :]
    offset = tl.load(offsets + by_channel, exists, other=0.0)[None, :]
    y = tl.load(image + place, mask=inside, other=0.0).to(tl.float32) * factor + offset
    if SILU:
        y = y * tl.sigmoid(y)
    tl.store(out + place, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _before_silu(
    image,
    gradient,
    means,
    rstds,
    factors,
    offsets,
    place,
    inside,
    exists,
    by_channel,
    by_group,
    SILU: tl.constexpr,
):
    """Of a tile: the image less the mean of its group, and 1 / the standard deviation; the gradient at factor · image +
    offset, from the one at its SiLU, and the factor."""
    factor = tl.load(factors + by_channel, exists, other=0.0)[None, :]
    offset = tl.load(offsets + by_channel, exists, other=0.0)[None, :]
    mean = tl.load(means + by_group, exists, other=0.0)[None, :]
    rstd = tl.load(rstds + by_group, exists, other=0.0)[None, :]
    x = tl.load(image + place, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gradient + place, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        y = x * factor + offset
        sigmoid = tl.sigmoid(y)
        g = g * sigmoid * (1 + y * (1 - sigmoid))
    return x - mean, rstd, g, factor


@triton.jit
def _gradient_sums(
    image,
    gradient,
    means,
    rstds,
    factors,
    offsets,
    sums,
    rows,
    channels,
    tiles,
    per_group,
    SILU: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Of every channel of a tile: sums of the gradient, alone and times the normalized image: [N, tiles, 2, C]."""
    place, inside, channel, exists, by_channel, by_group = _place(rows, channels, per_group, ROWS, CHANNELS)
    deviation, rstd, g, _ = _before_silu(
        image, gradient, means, rstds, factors, offsets, place, inside, exists, by_channel, by_group, SILU
    )
    out = sums + (tl.program_id(2).to(tl.int64) * tiles + tl.program_id(0)) * 2 * channels + channel
    tl.store(out, tl.sum(g, 0), mask=exists)
    tl.store(out + channels, tl.sum(g * deviation * rstd, 0), mask=exists)


@triton.jit
def _group_gradients(
    sums,
    weight,
    bias,
    scale_shift,
    rstds,
    removed,
    projected,
    to_parameters,
    to_scale_shift,
    rows,
    channels,
    tiles,
    per_group,
    SCALED: tl.constexpr,
    TILES: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Of one group of one sample: the gradients at weight and bias, to_parameters [N, 2, C], and at scale and shift;
    what the norm removes from the gradient at its input, see ``_input_gradient``, [N, groups]."""
    group, sample = tl.program_id(0), tl.program_id(1).to(tl.int64)
    inner = tl.arange(0, CHANNELS)
    exists = inner < per_group
    channel = group * per_group + inner
    to_offset = tl.zeros([CHANNELS], tl.float32)
    to_factor = tl.zeros([CHANNELS], tl.float32)
    for start in range(0, tiles, TILES):
        tile = start + tl.arange(0, TILES)
        inside = (tile < tiles)[:, None] & exists[None, :]
        place = sums + (sample * tiles + tile)[:, None] * 2 * channels + channel[None, :]
        to_offset += tl.sum(tl.load(place, inside, other=0.0), 0)
        to_factor += tl.sum(tl.load(place + channels, inside, other=0.0), 0)
    by_weight = tl.load(weight + channel, exists, other=0.0).to(tl.float32)
    out = sample * 2 * channels + channel
    scale = 1.0
    if SCALED:
        offset = tl.load(bias + channel, exists, other=0.0).to(tl.float32)
        scale = 1 + tl.load(scale_shift + out, exists, other=0.0).to(tl.float32)
        tl.store(to_scale_shift + out, by_weight * to_factor + offset * to_offset, mask=exists)
        tl.store(to_scale_shift + out + channels, to_offset, mask=exists)
        by_weight = by_weight * scale
    tl.store(to_parameters + out, scale * to_factor, mask=exists)
    tl.store(to_parameters + out + channels, scale * to_offset, mask=exists)
    by_group = sample * (channels // per_group) + group
    mean_of = tl.load(rstds + by_group) / (rows * per_group)
    tl.store(removed + by_group, mean_of * tl.sum(by_weight * to_offset))
    tl.store(projected + by_group, mean_of * tl.sum(by_weight * to_factor))


@triton.jit
def _input_gradient(
    image,
    gradient,
    means,
    rstds,
    factors,
    offsets,
    removed,
    projected,
    out,
    rows,
    channels,
    tiles,
    per_group,
    SILU: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """The gradient at the image: without its mean and its projection on the normalized image, both over a group."""
    place, inside, _, exists, by_channel, by_group = _place(rows, channels, per_group, ROWS, CHANNELS)
    deviation, rstd, g, factor = _before_silu(
        image, gradient, means, rstds, factors, offsets, place, inside, exists, by_channel, by_group, SILU
    )
    constant = tl.load(removed + by_group, exists, other=0.0)[None, :]
    slope = tl.load(projected + by_group, exists, other=0.0)[None, :]
    tl.store(out + place, (g * factor - constant - deviation * rstd * slope).to(out.dtype.element_ty), mask=inside)


class _Launch:
    """How an image [N, C, H, W] is divided among programs, for each tile of it or for each group of each sample.

    sizes: what every kernel is told.
    """

    def __init__(self, image: Tensor, groups: int):
        self.samples, self.channels, self.groups = len(image), image.shape[1], groups
        rows = image.shape[2:].numel()
        tiles, per_group = triton.cdiv(rows, ROWS), self.channels // groups
        self.sizes = {"rows": rows, "channels": self.channels, "tiles": tiles, "per_group": per_group}

    def by_tile(self, kernel: Any, *tensors: Tensor, **constants: bool) -> None:
        width = min(CHANNELS, triton.next_power_of_2(self.channels))
        programs = self.sizes["tiles"], triton.cdiv(self.channels, width), self.samples
        kernel[programs](*tensors, **self.sizes, **constants, ROWS=ROWS, CHANNELS=width)

    def by_group(self, kernel: Any, *tensors: Tensor | None, **constants: float) -> None:
        width = triton.next_power_of_2(self.sizes["per_group"])
        tiles = min(triton.next_power_of_2(self.sizes["tiles"]), max(1, SUMMED // width))  # added up at once
        programs = self.groups, self.samples
        kernel[programs](*tensors, **self.sizes, **constants, TILES=tiles, CHANNELS=width)

    def of_tiles(self, like: Tensor) -> Tensor:
        """For two numbers of every channel of every tile."""
        return like.new_empty((self.samples, self.sizes["tiles"], 2, self.channels))


def statistics(
    image: Tensor, weight: Tensor, bias: Tensor, scale_shift: Tensor | None, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Means and 1 / standard deviations [N, groups]; factors and offsets [N, C] of norm, scale and shift.

    image: [N, C, H, W], channels last and without gaps, as everywhere in this file; scale_shift: [N, 2 · C].
    """
    launch = _Launch(image, groups)
    moments = launch.of_tiles(weight)
    mean, rstd = weight.new_empty((2, len(image), groups))
    factor, offset = weight.new_empty((2, *image.shape[:2]))
    launch.by_tile(_moments, image, moments)
    found = mean, rstd, factor, offset
    scaled = scale_shift is not None
    launch.by_group(_statistics, moments, weight, bias, scale_shift, *found, eps=eps, SCALED=scaled, ROWS=ROWS)
    return found


def apply(image: Tensor, factor: Tensor, offset: Tensor, silu: bool) -> Tensor:
    """factor · image + offset, and a SiLU."""
    out = torch.empty_like(image)
    _Launch(image, 1).by_tile(_apply, image, factor, offset, out, SILU=silu)
    return out


def norm_gradients(
    image: Tensor,
    gradient: Tensor,
    weight: Tensor,
    bias: Tensor,
    scale_shift: Tensor | None,
    found: tuple[Tensor, Tensor, Tensor, Tensor],
    silu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients at image, weight, bias, and scale and shift.

    gradient: at the output, like the image; found: what ``statistics`` returned.
    """
    mean, rstd, *_ = found
    launch = _Launch(image, mean.shape[1])
    sums = launch.of_tiles(weight)
    launch.by_tile(_gradient_sums, image, gradient, *found, sums, SILU=silu)
    removed, projected = torch.empty_like(mean), torch.empty_like(mean)
    to_parameters = weight.new_empty((len(image), 2, image.shape[1]))
    to_scale_shift = None if scale_shift is None else torch.empty_like(scale_shift)
    results = removed, projected, to_parameters, to_scale_shift
    scaled = scale_shift is not None
    launch.by_group(_group_gradients, sums, weight, bias, scale_shift, rstd, *results, SCALED=scaled)
    to_image = torch.empty_like(image)
    launch.by_tile(_input_gradient, image, gradient, *found, removed, projected, to_image, SILU=silu)
    to_weight, to_bias = to_parameters.sum(0)
    return to_image, to_weight, to_bias, to_scale_shift
