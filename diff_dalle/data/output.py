"""Samples on disk: pictures, captions, a grid, and one array of all."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
from PIL import Image

from .. import storage
from .grid import image_grid

GRID_LIMIT = 64  # pictures in the grid; more would be too small to look at


def write_samples(folder: str, images: np.ndarray, captions: Sequence[str], seeds: Sequence[int]) -> None:
    """Write pictures to a local or remote folder.

    images: uint8 [N, H, W, 3]; captions, seeds: one for each.
    Files: ``000000.png`` …; ``captions.txt`` with number, seed and caption, tab-separated; ``grid.png`` of the first
    64; ``samples.npz`` with ``arr_0`` = all images, the name under which Guided-Diffusion's evaluator looks for them.
    """
    storage.make_dirs(folder)
    for i, image in enumerate(images):
        storage.write_bytes(storage.join(folder, f"{i:06d}.png"), png_bytes(Image.fromarray(image)))
    rows = enumerate(zip(seeds, captions, strict=True))
    lines = [f"{i:06d}\t{seed}\t{' '.join(text.split())}" for i, (seed, text) in rows]
    storage.write_bytes(storage.join(folder, "captions.txt"), ("\n".join(lines) + "\n").encode())
    scale = max(1, 96 // images.shape[1])
    grid = image_grid(images[:GRID_LIMIT], captions[:GRID_LIMIT], scale=scale)
    storage.write_bytes(storage.join(folder, "grid.png"), png_bytes(grid))
    with storage.atomic_writer(storage.join(folder, "samples.npz")) as file:
        np.savez(file, images)


def png_bytes(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "png")
    return buffer.getvalue()
