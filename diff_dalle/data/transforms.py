"""An image of any size → uint8 pixels of the size wanted, by Guided-Diffusion's arithmetic.

Halve with a box filter while twice the size is there, resize with a bicubic one, cut out the rest. (The two filters
in a row antialias: Guided-Diffusion's image_datasets, functions center_crop_arr and random_crop_arr.) Sizes are
(height, width); for a target that is not square, the image is scaled to cover it.
"""

from __future__ import annotations

import math

import numpy as np
from PIL import Image

MIN_CROP, MAX_CROP = 0.8, 1.0  # of a random crop: the part of the image's shorter side that it shows


def _shrink(image: Image.Image, size: tuple[int, int]) -> np.ndarray:
    """The smallest image of the same proportions that covers ``size``, uint8 [h, w, 3]."""
    height, width = size
    while image.height >= 2 * height and image.width >= 2 * width:
        image = image.resize((image.width // 2, image.height // 2), resample=Image.Resampling.BOX)
    scale = max(height / image.height, width / image.width)
    covering = max(width, round(image.width * scale)), max(height, round(image.height * scale))
    return np.asarray(image.resize(covering, resample=Image.Resampling.BICUBIC))


def center_crop(image: Image.Image, size: tuple[int, int]) -> np.ndarray:
    """The middle of an RGB image, scaled to just cover ``size``. uint8 [height, width, 3]."""
    pixels = _shrink(image, size)
    top, left = (pixels.shape[0] - size[0]) // 2, (pixels.shape[1] - size[1]) // 2
    return pixels[top : top + size[0], left : left + size[1]]


def random_crop(image: Image.Image, size: tuple[int, int], uniforms: tuple[float, float, float]) -> np.ndarray:
    """A random part of an RGB image that shows 80 to 100 % of what covers ``size``. uint8 [height, width, 3].

    uniforms: three numbers in [0, 1) that decide the part's size, its top and its left edge.
    """
    short = min(size)
    low, high = math.ceil(short / MAX_CROP), math.ceil(short / MIN_CROP)
    side = low + _choose(uniforms[0], high - low + 1)
    pixels = _shrink(image, tuple(math.ceil(length * side / short) for length in size))
    top = _choose(uniforms[1], pixels.shape[0] - size[0] + 1)
    left = _choose(uniforms[2], pixels.shape[1] - size[1] + 1)
    return pixels[top : top + size[0], left : left + size[1]]


def _choose(uniform: float, count: int) -> int:
    """One of 0..count-1."""
    return int(uniform * count)


def largest_crop(size: tuple[int, int]) -> tuple[int, int]:
    """The size an image may have to cover before a random crop to ``size``."""
    side = math.ceil(min(size) / MIN_CROP)
    return tuple(math.ceil(length * side / min(size)) for length in size)
