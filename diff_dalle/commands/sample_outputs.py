"""What ``sample.py`` writes: the samples, and the pictures that they are made from beside them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from .. import storage
from ..config import quantity
from ..images.files import fit_image
from ..images.output import GRID_LIMIT, write_grid, write_samples, write_sweep
from ..sampling.image_prompts import ImagePrompts
from ..sampling.request import Request


def write_results(folder: str, request: Request, sweep: Mapping[str, np.ndarray]) -> str:
    """Write the request's samples under each setting, uint8 [N, H, W, 3] by the setting's name. Returns a sentence
    about what was written."""
    count, captions = quantity(len(request), "image"), _captions(request)
    if len(sweep) > 1:
        write_sweep(folder, sweep, captions, request.seeds)
        return f"{count} for each of {len(sweep)} scales, and grid.png to compare them, are in {folder}"
    (samples,) = sweep.values()
    write_samples(folder, samples, captions, request.seeds)
    files = "grid.png, captions.txt and samples.npz"
    for name, given in (("variations.png", request.images), ("reconstructions.png", _originals(request))):
        if given is not None:
            write_beside(storage.join(folder, name), given, samples)
            files = f"{name} (beside the given ones), {files}"
    return f"{count}, {files} are in {folder}"


def write_beside(path: str, given: ImagePrompts, samples: np.ndarray) -> None:
    """Write a grid of the given pictures, center-cropped, beside the samples made from them, the first 64 or so: a row
    for each picture, each interpolation, or the mixture."""
    step = max(given.interpolate, 1)
    rows = given.rows(min(len(samples), max(GRID_LIMIT // step, 1) * step))
    width = max(sum(map(len, row)) for row in rows)
    blank = np.full_like(samples[0], 255)
    cells, labels = [], []
    for before, made, after in rows:
        pictures = [
            [(fit_image(given.images[i], blank.shape[:2]), given.name(i)) for i in some] for some in (before, after)
        ]
        row = [*pictures[0], *((samples[i], "") for i in made), *pictures[1]]
        row += [(blank, "")] * (width - len(row))
        cells += [cell for cell, _ in row]
        labels += [label for _, label in row]
    write_grid(path, np.stack(cells), labels, width)


def _originals(request: Request) -> ImagePrompts | None:
    """The pictures that are reconstructed."""
    return None if request.reconstruct is None else ImagePrompts(request.reconstruct)


def _captions(request: Request) -> list[str]:
    """The prompt of each image, or the pictures that it is made from, or both."""
    if request.images is None:
        return list(request.prompts)
    sources = request.images.captions(len(request))
    return [" | ".join(filter(None, pair)) for pair in zip(request.prompts, sources, strict=True)]
