"""Which coloured shapes are in a picture: rendered templates fitted by least squares.

The parser sees pixels only, never a caption. A smooth background is fitted to the picture's border; then, one after
another, the template (shape, size, place) that explains most of what the background leaves over is taken out, in the
colour that fits best. Where two candidates compete the better explanation of all the pixels wins, so mild blur and
noise lower the quality of a fit and hardly ever change its answer.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import InputError
from .render import coverage
from .scenes import COLOURS, POSITIONS, SHAPES, SIZES

SIDE = 32  # pictures of any other size are resized to it: enough for every shape, and fast
MOST_THINGS = 4  # one more than the world draws, so that a surplus thing is noticed
LEAST_FIT = 0.7  # fraction of the energy around a thing that it must explain; clean renders explain 0.83 and more
LEAST_CONTRAST = 45.0  # levels between a thing and its background; the world's least is 100
MOST_OFF_COLOUR = 75.0  # levels between a thing and the nearest colour of the palette

_HOPELESS = 0.4  # a fit this poor is dropped before the others are refined: it explains their edges, or texture
_SAME_PLACE = 0.75  # of a half width: centres this near are one thing, caught twice because it lies between pixels
_MARGIN = 2.0  # pixels around a thing that its fit is judged on
_MOST_NOISE = 20.0  # standard deviation in levels that is forgiven as noise
_CHUNK = 64  # pictures at once: the largest array has 5 MB


@dataclass(frozen=True)
class Found:
    """A thing in a picture.

    colour:   the nearest of the palette, or ``other`` when none is near.
    position: the nearest of all nine, whichever the world uses.
    x, y:     its centre as a fraction of the picture's width and height.
    fit:      fraction of the energy around it that it explains, noise apart, at most 1.
    """

    colour: str
    shape: str
    size: str
    position: str
    x: float
    y: float
    fit: float


@dataclass(frozen=True)
class Templates:
    """Every thing at every whole pixel where it lies inside the picture.

    masks: [T, SIDE²] coverage; energy: [T] sum of squared coverage; centres: [T, 2] x, y in pixels; halves: [T]
    half widths in pixels; names: (shape, size) of each.
    """

    masks: Tensor
    energy: Tensor
    centres: Tensor
    halves: Tensor
    names: tuple[tuple[str, str], ...]


@functools.cache
def templates() -> Templates:
    names, places, masks = [], [], []
    for shape, size in itertools.product(SHAPES, SIZES):
        half = SIZES[size] * SIDE
        line = np.arange(np.floor(half), np.ceil(SIDE - half) + 1)
        for x, y in itertools.product(line, line):
            names.append((shape, size))
            places.append((x, y, half))
            masks.append(coverage(shape, half, x, y, SIDE).ravel())
    stacked, place = torch.from_numpy(np.stack(masks)), torch.tensor(places, dtype=torch.float32)
    return Templates(stacked, stacked.square().sum(1), place[:, :2], place[:, 2], tuple(names))


def _pixels() -> Tensor:
    """[SIDE², 2] x and y of pixel centres, in pixels."""
    line = torch.arange(SIDE) + 0.5
    return torch.stack(torch.meshgrid(line, line, indexing="xy"), -1).reshape(-1, 2)


def _resized(images: np.ndarray) -> Tensor:
    """[N, H, W, 3] uint8 → [N, 3, SIDE, SIDE] float32 in 0..255."""
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3:
        raise InputError(f"pictures to parse must be [N, H, W, 3] uint8, not {images.shape} {images.dtype}")
    pictures = torch.from_numpy(np.ascontiguousarray(images)).permute(0, 3, 1, 2).float()
    if pictures.shape[2:] != (SIDE, SIDE):
        pictures = F.interpolate(pictures, (SIDE, SIDE), mode="bilinear", antialias=True, align_corners=False)
    return pictures


def background(pictures: Tensor) -> Tensor:
    """A plane per channel through the outermost two pixels, deaf to things that reach them: [N, 3, SIDE²].

    Iteratively reweighted least squares: what lies far from the plane, in units of the median, counts little.
    """
    xy = _pixels() / (SIDE / 2) - 1
    basis = torch.cat([torch.ones(len(xy), 1), xy], 1)
    outer = xy.abs().amax(1) > 1 - 2 / (SIDE / 2)
    rim, rim_basis = pictures.flatten(2)[:, :, outer], basis[outer]
    away = (rim - rim.median(2, keepdim=True).values).norm(dim=1)
    for _ in range(5):
        scale = 2 * away.median(1, keepdim=True).values.clamp(min=3.0)
        weights = (1 + (away / scale).square()).pow(-2)
        normal = torch.einsum("np,pi,pj->nij", weights, rim_basis, rim_basis)
        plane = torch.linalg.solve(normal, torch.einsum("np,pi,ncp->nic", weights, rim_basis, rim))
        away = (rim - torch.einsum("pi,nic->ncp", rim_basis, plane)).norm(dim=1)
    return torch.einsum("pi,nic->ncp", basis, plane)


def _noise_variance(pictures: Tensor) -> Tensor:
    """[N] variance of pixel noise per channel, from the median response to a mask blind to planes and edges.

    The mask is that of Immerkær, "Fast noise variance estimation" (1996); the median instead of its mean ignores the
    few pixels where an outline bends.
    """
    mask = torch.tensor([[1.0, -2.0, 1.0], [-2.0, 4.0, -2.0], [1.0, -2.0, 1.0]])  # sum of squares 36
    response = F.conv2d(pictures.flatten(0, 1)[:, None], mask[None, None]).abs()
    median = response.view(len(pictures), -1).median(1).values
    return (median / (6 * 0.6745)).clamp(max=_MOST_NOISE).square()  # 0.6745: median of |normal|


class _Explanation:
    """The things found so far in a chunk of pictures, and what they leave unexplained."""

    def __init__(self, left_over: Tensor, bank: Templates):
        n = len(left_over)
        self.bank = bank
        self.left_over = left_over  # [N, 3, P]
        self.chosen = torch.zeros(n, MOST_THINGS, dtype=torch.long)
        self.colours = torch.zeros(n, MOST_THINGS, 3)  # relative to the background; zero = no thing in this slot

    def drawn(self, slot: int, rows: Tensor) -> Tensor:
        return self.colours[rows, slot, :, None] * self.bank.masks[self.chosen[rows, slot]][:, None]

    def fit(self, slot: int, rows: Tensor) -> None:
        """Replace what is in this slot, in these pictures, by the template that now explains most."""
        free = self.left_over[rows] + self.drawn(slot, rows)
        overlap = (free.flatten(0, 1) @ self.bank.masks.T).view(len(rows), 3, len(self.bank.energy))
        best = (overlap.square().sum(1) / self.bank.energy).argmax(1)
        colour = overlap.gather(2, best[:, None, None].expand(-1, 3, 1)).squeeze(2) / self.bank.energy[best, None]
        colour[colour.norm(dim=1) < LEAST_CONTRAST] = 0
        self.chosen[rows, slot], self.colours[rows, slot] = best, colour
        self.left_over[rows] = free - self.drawn(slot, rows)

    def remove(self, slot: int, rows: Tensor) -> None:
        self.left_over[rows] += self.drawn(slot, rows)
        self.colours[rows, slot] = 0

    def present(self, slot: int) -> Tensor:
        return self.colours[:, slot].any(1).nonzero().squeeze(1)

    def repeated(self, slot: int) -> Tensor:
        """[N] bool: an earlier slot holds a thing at the same place."""
        centres, halves = self.bank.centres[self.chosen], self.bank.halves[self.chosen]
        offset = (centres[:, :slot] - centres[:, slot : slot + 1]).abs().amax(2)
        return ((offset < _SAME_PLACE * halves[:, :slot]) & self.colours[:, :slot].any(2)).any(1)

    def quality(self, slot: int, noise: Tensor) -> Tensor:
        """[N] fraction of the energy around each thing that it explains, noise apart."""
        chosen = self.chosen[:, slot]
        offset = (_pixels()[None] - self.bank.centres[chosen][:, None]).abs().amax(2)
        near = (offset <= self.bank.halves[chosen][:, None] + _MARGIN).float()
        forgiven = 3 * noise * near.sum(1)
        with_thing = self.left_over + self.drawn(slot, torch.arange(len(chosen)))
        before, after = ((rest.square().sum(1) * near).sum(1) - forgiven for rest in (with_thing, self.left_over))
        return 1 - after.clamp(min=0) / before.clamp(min=1)


def _describe(name: tuple[str, str], centre: Tensor, tone: Tensor, fit: float) -> Found:
    """A template in words. tone: [3] sRGB levels."""
    palette = torch.tensor(list(COLOURS.values()), dtype=torch.float32)
    away, nearest = (palette - tone).norm(dim=1).min(0)
    colour = list(COLOURS)[int(nearest)] if away <= MOST_OFF_COLOUR else "other"
    x, y = (centre / SIDE).tolist()
    position = min(POSITIONS, key=lambda name: math.dist(POSITIONS[name], (x, y)))
    return Found(colour, *name, position, x, y, fit)


def _parse_chunk(pictures: Tensor) -> list[list[Found]]:
    bank, behind, noise = templates(), background(pictures), _noise_variance(pictures)
    found = _Explanation(pictures.flatten(2) - behind, bank)
    rows = torch.arange(len(pictures))
    for slot in range(MOST_THINGS):
        found.fit(slot, rows)
        rows = found.present(slot)
    for slot in range(MOST_THINGS):
        spurious = (found.quality(slot, noise) < _HOPELESS) | found.repeated(slot)
        found.remove(slot, spurious.nonzero().squeeze(1))
    for slot in range(MOST_THINGS):
        found.fit(slot, found.present(slot))
    fits = torch.stack([found.quality(slot, noise) for slot in range(MOST_THINGS)], 1)
    good = found.colours.any(2) & (fits >= LEAST_FIT)
    results: list[list[Found]] = [[] for _ in range(len(pictures))]
    for n, slot in good.nonzero().tolist():
        chosen = int(found.chosen[n, slot])
        centre = bank.centres[chosen]
        x, y = centre.long().clamp(max=SIDE - 1).tolist()
        tone = found.colours[n, slot] + behind[n, :, y * SIDE + x]
        results[n].append(_describe(bank.names[chosen], centre, tone, float(fits[n, slot])))
    return results


def parse_shapes(images: np.ndarray) -> list[list[Found]]:
    """The things in each picture, the one that explains most first.

    images: [N, H, W, 3] uint8. A picture that shapes on a smooth background do not explain yields an empty list.
    """
    return [things for chunk in _resized(images).split(_CHUNK) for things in _parse_chunk(chunk)]
