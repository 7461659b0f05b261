"""Crops around what an image shows, as a saliency map finds it. The network that makes the map is the caller's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from PIL import Image

from .decode import BrokenSample
from .transforms import Size, covering_size, random_crop

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
