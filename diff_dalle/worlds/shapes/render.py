"""Rendering scenes of the shapes world."""

from __future__ import annotations

import functools
import math

import numpy as np
from PIL import Image, ImageDraw

from ...randomness import random_uniform
from .scenes import BACKGROUNDS, COLORS, SIZES, Scene

_SUPERSAMPLING = 8  # per axis: 64 sub-pixels, hence 65 levels of coverage
_GRAIN = 9.0  # amplitude of the uniform noise of grainy backgrounds, in levels of 255


def _star(points: int, inner: float, lift: float) -> tuple[tuple[float, float], ...]:
    """A star with one point up: corners alternate between the radii 1 and ``inner``. lift: offset along y."""
    radii = [1.0, inner] * points
    angles = [math.pi * (k / points - 0.5) for k in range(2 * points)]
    return tuple((r * math.cos(a), r * math.sin(a) + lift) for r, a in zip(radii, angles, strict=True))


_ARM = 0.36  # half the width of a cross's arm
# Corners in units of half the object's width, y downward. Circle and ring are drawn as ellipses.
OUTLINES = {
    "square": ((-0.92, -0.92), (0.92, -0.92), (0.92, 0.92), (-0.92, 0.92)),
    "triangle": ((0.0, -0.95), (1.0, 0.85), (-1.0, 0.85)),
    "cross": (
        (-_ARM, -1), (_ARM, -1), (_ARM, -_ARM), (1, -_ARM), (1, _ARM), (_ARM, _ARM),
        (_ARM, 1), (-_ARM, 1), (-_ARM, _ARM), (-1, _ARM), (-1, -_ARM), (-_ARM, -_ARM),
    ),
    "star": _star(5, 0.42, 0.08),
}  # fmt: skip
_HOLE = 0.52  # inner radius of a ring


def coverage(shape: str, half_width: float, x: float, y: float, height: int, width: int) -> np.ndarray:
    """Fraction of each pixel that an object covers: [height, width] float32 in [0, 1].

    half_width: half the object's width; x, y: its center; in pixels from the upper left corner of the image.
    """
    scale = _SUPERSAMPLING
    canvas = Image.new("L", (width * scale, height * scale))
    draw = ImageDraw.Draw(canvas)

    def corner(u: float, v: float) -> tuple[float, float]:
        # Pillow's coordinates refer to pixel centers, hence the half.
        return (x + u * half_width) * scale - 0.5, (y + v * half_width) * scale - 0.5

    if shape in OUTLINES:
        draw.polygon([corner(u, v) for u, v in OUTLINES[shape]], fill=255)
    else:
        draw.ellipse([*corner(-1, -1), *corner(1, 1)], fill=255)
        if shape == "ring":
            draw.ellipse([*corner(-_HOLE, -_HOLE), *corner(_HOLE, _HOLE)], fill=0)
    return np.asarray(canvas.reduce(scale), dtype=np.float32) / 255


@functools.lru_cache(maxsize=8)
def _ramps(height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """x and y of every pixel center, from -1 at one edge to 1 at the other: [1, W, 1] and [H, 1, 1]."""
    across, down = ((2 * np.arange(side, dtype=np.float32) + 1) / side - 1 for side in (width, height))
    return across[None, :, None], down[:, None, None]


def render(scene: Scene, size: int | tuple[int, int] = 32) -> np.ndarray:
    """The image of a scene, with antialiased edges: [height, width, 3] uint8.

    size: height and width in pixels, one number if they are equal. Objects are as large as in a square image whose
    sides are the shorter one.
    """
    height, width = (size, size) if isinstance(size, int) else size
    image = np.empty((height, width, 3), dtype=np.float32)
    image[:] = BACKGROUNDS[scene.background]
    if scene.texture == "gradient":
        across, down = _ramps(height, width)
        image += scene.slope[0] * across + scene.slope[1] * down
    elif scene.texture == "grainy":
        noise = random_uniform(scene.grain, "shapes grain", np.arange(height * width)).reshape(height, width, 1)
        image += ((2 * noise - 1) * _GRAIN).astype(np.float32)
    for item in scene.objects:
        half_width = SIZES[item.size] * min(height, width)
        mask = coverage(item.shape, half_width, item.x * width, item.y * height, height, width)[..., None]
        image += mask * (np.array(COLORS[item.color], dtype=np.float32) - image)
    return np.clip(image + 0.5, 0, 255).astype(np.uint8)
