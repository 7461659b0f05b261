"""Object detection in images of the shapes world: rendered templates fitted by least squares.

The parser reads pixels only, never a caption. It fits a smooth background to the image's border. Then it repeatedly
subtracts the template (shape, size, position), in its best-fitting color, that explains most of the residual. Competing
templates are compared on all pixels, so mild blur and noise lower the quality of a fit but rarely change the answer.
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

from ...config import InputError
from .render import coverage
from .scenes import COLORS, POSITIONS, SHAPES, SIZES, SceneObject

SIDE = 32  # to which the shorter sides of all images are resized: enough for every shape, and fast
MAX_RATIO = 4.0  # of the longer side to the shorter: the templates grow with its square
MAX_OBJECTS = 4  # one more than a scene contains, so that a surplus object is detected
MIN_FIT = 0.7  # fraction of the energy around an object that its template must explain; clean renders reach 0.83
MIN_CONTRAST = 45.0  # levels between an object and its background; the minimum in the shapes world is 100
MAX_COLOR_DISTANCE = 75.0  # levels between an object's color and the nearest of the palette

_DROP_FIT = 0.4  # a poorer fit explains edges of other objects, or texture: dropped before the others are refined
_SAME_POSITION = 0.75  # half widths; closer centers are one object between two pixels, detected twice
_MARGIN = 2.0  # pixels around an object that count toward its fit
_MAX_NOISE = 20.0  # standard deviation, in levels, up to which noise is discounted
_CHUNK = 64  # images per chunk: the largest array takes 5 MB


@dataclass(frozen=True)
class DetectedObject(SceneObject):
    """A detected object.

    color:    the nearest of the palette, or ``other`` when none is near.
    position: the nearest of all nine, whichever the world uses.
    fit:      fraction of the energy around it that its template explains, discounting noise; at most 1.
    """

    fit: float


@dataclass(frozen=True)
class Templates:
    """Every shape and size, centered on every whole pixel at which it lies inside an image of P = height × width.

    masks: [T, P] coverage; energy: [T] sum of squared coverage; centers: [T, 2] x, y in pixels; half_widths: [T] in
    pixels; names: (shape, size) of each.
    """

    height: int
    width: int
    masks: Tensor
    energy: Tensor
    centers: Tensor
    half_widths: Tensor
    names: tuple[tuple[str, str], ...]


@functools.lru_cache(maxsize=3)
def templates(height: int = SIDE, width: int = SIDE) -> Templates:
    names, geometry, masks = [], [], []
    for shape, size in itertools.product(SHAPES, SIZES):
        half_width = SIZES[size] * SIDE
        reach = math.ceil(half_width)
        drawn = coverage(shape, half_width, reach, reach, 2 * reach, 2 * reach)  # the same around every whole pixel
        across, down = (range(math.floor(half_width), side - math.floor(half_width) + 1) for side in (width, height))
        for x, y in itertools.product(across, down):
            names.append((shape, size))
            geometry.append((x, y, half_width))
            canvas = np.zeros((height + 2 * reach, width + 2 * reach), dtype=np.float32)
            canvas[y : y + 2 * reach, x : x + 2 * reach] = drawn
            masks.append(canvas[reach:-reach, reach:-reach].ravel())
    stacked, placed = torch.from_numpy(np.stack(masks)), torch.tensor(geometry, dtype=torch.float32)
    return Templates(height, width, stacked, stacked.square().sum(1), placed[:, :2], placed[:, 2], tuple(names))


def _pixels(height: int, width: int) -> Tensor:
    """[height * width, 2] x and y of the pixel centers, in pixels."""
    across, down = (torch.arange(side) + 0.5 for side in (width, height))
    return torch.stack(torch.meshgrid(across, down, indexing="xy"), -1).reshape(-1, 2)


def _resized(images: np.ndarray) -> Tensor:
    """[N, H, W, 3] uint8 → [N, 3, h, w] float32 in 0..255, whose shorter side is SIDE."""
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3:
        raise InputError(f"images to parse must be [N, H, W, 3] uint8, not {list(images.shape)} {images.dtype}")
    height, width = images.shape[1:3]
    shorter = min(height, width)
    if max(height, width) > MAX_RATIO * shorter:
        raise InputError(f"images to parse are {width}×{height}, but the ratio of sides must be at most {MAX_RATIO:g}")
    pixels = torch.from_numpy(np.ascontiguousarray(images)).permute(0, 3, 1, 2).float()
    size = (round(SIDE * height / shorter), round(SIDE * width / shorter))
    if pixels.shape[2:] != size:
        pixels = F.interpolate(pixels, size, mode="bilinear", antialias=True, align_corners=False)
    return pixels


def background(images: Tensor) -> Tensor:
    """A plane per channel, fitted robustly to the outermost two pixels: [N, 3, h, w] → [N, 3, h * w].

    Iteratively reweighted least squares: pixels far from the plane, in units of the median distance, such as those of
    objects that reach the border, have a low weight.
    """
    half = torch.tensor([images.shape[3] / 2, images.shape[2] / 2])
    xy = _pixels(*images.shape[2:]) / half - 1
    basis = torch.cat([torch.ones(len(xy), 1), xy], 1)
    outer = (xy.abs() > 1 - 2 / half).any(1)
    rim, rim_basis = images.flatten(2)[:, :, outer], basis[outer]
    distance = (rim - rim.median(2, keepdim=True).values).norm(dim=1)
    for _ in range(5):
        scale = 2 * distance.median(1, keepdim=True).values.clamp(min=3.0)
        weights = (1 + (distance / scale).square()).pow(-2)
        normal = torch.einsum("np,pi,pj->nij", weights, rim_basis, rim_basis)
        plane = torch.linalg.solve(normal, torch.einsum("np,pi,ncp->nic", weights, rim_basis, rim))
        distance = (rim - torch.einsum("pi,nic->ncp", rim_basis, plane)).norm(dim=1)
    return torch.einsum("pi,nic->ncp", basis, plane)


def _noise_variance(images: Tensor) -> Tensor:
    """[N] variance of the pixel noise per channel, from the median response of a filter that cancels planes and edges.

    The filter is that of Immerkær, "Fast noise variance estimation" (1996); the median, instead of the mean, ignores
    the few pixels at corners.
    """
    mask = torch.tensor([[1.0, -2.0, 1.0], [-2.0, 4.0, -2.0], [1.0, -2.0, 1.0]])  # sum of squares 36
    response = F.conv2d(images.flatten(0, 1)[:, None], mask[None, None]).abs()
    median = response.view(len(images), -1).median(1).values
    return (median / (6 * 0.6745)).clamp(max=_MAX_NOISE).square()  # 0.6745: median of |N(0, 1)|


class _Fit:
    """The objects fitted so far to a chunk of images, and the residual. Each image has MAX_OBJECTS slots."""

    def __init__(self, residual: Tensor, bank: Templates):
        n = len(residual)
        self.bank, self.pixels = bank, _pixels(bank.height, bank.width)
        self.residual = residual  # [N, 3, P]
        self.template = torch.zeros(n, MAX_OBJECTS, dtype=torch.long)
        self.colors = torch.zeros(n, MAX_OBJECTS, 3)  # relative to the background; zero = an empty slot

    def rendered(self, slot: int, rows: Tensor) -> Tensor:
        """[R, 3, P]: the object in this slot of these images."""
        return self.colors[rows, slot, :, None] * self.bank.masks[self.template[rows, slot]][:, None]

    def update(self, slot: int, rows: Tensor) -> None:
        """Refit this slot in these images with the template that now explains most."""
        target = self.residual[rows] + self.rendered(slot, rows)
        overlap = (target.flatten(0, 1) @ self.bank.masks.T).view(len(rows), 3, len(self.bank.energy))
        best = (overlap.square().sum(1) / self.bank.energy).argmax(1)
        color = overlap.gather(2, best[:, None, None].expand(-1, 3, 1)).squeeze(2) / self.bank.energy[best, None]
        color[color.norm(dim=1) < MIN_CONTRAST] = 0
        self.template[rows, slot], self.colors[rows, slot] = best, color
        self.residual[rows] = target - self.rendered(slot, rows)

    def remove(self, slot: int, rows: Tensor) -> None:
        self.residual[rows] += self.rendered(slot, rows)
        self.colors[rows, slot] = 0

    def occupied(self, slot: int) -> Tensor:
        """Indices of the images with an object in this slot."""
        return self.colors[:, slot].any(1).nonzero().squeeze(1)

    def repeated(self, slot: int) -> Tensor:
        """[N] bool: an earlier slot has an object at the same position."""
        centers, half_widths = self.bank.centers[self.template], self.bank.half_widths[self.template]
        offset = (centers[:, :slot] - centers[:, slot : slot + 1]).abs().amax(2)
        return ((offset < _SAME_POSITION * half_widths[:, :slot]) & self.colors[:, :slot].any(2)).any(1)

    def quality(self, slot: int, noise: Tensor) -> Tensor:
        """[N] fraction of the energy around each object that it explains, discounting noise of variance ``noise``."""
        template = self.template[:, slot]
        offset = (self.pixels[None] - self.bank.centers[template][:, None]).abs().amax(2)
        near = (offset <= self.bank.half_widths[template][:, None] + _MARGIN).float()
        discount = 3 * noise * near.sum(1)
        with_object = self.residual + self.rendered(slot, torch.arange(len(template)))
        before, after = ((rest.square().sum(1) * near).sum(1) - discount for rest in (with_object, self.residual))
        return 1 - after.clamp(min=0) / before.clamp(min=1)


def _describe(name: tuple[str, str], center: Tensor, rgb: Tensor, fit: float) -> DetectedObject:
    """name: shape and size; center: [2], fractions of width and height; rgb: [3] sRGB levels."""
    palette = torch.tensor(list(COLORS.values()), dtype=torch.float32)
    distance, nearest = (palette - rgb).norm(dim=1).min(0)
    color = list(COLORS)[int(nearest)] if distance <= MAX_COLOR_DISTANCE else "other"
    x, y = center.tolist()
    position = min(POSITIONS, key=lambda name: math.dist(POSITIONS[name], (x, y)))
    return DetectedObject(color, *name, position, x, y, fit)


def _parse_chunk(images: Tensor) -> list[list[DetectedObject]]:
    bank, plane, noise = templates(*images.shape[2:]), background(images), _noise_variance(images)
    fit = _Fit(images.flatten(2) - plane, bank)
    rows = torch.arange(len(images))
    for slot in range(MAX_OBJECTS):
        fit.update(slot, rows)
        rows = fit.occupied(slot)
    for slot in range(MAX_OBJECTS):
        spurious = (fit.quality(slot, noise) < _DROP_FIT) | fit.repeated(slot)
        fit.remove(slot, spurious.nonzero().squeeze(1))
    for slot in range(MAX_OBJECTS):
        fit.update(slot, fit.occupied(slot))
    qualities = torch.stack([fit.quality(slot, noise) for slot in range(MAX_OBJECTS)], 1)
    detected = fit.colors.any(2) & (qualities >= MIN_FIT)
    results: list[list[DetectedObject]] = [[] for _ in range(len(images))]
    for n, slot in detected.nonzero().tolist():
        template = int(fit.template[n, slot])
        center, last = bank.centers[template], torch.tensor([bank.width - 1, bank.height - 1])
        x, y = torch.minimum(center.long(), last).tolist()
        rgb = fit.colors[n, slot] + plane[n, :, y * bank.width + x]
        place = center / torch.tensor([bank.width, bank.height])
        results[n].append(_describe(bank.names[template], place, rgb, float(qualities[n, slot])))
    return results


def parse_shapes(images: np.ndarray) -> list[list[DetectedObject]]:
    """The objects in each image, by decreasing explained energy.

    images: [N, H, W, 3] uint8. An image that is not explained by shapes on a smooth background yields an empty list.
    Raises InputError for arrays of the wrong type or shape, and for images more than MAX_RATIO times longer than wide.
    """
    return [objects for chunk in _resized(images).split(_CHUNK) for objects in _parse_chunk(chunk)]
