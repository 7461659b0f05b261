"""Resizing and cropping to a given size with Guided-Diffusion's arithmetic, and around what an image shows.

An image is halved with a box filter as long as it is at least twice as large as the target, resized with a bicubic
filter, and cropped. (Guided-Diffusion's image_datasets: center_crop_arr and random_crop_arr; box before bicubic
antialiases.) Sizes are (height, width); for a target that is not square, the image is scaled to cover it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from ..config import Fault, InputError
from .decode import BrokenSample, Size
from .plugins import import_package

MIN_CROP, MAX_CROP = 0.8, 1.0  # a random crop's size as a fraction of the image's shorter side
MAX_STRETCH = 64  # maximum ratio of an image's aspect ratio to the target's: memory grows with what is cropped away


@dataclass(frozen=True)
class Window:
    """A square crop aligned to a grid, so that cropping and downsampling by the grid's factor commute.

    size: width and height in pixels, a multiple of ``grid``.
    grid: the factor by which crops will be downsampled, with the area filter.
    """

    size: int
    grid: int

    def __post_init__(self):
        if self.grid < 1 or self.size < 1 or self.size % self.grid:
            rule = f"must be a positive multiple of {self.grid}, the ratio of the two resolutions"
            raise InputError(Fault("crop_size", rule, self.size))

    def check_size(self, size: Size) -> None:
        """Raise InputError when images of ``size`` are smaller than the window or not divisible by its grid."""
        if self.size > min(size):
            rule = f"must be at most {min(size)}, the shorter side of the images"
            raise InputError(Fault("crop_size", rule, self.size))
        if size[0] % self.grid or size[1] % self.grid:
            raise InputError(
                f"the image size is {size[0]},{size[1]}, but must be a multiple of {self.grid}, the ratio of the two "
                "resolutions"
            )


def _steps(full: Size, size: Size) -> list[Size]:
    """(height, width) after each halving, followed by the smallest size of the same aspect ratio that covers ``size``.

    full: (height, width) of the original image.

    Raises BrokenSample when it is too narrow: a file of 3 kB, one pixel high and a million wide, would fill the memory.
    """
    (height, width), (rows, columns) = size, full
    stretch = rows * width / (columns * height)
    if not 1 / MAX_STRETCH <= stretch <= MAX_STRETCH:
        raise BrokenSample(f"too narrow: {columns} × {rows}")
    steps = []
    while rows >= 2 * height and columns >= 2 * width:
        rows, columns = rows // 2, columns // 2
        steps.append((rows, columns))
    scale = max(height / rows, width / columns)
    return [*steps, (max(height, round(rows * scale)), max(width, round(columns * scale)))]


def covering_size(full: Size, size: Size) -> Size:
    """The size that an image has when it is scaled to just cover ``size``: one of its sides is that of ``size``.

    full: (height, width) of the original image. Raises BrokenSample when it is too narrow.
    """
    return _steps(full, size)[-1]


def check_same_shape(image: Size, control: Size, size: Size) -> None:
    """Raise BrokenSample unless the same crop of an image and its control shows the same: scaled to cover ``size``,
    they differ by at most a pixel, as by rounding. All are (height, width)."""
    covering = zip(covering_size(image, size), covering_size(control, size), strict=True)
    if any(abs(one - other) > 1 for one, other in covering):
        (rows, columns), (height, width) = control, image
        raise BrokenSample(
            f"its control has another aspect ratio, {columns} × {rows}, than the image, {width} × {height}: the same "
            "crop would show another part"
        )


def _resize_to_cover(image: Image.Image, full: Size, size: Size) -> np.ndarray:
    """Resize to the smallest size of the same aspect ratio that covers ``size``: uint8 [h, w, 3].

    full: (height, width) of the original image; ``image`` may have been decoded at a fraction of it. The steps and
          the final size follow from ``full`` alone; halvings that the decoder did are skipped.
    """
    *halved, covering = _steps(full, size)
    if image.size != full[::-1]:
        image = _on_grid(image, full, halved)
    for rows, columns in halved:
        image = _halved(image, rows, columns)
    if image.size != covering[::-1]:  # else ``resize`` would make a copy
        image = image.resize(covering[::-1], Image.Resampling.BICUBIC)
    return np.asarray(image)


def _halved(image: Image.Image, rows: int, columns: int) -> Image.Image:
    """Resize to at most ``rows`` × ``columns`` with a box filter.

    Where it halves a length exactly, ``reduce`` gives the pixels of ``resize`` in half the time, along one axis after
    the other, as ``resize`` rounds to levels after each.
    """
    if 2 * columns == image.width:
        image = image.reduce((2, 1))
    elif columns < image.width:
        image = image.resize((columns, image.height), Image.Resampling.BOX)
    if 2 * rows == image.height:
        image = image.reduce((1, 2))
    elif rows < image.height:
        image = image.resize((image.width, rows), Image.Resampling.BOX)
    return image


def _on_grid(image: Image.Image, full: Size, halved: Sequence[Size]) -> Image.Image:
    """Repeat the pixels of an image decoded at a fraction along each axis that the fraction does not divide.

    The box filter is uneven there (383 pixels from 767: some average two, some three), which shifts details by up to
    a pixel. On repeated pixels it does the same as on the full image; otherwise PSNR drops from 45 to 28 dB. The other
    axis, if only one is repeated, takes the steps of ``halved`` before, which leaves less to repeat.
    """
    fraction = next(k for k in (1, 2, 4, 8) if -(-full[1] // k) == image.width and -(-full[0] // k) == image.height)
    tall, wide = (length % fraction > 0 for length in full)  # whether rows and columns are repeated
    if not tall and not wide:
        return image
    for rows, columns in halved:
        image = _halved(image, image.height if tall else rows, image.width if wide else columns)
    width, columns = (full[1] / fraction, full[1]) if wide else (image.width, image.width)  # the decoder rounds up
    height, rows = (full[0] / fraction, full[0]) if tall else (image.height, image.height)
    return image.resize((columns, rows), Image.Resampling.NEAREST, (0, 0, width, height))


def center_crop(image: Image.Image, full: Size, size: Size) -> np.ndarray:
    """Scale an RGB image to just cover ``size`` and crop its center: uint8 [height, width, 3].

    full: (height, width) of the original image; ``image`` may have been decoded at a fraction of it.
    """
    pixels = _resize_to_cover(image, full, size)
    top, left = (pixels.shape[0] - size[0]) // 2, (pixels.shape[1] - size[1]) // 2
    return pixels[top : top + size[0], left : left + size[1]]


def center_crop_mask(mask: np.ndarray, size: Size) -> np.ndarray:
    """The mask that belongs to ``center_crop`` of its image: bool [H, W] → bool [height, width].

    A pixel is True when the mask is True anywhere in the area that the pixel covers.
    """
    height, width = mask.shape
    for target, covering in zip(size, _steps((height, width), size)[-1], strict=True):
        length, start = len(mask), (covering - target) // 2
        rows = [mask[i * length // covering : -(-(i + 1) * length // covering)] for i in range(start, start + target)]
        mask = np.stack([covered.any(0) for covered in rows], 1)  # transposed: the second pass does the columns
    return mask


def random_cover(size: Size, uniform: float) -> Size:
    """The size that a random crop scales the image to cover: ``size`` is 80 to 100 % of it. ``uniform`` in [0, 1)."""
    short = min(size)
    low, high = math.ceil(short / MAX_CROP), math.ceil(short / MIN_CROP)
    side = low + int(uniform * (high - low + 1))
    return math.ceil(size[0] * side / short), math.ceil(size[1] * side / short)


def random_crop(image: Image.Image, full: Size, size: Size, cover: Size, uniforms: Sequence[float]) -> np.ndarray:
    """Scale an RGB image to just cover ``cover`` and crop ``size`` of it at random: uint8 [height, width, 3].

    full:     (height, width) of the original image; ``image`` may have been decoded at a fraction of it.
    cover:    a size that covers ``size``, such as ``random_cover`` gives.
    uniforms: two numbers in [0, 1), which determine the top and the left edge.
    """
    pixels = _resize_to_cover(image, full, cover)
    top = int(uniforms[0] * (pixels.shape[0] - size[0] + 1))
    left = int(uniforms[1] * (pixels.shape[1] - size[1] + 1))
    return pixels[top : top + size[0], left : left + size[1]]


def random_window(pixels: np.ndarray, window: Window, uniforms: Sequence[float]) -> np.ndarray:
    """Random square crop aligned to the window's grid: [H, W, C] → [window.size, window.size, C].

    uniforms: two numbers in [0, 1), which determine the top and the left edge.
    """
    top, left = (
        window.grid * int(uniform * ((length - window.size) // window.grid + 1))
        for uniform, length in zip(uniforms, pixels.shape[:2], strict=True)
    )
    return pixels[top : top + window.size, left : left + window.size]


# Of the published smart crop with which the latent cascade was trained.
SIDE = 240  # pixels of the shorter side of the image that is looked at
TEMPERATURE = 0.03  # of the softmax over the map
PEAK = 0.75  # fraction of the softmax's maximum above which a cell counts
JITTER_CHANCE, JITTER = 0.3, 0.2  # how often the center moves, and how far at most, as a fraction of the image

GROUP = "diff_dalle.saliency"  # of entry points of packages that have a saliency
#: uint8 [h, w, 3], the shorter side 240 pixels → [h', w'] of any size and scale, larger where there is more to see.
#: Worker processes call it: it can be pickled, and is the same function of the pixels everywhere.
Saliency = Callable[[np.ndarray], np.ndarray]


def smart_crop(
    image: Image.Image, full: Size, size: Size, saliency: Saliency, uniforms: Sequence[float] | None
) -> np.ndarray:
    """Scale an RGB image to just cover ``size`` and crop it around what is salient: uint8 [height, width, 3].

    full:     (height, width) of the original image; ``image`` may have been decoded at a fraction of it.
    uniforms: three numbers in [0, 1): whether the center moves, and how far down and across; None = it does not.
    """
    scale = SIDE / min(image.size)
    small = image.resize((max(SIDE, round(image.width * scale)), max(SIDE, round(image.height * scale))))
    center = _center(np.asarray(saliency(np.asarray(small)), dtype=np.float64))
    if uniforms is not None and uniforms[0] < JITTER_CHANCE:
        center = center + JITTER * (2 * np.array(uniforms[1:3]) - 1)
    room = np.array(covering_size(full, size)) - size
    corner = np.clip(np.round(center * (room + size) - np.array(size) / 2), 0, room)
    return random_crop(image, full, size, size, ((corner + 0.5) / (room + 1)).tolist())


def _center(map_: np.ndarray) -> np.ndarray:
    """(y, x) of the mean of the most salient cells, as fractions of the map's height and width."""
    if map_.ndim != 2 or not map_.size or not np.isfinite(map_).all():
        raise BrokenSample(f"its saliency map has the shape {map_.shape} or values that are not finite")
    weights = np.exp((map_ - map_.max()) / TEMPERATURE)  # the softmax, but for a factor: its maximum is 1
    rows, columns = np.nonzero(weights > PEAK)
    return np.array([(rows.mean() + 0.5) / map_.shape[0], (columns.mean() + 0.5) / map_.shape[1]])


def saliency_of_opencv() -> Saliency:
    """Fine-grained saliency (Montabone & Soto 2010), [h, w] in [0, 1]; it needs no weights."""
    package: Any = import_package("cv2", "saliency", "saliency")
    if not hasattr(package, "saliency"):
        raise InputError(
            "saliency requires the module cv2.saliency, which the installed OpenCV lacks: pip uninstall it, and pip "
            "install opencv-contrib-python-headless"
        )
    return opencv_saliency


def opencv_saliency(picture: np.ndarray) -> np.ndarray:
    """``saliency_of_opencv``, for pictures uint8 [h, w, 3]. BrokenSample for one of which OpenCV computes none."""
    import cv2

    package: Any = cv2
    found, map_ = package.saliency.StaticSaliencyFineGrained_create().computeSaliency(
        np.ascontiguousarray(picture[..., ::-1])
    )
    if not found:
        raise BrokenSample("OpenCV computes no saliency of it")
    return map_
