"""An image of any size → uint8 pixels of the size wanted, by Guided-Diffusion's arithmetic.

Halve with a box filter while twice the size is there, resize with a bicubic one, cut out the rest. (The two filters
in a row antialias: Guided-Diffusion's image_datasets, functions center_crop_arr and random_crop_arr.) Sizes are
(height, width); for a target that is not square, the image is scaled to cover it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from ..errors import InputError
from .decode import BrokenSample

MIN_CROP, MAX_CROP = 0.8, 1.0  # of a random crop: the part of the image's shorter side that it shows
NARROWEST = 64  # times longer, beside its width, than wanted: what is cut off costs as many times the memory


@dataclass(frozen=True)
class Window:
    """A square part of a picture that can be shrunk by ``grid`` on its own, to the same part of the shrunk picture.

    size: pixels a side, a multiple of ``grid``. grid: the factor by which it will be shrunk, by the area filter.
    """

    size: int
    grid: int

    def __post_init__(self):
        if self.grid < 1 or self.size < 1 or self.size % self.grid:
            raise InputError(f"crop_size is {self.size}, but must be a positive multiple of {self.grid}, the factor "
                             "between the two resolutions")  # fmt: skip

    def check_size(self, size: tuple[int, int]) -> None:
        """InputError when it does not lie in pictures of ``size``, or these cannot be shrunk by its grid."""
        if self.size > min(size):
            raise InputError(f"crop_size is {self.size}, but must be at most {min(size)}, the shorter side of the "
                             "images")  # fmt: skip
        if size[0] % self.grid or size[1] % self.grid:
            raise InputError(f"the image size is {size[0]},{size[1]}, but must be a multiple of {self.grid}, the "
                             "factor between the two resolutions")  # fmt: skip


def _steps(full: tuple[int, int], size: tuple[int, int]) -> list[tuple[int, int]]:
    """(height, width) after each halving, and last that of the smallest image that covers ``size``.

    full: (height, width) of the image to begin with, of whose proportions the last is.

    BrokenSample for a strip: one pixel high and a million wide, a file of 3 kB would fill the memory.
    """
    (height, width), (rows, columns) = size, full
    stretch = rows * width / (columns * height)
    if not 1 / NARROWEST <= stretch <= NARROWEST:
        raise BrokenSample(f"too narrow: {columns} × {rows}")
    steps = []
    while rows >= 2 * height and columns >= 2 * width:
        rows, columns = rows // 2, columns // 2
        steps.append((rows, columns))
    scale = max(height / rows, width / columns)
    return [*steps, (max(height, round(rows * scale)), max(width, round(columns * scale)))]


def _shrink(image: Image.Image, full: tuple[int, int], size: tuple[int, int]) -> np.ndarray:
    """The smallest image of the same proportions that covers ``size``, uint8 [h, w, 3].

    full: (height, width) of the image in full, where it was decoded at a fraction. The steps and their result follow
          from that alone; the halvings that the decoder did are left out.
    """
    *halved, covering = _steps(full, size)
    image = _on_grid(image, full)
    for rows, columns in halved:
        image = image.resize((min(columns, image.width), min(rows, image.height)), Image.Resampling.BOX)
    return np.asarray(image.resize(covering[::-1], Image.Resampling.BICUBIC))


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
    """The middle of an RGB image, scaled to just cover ``size``. uint8 [height, width, 3]. Smaller ones are enlarged.

    full: the image's own (height, width), larger than ``image`` where that was decoded at a fraction.
    """
    pixels = _shrink(image, full, size)
    top, left = (pixels.shape[0] - size[0]) // 2, (pixels.shape[1] - size[1]) // 2
    return pixels[top : top + size[0], left : left + size[1]]


def center_crop_mask(mask: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """What ``center_crop`` shows of a mask, bool [H, W] → bool [height, width]: True where it is True anywhere in the
    area that the pixel shows."""
    for wanted, covering in zip(size, _steps(mask.shape, size)[-1], strict=True):
        length, start = len(mask), (covering - wanted) // 2
        rows = [mask[i * length // covering : -(-(i + 1) * length // covering)] for i in range(start, start + wanted)]
        mask = np.stack([shown.any(0) for shown in rows], 1)  # turned over, so that the columns are next
    return mask


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


def random_window(pixels: np.ndarray, window: Window, uniforms: Sequence[float]) -> np.ndarray:
    """A random square part of a picture, [H, W, 3] → [window.size, window.size, 3], on the window's grid.

    uniforms: two numbers in [0, 1), which decide the top and the left edge.
    """
    top, left = (
        window.grid * _choose(uniform, (length - window.size) // window.grid + 1)
        for uniform, length in zip(uniforms, pixels.shape[:2], strict=True)
    )
    return pixels[top : top + window.size, left : left + window.size]


def _choose(uniform: float, count: int) -> int:
    """One of 0..count-1."""
    return int(uniform * count)
