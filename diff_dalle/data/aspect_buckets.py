"""Buckets by aspect ratio: the sizes that images are trained at, and the one that each image gets.

All sizes have about the pixels of the square, sides that are multiples of a factor, and a ratio from a list or the
reciprocal of one. An image goes to the nearest ratio; a fraction of them, the same in every epoch, to any one. It is
scaled to cover the size, no further, and cropped.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from fractions import Fraction

import numpy as np

from ..config import Fault, InputError, option, settings
from ..config.bounds import MAX_SIDE
from ..randomness import random_uniform

_RATIO = re.compile(r"\d{1,6}(\.\d{1,9})?(/\d{1,6}(\.\d{1,9})?)?")


@settings
class AspectConfig:
    """Aspect ratios"""

    multi_aspect_ratio: tuple[str, ...] = option(
        (),
        "width / height of training images of the square's area, such as 1/1,2/3,9/16: reciprocals are added, each "
        "image takes the nearest, and each batch has one; none = squares",
    )
    bucketeer_random_ratio: float = option(
        0.05,
        "fraction of samples assigned a random aspect ratio instead",
        needs=("multi_aspect_ratio",),
        least=0,
        most=1,
    )
    bucket_factor: int = option(
        32,
        "both sides of images are multiples of this, in pixels",
        needs=("multi_aspect_ratio",),
        least=1,
        most=MAX_SIDE,
    )
    bucket_distance: str = option(
        "linear",
        "distance of two ratios: their difference, or that of their logarithms, which treats both orientations alike",
        choices=("linear", "log"),
        needs=("multi_aspect_ratio",),
    )
    bucket_crop: str = option(
        "random",
        "crop of an image resized to cover its bucket; held-out images are center-cropped",
        choices=("random", "center"),
        needs=("multi_aspect_ratio",),
    )

    def faults(self) -> Iterator[Fault]:
        known: dict[Fraction, str] = {}
        for text in self.multi_aspect_ratio:
            try:
                ratio = parse_ratio("multi_aspect_ratio", text)
            except InputError as error:
                yield from error.faults
                continue
            if ratio in known:
                yield Fault("multi_aspect_ratio", f"has {text} and {known[ratio]}, which are equal: leave one out")
            known[ratio] = text

    def buckets(self, pixels: int) -> AspectBuckets:
        """The buckets of images with that many pixels."""
        ratios = [parse_ratio("multi_aspect_ratio", text) for text in self.multi_aspect_ratio]
        return AspectBuckets(ratios, pixels, self.bucket_factor, self.bucket_distance == "log")


def parse_ratio(setting: str, text: str) -> Fraction:
    """A ratio above 0 from a text such as 2/3 or 1.5. (Fraction itself accepts 1e999999999.)"""
    if _RATIO.fullmatch(text):
        above, _, below = text.partition("/")
        if Fraction(above) > 0 and Fraction(below or 1) > 0:
            return Fraction(above) / Fraction(below or 1)
    raise InputError(Fault(setting, f"has {text[:40]!r}, but a ratio is WIDTH/HEIGHT or a number, above 0"))


class AspectBuckets:
    """The sizes of images by their ratio, width / height.

    ratios: to which the reciprocals are added. pixels: of a square. factor: both sides are multiples of it, rounded
    down, but at least it. log: compare the logarithms of ratios.

    ``sizes``: the different (height, width), in the order of the ratios.
    """

    def __init__(self, ratios: Sequence[Fraction], pixels: int, factor: int, log: bool = False):
        self.ratios = tuple(dict.fromkeys([*ratios, *(1 / ratio for ratio in ratios)]))
        sizes = [size_of(ratio, pixels, factor) for ratio in self.ratios]
        self.sizes = tuple(dict.fromkeys(sizes))
        self._bucket_of = np.array([self.sizes.index(size) for size in sizes])
        self.log = log

    def nearest(self, images: np.ndarray) -> np.ndarray:
        """The number of each image's bucket, in ``sizes``. images: [n, 2] height and width; 0 = unknown, for a broken
        image, which counts as a square."""
        known = images.astype(np.float64)
        known[(images <= 0).any(1)] = 1
        found, ratios = known[:, 1] / known[:, 0], np.array(self.ratios, dtype=np.float64)
        if self.log:
            found, ratios = np.log(found), np.log(ratios)
        return self._bucket_of[np.abs(found[:, None] - ratios).argmin(1)]

    def assign(self, images: Sequence[np.ndarray], seed: int, random_share: float) -> tuple[np.ndarray, ...]:
        """``nearest`` of each shard's images, but for a share of them one of the ratios at random: a function of the
        seed and of an image's number among all, and the same in every epoch."""
        first, numbers = 0, []
        for each in images:
            positions = np.arange(first, first := first + len(each))
            chosen = random_uniform(seed, "random aspect ratio", positions) < random_share
            any_ratio = (random_uniform(seed, "aspect ratio", positions) * len(self.ratios)).astype(np.int64)
            numbers.append(np.where(chosen, self._bucket_of[any_ratio], self.nearest(each)))
        return tuple(numbers)


def size_of(ratio: Fraction, pixels: int, factor: int) -> tuple[int, int]:
    """Height and width of images of a ratio, width / height, with about as many pixels: multiples of ``factor``."""
    return _side(pixels / ratio, factor), _side(pixels * ratio, factor)


def _side(square: Fraction, factor: int) -> int:
    """The square root, rounded down to a multiple of ``factor``; at least that. Exact."""
    return max(1, math.isqrt(square // factor**2)) * factor


def kept_share(images: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """The part of each image that is left when it is scaled to cover a size and cropped: [n], of two [n, 2]."""
    with np.errstate(divide="ignore", invalid="ignore"):  # of broken images
        stretch = images[:, 1] * sizes[:, 0] / (images[:, 0] * sizes[:, 1])
        return np.minimum(stretch, 1 / stretch)
