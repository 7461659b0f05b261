"""A network on a large image, one tile after another: memory follows the tile, not the image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..batch import Conditioning
from ..errors import InputError
from .forward_process import full_precision
from .gaussian_diffusion import Model


class Tiled(nn.Module):
    """A network evaluated on overlapping tiles whose outputs fade into one another (after MultiDiffusion, Bar-Tal et
    al. 2023). It takes the network's place in sampling; for up-samplers, whose decisions are local.

    model:   the network, called as ``model(x, t, cond=…)``.
    tile:    side of a tile in pixels. An image no larger goes through the network whole.
    overlap: pixels that neighbouring tiles share. A quarter of it at either side counts for nothing, so a network whose
             outputs depend on no pixel further away gives what it would give for the whole image. What it computes
             over the whole image (statistics of norms, attention) it now computes over a tile.
    divisor: what the network needs sides to be multiples of; tiles start at its multiples.

    An image takes rows × columns evaluations, each side being covered by ⌈(side − overlap) / (tile − overlap)⌉ tiles.
    Raises InputError as ``check_tiles``.
    """

    def __init__(self, model: Model, tile: int, overlap: int, divisor: int):
        super().__init__()
        check_tiles(tile, overlap, divisor)
        self.model, self.tile, self.overlap, self.divisor = model, tile, overlap, divisor
        self._weights: dict[tuple[int, torch.device], Tensor] = {}

    def encode_text(self, cond: Conditioning) -> Conditioning:
        """As the network does it: once for all tiles."""
        return self.model.encode_text(cond)

    def forward(self, x: Tensor, t: Tensor, cond: Conditioning | None = None) -> Tensor:
        """x: [N, C, H, W]; t: [N]. Returns [N, C or more, H, W], of several tiles at least float32.

        ``cond.low_res`` is enlarged bilinearly to x's size, then cut like x: enlarged tile by tile, it would differ at
        the tiles' borders. Raises InputError when x is larger than a tile and ``divisor`` does not divide its sides.
        """
        height, width = x.shape[2:]
        if max(height, width) <= self.tile:
            return self.model(x, t, cond=cond)
        if height % self.divisor or width % self.divisor:
            raise InputError(f"the image is {width}×{height}, but its sides must be multiples of {self.divisor}")
        low_res = None
        if cond is not None and cond.low_res is not None:
            low_res = F.interpolate(cond.low_res, (height, width), mode="bilinear", align_corners=False)

        output = None
        for top, row_weights in self._along(height, x.device):
            for left, column_weights in self._along(width, x.device):
                window = (..., slice(top, top + len(row_weights)), slice(left, left + len(column_weights)))
                part = cond if low_res is None else replace(cond, low_res=low_res[window])
                piece = full_precision(self.model(x[window], t, cond=part))
                if output is None:
                    output = piece.new_zeros(*piece.shape[:2], height, width)
                output[window] += piece * (row_weights[:, None] * column_weights)
        return output

    def _along(self, side: int, device: torch.device) -> list[tuple[int, Tensor]]:
        """Where each tile along a side starts, and its weights [tile]."""
        starts = tile_starts(side, self.tile, self.overlap)
        if (side, device) not in self._weights:
            self._weights[side, device] = tile_weights(side, starts, self.tile, self.overlap).to(device)
        return list(zip(starts, self._weights[side, device], strict=True))


def check_tiles(tile: int, overlap: int, divisor: int) -> None:
    """InputError for a tile or an overlap that is no multiple of ``divisor``, and an overlap as large as a tile."""
    for name, value, least in (("tile_size", tile, divisor), ("tile_overlap", overlap, 0)):
        if value < least or value % divisor:
            raise InputError(f"--{name} is {value}, but must be a multiple of {divisor}, at least {least}")
    if overlap >= tile:
        raise InputError(f"--tile_overlap is {overlap}, but must be smaller than --tile_size ({tile})")


def tile_starts(side: int, tile: int, overlap: int) -> list[int]:
    """Where tiles begin along a side of so many pixels. The last ends at the border, so it may overlap by more."""
    last = max(side - tile, 0)
    return [*range(0, last, tile - overlap), last]


def tile_weights(side: int, starts: Sequence[int], tile: int, overlap: int) -> Tensor:
    """[tiles, min(tile, side)] float32: how much each tile counts at each of its pixels; 1 in all at every pixel.

    In an overlap one tile fades linearly into the next over the middle half; the quarters beside it leave out pixels
    near a tile's end, whose neighbours beyond it the network did not see.
    """
    place = torch.arange(min(tile, side), dtype=torch.float64) + 0.5
    rising = ((place - overlap / 4) / (overlap / 2)).clamp(0, 1) if overlap else torch.ones_like(place)
    total, weights = torch.zeros(side, dtype=torch.float64), []
    for start in starts:
        end = start + len(place)
        weight = torch.ones_like(place) if start == 0 else rising
        weights.append(weight if end == side else torch.minimum(weight, rising.flip(0)))
        total[start:end] += weights[-1]
    # One tile's fall and the next one's rise add up to 1; only around the last, which may overlap by more, not yet.
    shares = [weight / total[start : start + len(place)] for start, weight in zip(starts, weights, strict=True)]
    return torch.stack(shares).float()
