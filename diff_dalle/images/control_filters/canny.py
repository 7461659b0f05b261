"""Edges after Canny (1986), with the same pixels as OpenCV's ``Canny`` of 8-bit pictures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from ...config import Fault, named, option, settings
from ...config.bounds import MAX_SIDE
from ...randomness import Draw
from .contract import ControlFilter

TANGENT_SHIFT = 15
TANGENT = 13573  # tan(22.5°) · 2^15, as OpenCV rounds it
PIXELS = 16  # by which edges grow before another device than the CPU is asked, and waited for, whether they still do
RESIZE_FORMS = ("ratio", "square")


@settings
class CannyParams:
    """Canny edges"""

    resize: int = option(
        224,
        "shorter side in pixels to which pictures are resized first; 0 = not resized",
        least=8,
        besides=(0,),
        most=MAX_SIDE,
    )
    resize_form: str = option(
        "ratio",
        "ratio = antialiased, with the picture's ratio; square = as for published ControlNets: squashed to a square, "
        "without antialiasing, levels rounded down",
        choices=RESIZE_FORMS,
    )
    low: int = option(100, "gradient above which edges continue, in 8-bit levels", least=0)
    high: int = option(200, "gradient above which edges start, in 8-bit levels")

    def faults(self) -> Iterator[Fault]:
        if self.low > self.high:
            yield Fault.of(self, "low", f"must be at most {named('high')} ({self.high})")


class CannyFilter(ControlFilter):
    """One channel: 1 on edges, else 0; in between where it is resized."""

    params = CannyParams
    published: ClassVar[Mapping[str, Any]] = {"resize_form": "square"}
    config: CannyParams
    channels = 1

    def __call__(self, pictures: Tensor, draw: Draw, masks: Tensor | None = None) -> Tensor:
        height, width = pictures.shape[2:]
        resize, is_square = self.config.resize, self.config.resize_form == "square"
        small, shorter = pictures, min(height, width)
        if resize:
            ratio = [round(length * resize / shorter) for length in (height, width)]
            size = [resize, resize] if is_square else ratio
            small = F.interpolate(pictures, size, mode="bilinear", antialias=not is_square)
        levels = (255 * small).floor() if is_square else (255 * small).round()
        edges = canny_edges(levels.clamp(0, 255).int(), self.config.low, self.config.high).float()
        return F.interpolate(edges, (height, width), mode="bilinear") if resize else edges


def canny_edges(pictures: Tensor, low: int, high: int) -> Tensor:
    """8-bit levels, int32 [N, C, H, W] → edges, bool [N, 1, H, W].

    Gradients by Sobel's 3×3 operator, of the channel where |dx| + |dy| is largest; thinned to maxima across the edge in
    four directions; those above ``high``, and those above ``low`` that are connected to them.
    """
    dx, dy = _sobel(pictures)
    size = dx.abs() + dy.abs()
    order = torch.arange(size.shape[1], device=size.device)[:, None, None]
    channel = (size * len(order) - order).argmax(1, keepdim=True)  # the first of several maxima
    dx, dy, size = (each.gather(1, channel) for each in (dx, dy, size))
    candidates = _thinned(dx, dy, size) & (size > low)
    return grown(candidates & (size > high), candidates, 1 if pictures.device.type == "cpu" else PIXELS)


def grown(edges: Tensor, candidates: Tensor, pixels: int) -> Tensor:
    """The edges with all candidates that are connected to them; bool [N, 1, H, W]. Whether there are any more is asked
    once for so many pixels of growth."""
    while True:
        before = edges
        for _ in range(pixels):
            edges = F.max_pool2d(edges.float(), 3, 1, 1).bool() & candidates
        if torch.equal(edges, before):
            return edges


def _sobel(pictures: Tensor) -> tuple[Tensor, Tensor]:
    """Derivatives to the right and down, int32 of the same shape; the border is repeated."""
    x = F.pad(pictures.float(), (1, 1, 1, 1), mode="replicate").int()
    down = x[:, :, :-2] + 2 * x[:, :, 1:-1] + x[:, :, 2:]  # smoothed down
    right = x[..., :-2] + 2 * x[..., 1:-1] + x[..., 2:]  # smoothed to the right
    return down[..., 2:] - down[..., :-2], right[:, :, 2:] - right[:, :, :-2]


def _thinned(dx: Tensor, dy: Tensor, size: Tensor) -> Tensor:
    """Where the gradient is larger than before the pixel and not smaller than after it, along its direction."""
    padded, (height, width) = F.pad(size, (1, 1, 1, 1)), size.shape[2:]

    def beside(row: int, column: int) -> Tensor:
        return padded[:, :, 1 + row : 1 + row + height, 1 + column : 1 + column + width]

    x, y = dx.abs().long(), dy.abs().long() << TANGENT_SHIFT
    flat = x * TANGENT  # below this an angle is less than 22.5°
    steep = flat + (x << (TANGENT_SHIFT + 1))  # above this it is more than 67.5°, whose tangent is larger by 2
    across = (size > beside(0, -1)) & (size >= beside(0, 1))
    along = (size > beside(-1, 0)) & (size >= beside(1, 0))
    falling = (size > beside(-1, -1)) & (size > beside(1, 1))
    rising = (size > beside(-1, 1)) & (size > beside(1, -1))
    diagonal = torch.where((dx ^ dy) < 0, rising, falling)
    return torch.where(y < flat, across, torch.where(y > steep, along, diagonal))
