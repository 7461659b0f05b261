"""What ``sample.py`` writes: the samples, and the pictures that they are made from beside them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import numpy as np

from ..config import quantity
from ..images.files import fit_image
from ..images.grid import image_grid
from ..images.output import GRID_LIMIT, sample_files, sweep_files, write_files
from ..sampling.image_prompts import ImagePrompts
from ..sampling.request import Request


def write_results(folder: str, request: Request, sweep: Mapping[str, np.ndarray]) -> str:
    """Write the request's samples under each setting, uint8 [N, H, W, 3] by the setting's name, in place of those of an
    earlier run. Returns a sentence about what was written."""
    count, texts = quantity(len(request), "image"), (_captions(request), request.seeds, request.labels)
    if len(sweep) > 1:
        write_files(folder, sweep_files(sweep, *texts))
        return f"{count} for each of {len(sweep)} scales, and grid.jpg to compare them, are in {folder}"
    (samples,) = sweep.values()
    files = sample_files(samples, *texts)
    *_, said = files
    said = f"grid.jpg, captions.txt and {said}"
    originals = None if request.reconstruct is None else ImagePrompts(request.reconstruct)
    for name, given in (("variations.png", request.images), ("reconstructions.png", originals)):
        if given is not None:
            grid = image_grid(*beside(given, samples))
            files[name] = functools.partial(grid.save, format="PNG")
            said = f"{name} (beside the given ones), {said}"
    write_files(folder, files)
    return f"{count}, {said} are in {folder}"


def beside(given: ImagePrompts, samples: np.ndarray) -> tuple[np.ndarray, list[str], int]:
    """The grid of the given pictures, center-cropped, beside the samples made from them, the first 64 or so: a row for
    each picture, each interpolation, or the mixture. Returns cells, uint8 [N, H, W, 3], their captions, and the number
    of columns."""
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
    return np.stack(cells), labels, width


def _captions(request: Request) -> list[str]:
    """The prompt of each image, its class, and the pictures that it is made from, whichever there are."""
    parts: list[Sequence[str]] = [request.prompts]
    if request.labels is not None:
        parts.append([f"class {label}" for label in request.labels])
    if request.images is not None:
        parts.append(request.images.captions(len(request)))
    return [" | ".join(filter(None, texts)) for texts in zip(*parts, strict=True)]
