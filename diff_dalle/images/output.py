"""Samples on disk: pictures, captions, a grid, and one array of all."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

import numpy as np
from PIL import Image

from .. import storage
from .grid import image_grid

GRID_LIMIT = 64  # pictures in the grid; more would be too small to look at
SHOWN_SIDE = 96  # screen pixels up to which small pictures are enlarged in a grid


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
    write_grid(storage.join(folder, "grid.png"), images[:GRID_LIMIT], captions[:GRID_LIMIT])
    with storage.atomic_writer(storage.join(folder, "samples.npz")) as file:
        np.savez(file, images)


def write_grid(path: str, images: np.ndarray, captions: Sequence[str], columns: int | None = None) -> None:
    """One picture of all images, uint8 [N, H, W, 3], small ones enlarged, with their captions; see ``image_grid``."""
    grid = image_grid(images, captions, columns, max(1, SHOWN_SIDE // images.shape[1]))
    storage.write_bytes(path, png_bytes(grid))


def write_sweep(folder: str, images: Mapping[str, np.ndarray], captions: Sequence[str], seeds: Sequence[int]) -> None:
    """Write the same pictures made in several ways: each way's to a folder of its name, as ``write_samples`` does, and
    grid.png with a row a picture (as many as the limit allows) and a column a way."""
    for name, made in images.items():
        write_samples(storage.join(folder, name), made, captions, seeds)
    rows = min(len(captions), max(1, GRID_LIMIT // len(images)))
    cells = np.stack([made[:rows] for made in images.values()], 1).reshape(-1, *next(iter(images.values())).shape[1:])
    labels = [f"[{name}] {caption}" for caption in captions[:rows] for name in images]
    write_grid(storage.join(folder, "grid.png"), cells, labels, len(images))


def png_bytes(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "png")
    return buffer.getvalue()
