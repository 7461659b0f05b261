"""An image of any size → uint8 pixels of the size wanted, by Guided-Diffusion's arithmetic.

Halve with a box filter while twice the size is there, resize with a bicubic one, cut out the rest. (The two filters
in a row antialias: Guided-Diffusion's image_datasets, functions center_crop_arr and random_crop_arr.) Sizes are
(height, width); for a target that is not square, the image is scaled to cover it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from PIL import Image

from .decode import BrokenSample

MIN_CROP, MAX_CROP = 0.8, 1.0  # of a random crop: the part of the image's shorter side that it shows
NARROWEST = 64  # times longer, beside its width, than wanted: what is cut off costs as many times the memory


def _shrink(image: Image.Image, full: tuple[int, int], size: tuple[int, int]) -> np.ndarray:
    """The smallest image of the same proportions that covers ``size``, uint8 [h, w, 3].

    full: (height, width) of the image in full, where it was decoded at a fraction. The steps and their result follow
          from that alone; the halvings that the decoder did are left out.

    BrokenSample for a strip: one pixel high and a million wide, a file of 3 kB would fill the memory.
    """
    (height, width), (rows, columns) = size, full
    stretch = rows * width / (columns * height)
    if not 1 / NARROWEST <= stretch <= NARROWEST:
        raise BrokenSample(f"too narrow: {columns} × {rows}")
    image = _on_grid(image, full)
    while rows >= 2 * height and columns >= 2 * width:
        rows, columns = rows // 2, columns // 2
        image = image.resize((min(columns, image.width), min(rows, image.height)), Image.Resampling.BOX)
    scale = max(height / rows, width / columns)
    covering = max(width, round(columns * scale)), max(height, round(rows * scale))
    return np.asarray(image.resize(covering, Image.Resampling.BICUBIC))


def _on_grid(image: Image.Image, full: tuple[int, int]) -> Image.Image:
    """Repeat the pixels of an image decoded at a fraction along an axis that this fraction does not divide.

    The box filter is uneven there (383 pixels from 767: some average two, some three), which shifts details by up to
    a pixel. On repeated pixels it does the same as on the full image; without, 28 dB would be left of 45.
    """
    fraction = next(k for k in (1, 2, 4, 8) if -(-full[1] // k) == image.width and -(-full[0] // k) == image.height)
    columns = full[1] if full[1] % fraction else image.width
    rows = full[0] if full[0] % fraction else image.height
    covered = (0, 0, full[1] / fraction, full[0] / fraction)  # the decoder rounds its size up
    return image.resize((columns, rows), Image.Resampling.NEAREST, covered)


def center_crop(image: Image.Image, full: tuple[int, int], size: tuple[int, int]) -> np.ndarray:
    """The middle of an RGB image, scaled to just cover ``size``. uint8 [height, width, 3].

    full: the image's own (height, width), larger than ``image`` where that was decoded at a fraction.
    """
    pixels = _shrink(image, full, size)
    top, left = (pixels.shape[0] - size[0]) // 2, (pixels.shape[1] - size[1]) // 2
    return pixels[top : top + size[0], left : left + size[1]]


def random_cover(size: tuple[int, int], uniform: float) -> tuple[int, int]:
    """What a random crop scales the image to cover, so that ``size`` is 80 to 100 % of it. ``uniform`` in [0, 1)."""
    short = min(size)
    low, high = math.ceil(short / MAX_CROP), math.ceil(short / MIN_CROP)
    side = low + _choose(uniform, high - low + 1)
    return math.ceil(size[0] * side / short), math.ceil(size[1] * side / short)


def random_crop(
    image: Image.Image, full: tuple[int, int], size: tuple[int, int], uniforms: Sequence[float]
) -> np.ndarray:
    """A random part of an RGB image. uint8 [height, width, 3].

    uniforms: three numbers in [0, 1), which decide what the image is scaled to cover, the top and the left edge.
    """
    pixels = _shrink(image, full, random_cover(size, uniforms[0]))
    top = _choose(uniforms[1], pixels.shape[0] - size[0] + 1)
    left = _choose(uniforms[2], pixels.shape[1] - size[1] + 1)
    return pixels[top : top + size[0], left : left + size[1]]


def _choose(uniform: float, count: int) -> int:
    """One of 0..count-1."""
    return int(uniform * count)
