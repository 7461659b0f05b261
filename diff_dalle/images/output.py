"""Writing samples to disk: images, captions, a grid, and one array of all images."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

import numpy as np
from PIL import Image

from .. import storage
from .grid import image_grid

GRID_LIMIT = 64  # maximum number of images in a grid; more would be too small to look at


def write_samples(folder: str, images: np.ndarray, captions: Sequence[str], seeds: Sequence[int]) -> None:
    """Write images to a local or remote folder.

    images: uint8 [N, H, W, 3]; captions, seeds: one per image.
    Files: ``000000.png`` …; ``captions.txt`` with number, seed and caption, tab-separated; ``grid.png`` of the first
    64; ``samples.npz`` with ``arr_0`` = all images, the name that Guided-Diffusion's evaluator reads.
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
    """Write a grid of images, uint8 [N, H, W, 3], with their captions; see ``image_grid``."""
    storage.write_bytes(path, png_bytes(image_grid(images, captions, columns)))


def write_sweep(folder: str, images: Mapping[str, np.ndarray], captions: Sequence[str], seeds: Sequence[int]) -> None:
    """Write samples of the same captions and seeds under several settings.

    images: uint8 [N, H, W, 3] by the name of the setting. Each is written to a folder of that name, as
    ``write_samples`` does; ``grid.png`` has one row per caption (at most 64 cells) and one column per setting.
    """
    for name, samples in images.items():
        write_samples(storage.join(folder, name), samples, captions, seeds)
    rows = min(len(captions), max(1, GRID_LIMIT // len(images)))
    columns = np.stack([samples[:rows] for samples in images.values()], axis=1)
    cells = columns.reshape(-1, *columns.shape[2:])
    labels = [f"[{name}] {caption}" for caption in captions[:rows] for name in images]
    write_grid(storage.join(folder, "grid.png"), cells, labels, len(images))


def png_bytes(image: Image.Image, compress_level: int = 6) -> bytes:
    """A PNG file. compress_level: 0 = fastest, 9 = smallest."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG", compress_level=compress_level)
    return buffer.getvalue()
