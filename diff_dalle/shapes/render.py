"""Scenes of the shapes world as pictures."""

from __future__ import annotations

import functools
import math

import numpy as np
from PIL import Image, ImageDraw

from ..randomness import random_uniform
from .scenes import BACKGROUNDS, COLOURS, SIZES, Scene

_SUPERSAMPLING = 8  # a side; 64 sub-pixels give 65 shades of an edge
_GRAIN = 9.0  # half the width of the grainy texture's uniform noise, in levels of 255


def _regular(points: int, inner: float, lift: float) -> tuple[tuple[float, float], ...]:
    """A star (or polygon) with one point up: corners at radius 1 and, between them, ``inner``."""
    radii = [1.0, inner] * points
    angles = [math.pi * (k / points - 0.5) for k in range(2 * points)]
    return tuple((r * math.cos(a), r * math.sin(a) + lift) for r, a in zip(radii, angles, strict=True))


_ARM = 0.36  # half the width of a cross's arm
# Corners in units of half the object's width, y downwards. Circle and ring are drawn as ellipses.
OUTLINES = {
    "square": ((-0.92, -0.92), (0.92, -0.92), (0.92, 0.92), (-0.92, 0.92)),
    "triangle": ((0.0, -0.95), (1.0, 0.85), (-1.0, 0.85)),
    "cross": (
        (-_ARM, -1), (_ARM, -1), (_ARM, -_ARM), (1, -_ARM), (1, _ARM), (_ARM, _ARM),
        (_ARM, 1), (-_ARM, 1), (-_ARM, _ARM), (-1, _ARM), (-1, -_ARM), (-_ARM, -_ARM),
    ),
    "star": _regular(5, 0.42, 0.08),
}  # fmt: skip
_HOLE = 0.52  # inner radius of a ring


def coverage(shape: str, half_width: float, x: float, y: float, image_size: int) -> np.ndarray:
    """How much of each pixel an object covers: [image_size, image_size] float32 in [0, 1].

    half_width, x, y: in pixels, from the upper left corner of the upper left pixel.
    """
    scale, side = _SUPERSAMPLING, image_size * _SUPERSAMPLING
    canvas = Image.new("L", (side, side))
    draw = ImageDraw.Draw(canvas)

    def corner(u: float, v: float) -> tuple[float, float]:
        # Pillow's coordinates name pixel centres, hence the half.
        return (x + u * half_width) * scale - 0.5, (y + v * half_width) * scale - 0.5

    if shape in OUTLINES:
        draw.polygon([corner(u, v) for u, v in OUTLINES[shape]], fill=255)
    else:
        draw.ellipse([*corner(-1, -1), *corner(1, 1)], fill=255)
        if shape == "ring":
            draw.ellipse([*corner(-_HOLE, -_HOLE), *corner(_HOLE, _HOLE)], fill=0)
    return np.asarray(canvas.reduce(scale), dtype=np.float32) / 255


@functools.lru_cache(maxsize=8)
def _ramps(image_size: int) -> tuple[np.ndarray, np.ndarray]:
    """x and y of every pixel centre, from -1 at one edge to 1 at the other: [1, S, 1] and [S, 1, 1]."""
    line = (2 * np.arange(image_size, dtype=np.float32) + 1) / image_size - 1
    return line[None, :, None], line[:, None, None]


def render(scene: Scene, image_size: int = 32) -> np.ndarray:
    """The picture of a scene: [image_size, image_size, 3] uint8, edges antialiased."""
    picture = np.empty((image_size, image_size, 3), dtype=np.float32)
    picture[:] = BACKGROUNDS[scene.background]
    if scene.texture == "gradient":
        across, down = _ramps(image_size)
        picture += scene.slope[0] * across + scene.slope[1] * down
    elif scene.texture == "grainy":
        noise = random_uniform(scene.grain, "shapes grain", np.arange(image_size**2)).reshape(image_size, image_size, 1)
        picture += ((2 * noise - 1) * _GRAIN).astype(np.float32)
    for thing in scene.things:
        half_width, x, y = (value * image_size for value in (SIZES[thing.size], thing.x, thing.y))
        mask = coverage(thing.shape, half_width, x, y, image_size)[..., None]
        picture += mask * (np.array(COLOURS[thing.colour], dtype=np.float32) - picture)
    return np.clip(picture + 0.5, 0, 255).astype(np.uint8)
