"""The sizes of the stages of a cascade, from that of the images or from what it continues from."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..config import InputError, named
from ..images.files import fit_image
from ..images.signal import check_pixels
from .request import Request, in_turn
from .stage import Stage


def trained_size(stages: Sequence[Stage]) -> int:
    """Width and height in pixels of the last stage's training images."""
    return stages[-1].image_size * stages[-1].signal.scale


def with_low_res(request: Request, stages: Sequence[Stage]) -> Request:
    """The request with the pictures that are reconstructed cut to their size. InputError for no pipeline of stages
    B and A."""
    if request.reconstruct is None:
        return request
    if not stages[0].reconstructs:
        raise InputError(
            f"there are pictures to reconstruct ({named('reconstruct')}), which stages B and A do alone: give them "
            f"with {named('stage_b')} and {named('stage_a')}, without {named('model_path')}"
        )
    size = request.size or (trained_size(stages),) * 2
    _check_multiples("size", *size, stages[0].signal.scale * stages[0].divisor, f"change {named('sample_size')}")
    images = []
    for image in itertools.islice(request.reconstruct, len(request)):
        check_pixels("a picture to reconstruct", image, "[H, W, 3]")
        images.append(fit_image(image, size))
    return replace(request, low_res=in_turn(np.stack(images), len(request)), reconstruct=None, size=None)


def stage_sizes(request: Request, stages: Sequence[Stage]) -> list[tuple[int, int]]:
    """Height and width of each stage's signal. InputError if ``size`` or ``low_res`` does not fit."""
    size, low_res = request.size, request.low_res
    first, last, factor = stages[0], stages[-1], math.prod(stage.factor for stage in stages)
    if low_res is None and first.reconstructs:
        raise InputError(
            f"{first.path} is a stage B alone, which reconstructs pictures: give them with {named('reconstruct')}, "
            f"or a stage C with {named('model_path')}"
        )
    if first.is_upsampler != (low_res is not None):
        raise InputError(
            f"low-resolution images (low_res, {named('low_res_dir')}) are required by upsamplers without a base "
            "generator, and by these only"
        )
    divisor = _divisor(stages)
    if low_res is None:
        height, width = size or (trained_size(stages),) * 2
        scale = last.signal.scale
        _check_multiples("size", height, width, scale * divisor, f"change {named('sample_size')}")
        height, width = height // scale, width // scale
    else:
        if size:
            raise InputError(
                f"size is set, but it follows from the low-resolution images: leave it ({named('sample_size')}) out"
            )
        scale, needed = first.signal.scale, divisor // math.gcd(divisor, factor)
        _check_multiples("low_res", low_res.shape[1], low_res.shape[2], scale * needed, "crop the images")
        height, width = (factor * length // scale for length in low_res.shape[1:3])
    sizes = [(height, width)]
    for before, after in reversed(list(itertools.pairwise(stages))):
        sizes.insert(0, after.size_before(sizes[0], before))
    return sizes


def size_multiple(stages: Sequence[Stage]) -> int:
    """What height and width in pixels of the last stage's images must be multiples of."""
    return stages[-1].signal.scale * _divisor(stages)


def _divisor(stages: Sequence[Stage]) -> int:
    """What both sides of the last stage's signal must be multiples of."""
    divisor = 1
    for stage in stages:
        divisor = stage.divisor_after(divisor)
    return divisor


def _check_multiples(name: str, height: int, width: int, multiple: int, advice: str) -> None:
    if any(length < 1 or length % multiple for length in (height, width)):
        raise InputError(
            f"{name} is {width}×{height}, but width and height must be multiples of {multiple}, the networks' divisor: "
            f"{advice}"
        )
