"""Tiled evaluation of a network on a large image: memory depends on the tile, not on the image."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import EllipsisType
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..batch import SELF_COND, Conditioning
from ..config import Fault, InputError, named
from .process import at_least_float32
from .samplers import Model

Window = tuple[EllipsisType, slice, slice]  # of the last two dimensions


class Tiled(nn.Module):
    """A network evaluated on overlapping tiles with blended outputs (after MultiDiffusion, Bar-Tal et al. 2023).

    It replaces the network in sampling; for upsamplers, whose outputs depend on local content.

    model:   the network, called as ``model(x, t, cond=…)``.
    tile:    width and height of a tile in pixels. A smaller image is evaluated as a whole.
    overlap: pixels shared by neighboring tiles. The outer quarter at each end has weight 0, so a network with a
             receptive field of at most a quarter of the overlap returns the same as for the whole image. Statistics of
             norms and attention cover a tile instead of the image.
    divisor: required divisor of the network's height and width; tiles start at its multiples.
    patch:   pixels per position, in both directions, at which the network adds ``cond.semantic``; it divides
             ``divisor``.

    An image takes rows × columns evaluations, with ⌈(length − overlap) / (tile − overlap)⌉ tiles along each axis.
    Raises InputError as ``check_tiles``.
    """

    def __init__(self, model: nn.Module | Model, tile: int, overlap: int, divisor: int, patch: int = 1):
        super().__init__()
        check_tiles(tile, overlap, divisor)
        self.model, self.tile, self.overlap, self.divisor, self.patch = model, tile, overlap, divisor, patch
        self.self_conditioned = getattr(model, "self_conditioned", False)
        self._weights: dict[tuple[int, torch.device], Tensor] = {}

    def encode_text(self, cond: Conditioning) -> Conditioning:
        """The network's own, once for all tiles."""
        encode_text = cast("Callable[[Conditioning], Conditioning]", cast("nn.Module", self.model).encode_text)
        return encode_text(cond)

    def forward(self, x: Tensor, t: Tensor, cond: Conditioning | None = None) -> Tensor:
        """x: [N, C, H, W]; t: [N]. Returns [N, C or more, H, W], of several tiles at least float32.

        ``cond.low_res`` is upsampled bilinearly to x's size, then cut like x: upsampled tile by tile, it would differ
        at the tiles' borders. So is ``cond.semantic``, with aligned corners, in patches; ``cond.known`` is cut. Raises
        InputError if x is larger than a tile and ``divisor`` does not divide its height and width.
        """
        height, width = x.shape[2:]
        if max(height, width) <= self.tile:
            return self.model(x, t, cond=cond)
        if height % self.divisor or width % self.divisor:
            raise InputError(f"the image is {width}×{height}, but both must be multiples of {self.divisor}")
        whole = cond or Conditioning()
        if whole.low_res is not None:
            low_res = F.interpolate(whole.low_res, (height, width), mode="bilinear", align_corners=False)
            whole = replace(whole, low_res=low_res)
        if whole.semantic is not None:
            positions = height // self.patch, width // self.patch
            semantic = F.interpolate(whole.semantic, positions, mode="bilinear", align_corners=True)
            whole = replace(whole, semantic=semantic)

        output: Tensor | None = None
        for top, row_weights in self._along(height, x.device):
            for left, column_weights in self._along(width, x.device):
                window = ..., slice(top, top + len(row_weights)), slice(left, left + len(column_weights))
                part = None if cond is None else self._cut(whole, window)
                piece = at_least_float32(self.model(x[window], t, cond=part))
                if output is None:
                    output = piece.new_zeros(*piece.shape[:2], height, width)
                output[window] += piece * (row_weights[:, None] * column_weights)
        assert output is not None  # there is at least one tile
        return output

    def _cut(self, cond: Conditioning, window: Window) -> Conditioning:
        """The conditions of a tile."""
        if cond.low_res is not None:
            cond = replace(cond, low_res=cond.low_res[window])
        if cond.known is not None:
            cond = replace(cond, known=cond.known[window])
        if cond.semantic is not None:
            rows, columns = (slice(each.start // self.patch, each.stop // self.patch) for each in window[1:])
            cond = replace(cond, semantic=cond.semantic[..., rows, columns])
        if SELF_COND in cond.extra:
            cond = replace(cond, extra={**cond.extra, SELF_COND: cond.extra[SELF_COND][window]})
        return cond

    def _along(self, length: int, device: torch.device) -> list[tuple[int, Tensor]]:
        """The start of each tile along an axis, and its weights [tile]."""
        starts = tile_starts(length, self.tile, self.overlap)
        if (length, device) not in self._weights:
            self._weights[length, device] = tile_weights(length, starts, self.tile, self.overlap).to(device)
        return list(zip(starts, self._weights[length, device], strict=True))


def check_tiles(tile: int, overlap: int, divisor: int) -> None:
    """InputError unless tile and overlap are multiples of ``divisor``, and the overlap is smaller than the tile."""
    for name, value, least in (("tile_size", tile, divisor), ("tile_overlap", overlap, 0)):
        if value < least or value % divisor:
            raise InputError(Fault(name, f"must be a multiple of {divisor}, at least {least}", value))
    if overlap >= tile:
        raise InputError(Fault("tile_overlap", f"must be smaller than {named('tile_size')} ({tile})", overlap))


def tile_starts(length: int, tile: int, overlap: int) -> list[int]:
    """The starts of the tiles along an axis, in pixels. The last tile ends at the border, so it may overlap by more."""
    last = max(length - tile, 0)
    return [*range(0, last, tile - overlap), last]


def tile_weights(length: int, starts: Sequence[int], tile: int, overlap: int) -> Tensor:
    """[tiles, min(tile, length)] float32: the weight of each tile at each of its pixels; they sum to 1 at every pixel.

    Tiles are blended linearly over the middle half of an overlap; in its outer quarters, pixels near a tile's end,
    whose neighbors outside the tile the network did not see, have weight 0.
    """
    position = torch.arange(min(tile, length), dtype=torch.float64) + 0.5
    rising = ((position - overlap / 4) / (overlap / 2)).clamp(0, 1) if overlap else torch.ones_like(position)
    total = torch.zeros(length, dtype=torch.float64)
    weights: list[Tensor] = []
    for start in starts:
        end = start + len(position)
        weight = torch.ones_like(position) if start == 0 else rising
        weights.append(weight if end == length else torch.minimum(weight, rising.flip(0)))
        total[start:end] += weights[-1]
    # Two neighbors' weights sum to 1, except around the last tile, which may overlap by more.
    shares = [weight / total[start : start + len(position)] for start, weight in zip(starts, weights, strict=True)]
    return torch.stack(shares).float()
