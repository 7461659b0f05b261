"""Writing samples to disk: images, captions, a grid, and one array of all images."""

from __future__ import annotations

import functools
import io
import json
import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import BinaryIO

import numpy as np
from PIL import Image

from .. import storage
from .grid import image_grid

log = logging.getLogger(__name__)

GRID_LIMIT = 64  # maximum number of images in a grid; more would be too small to look at
RECORD = "samples.json"  # lists the files that a run has written into its folder
_MAX_RECORD = 1 << 26  # bytes; a million files have a third of it
# What can be in a record: the names that are made here, and no other, so that no other file is ever removed.
_OWN = re.compile(
    r"([a-z_]+_[0-9.e+-]+/)?"
    r"(\d{6,9}\.png|(variations|reconstructions)\.png|grid\.jpg|captions\.txt|samples_\d+x\d+x\d+x3\.npz)"
)

Write = Callable[[BinaryIO], object]  # writes the content of a file


def sample_files(
    images: np.ndarray, captions: Sequence[str], seeds: Sequence[int], labels: Sequence[int] | None = None
) -> dict[str, Write]:
    """The files of samples, by name, for ``write_files``.

    images: uint8 [N, H, W, 3]; captions, seeds, labels: one per image.
    Files: ``000000.png`` …; ``captions.txt`` with number, seed and caption, tab-separated; ``grid.jpg`` of the first
    64; ``samples_NxHxWx3.npz`` with ``arr_0`` = all images and ``arr_1`` = their labels, if they have any: name and
    content that Guided-Diffusion's evaluator reads.
    """
    found: dict[str, Write] = {
        f"{i:06d}.png": functools.partial(Image.fromarray(image).save, format="PNG", compress_level=6)
        for i, image in enumerate(images)
    }
    rows = enumerate(zip(seeds, captions, strict=True))
    lines = "\n".join(f"{i:06d}\t{seed}\t{' '.join(text.split())}" for i, (seed, text) in rows) + "\n"
    arrays = (images,) if labels is None else (images, np.asarray(labels))
    found["captions.txt"] = lambda file: file.write(lines.encode())
    found["grid.jpg"] = jpeg_grid(images[:GRID_LIMIT], captions[:GRID_LIMIT])
    shape = "x".join(map(str, images.shape))
    return found | {f"samples_{shape}.npz": lambda file: np.savez(file, *arrays)}


def sweep_files(
    images: Mapping[str, np.ndarray],
    captions: Sequence[str],
    seeds: Sequence[int],
    labels: Sequence[int] | None = None,
) -> dict[str, Write]:
    """The files of samples of the same captions and seeds under several settings, for ``write_files``.

    images: uint8 [N, H, W, 3] by the name of the setting. Each has its ``sample_files`` in a folder of that name;
    ``grid.jpg`` has one row per caption (at most 64 cells) and one column per setting.
    """
    found = {
        f"{name}/{file}": write
        for name, samples in images.items()
        for file, write in sample_files(samples, captions, seeds, labels).items()
    }
    rows = min(len(captions), max(1, GRID_LIMIT // len(images)))
    columns = np.stack([samples[:rows] for samples in images.values()], axis=1)
    cells = columns.reshape(-1, *columns.shape[2:])
    texts = [f"[{name}] {caption}" for caption in captions[:rows] for name in images]
    return found | {"grid.jpg": jpeg_grid(cells, texts, len(images))}


def write_files(folder: str, files: Mapping[str, Write]) -> None:
    """Write files to a local or remote folder, by their names in it, and remove those that an earlier run wrote there
    and this one does not: those that its ``samples.json`` lists, and no others."""
    storage.make_dirs(folder)
    earlier = recorded_files(folder)
    _record(folder, {*earlier, *files})  # a run that is interrupted is complete for the next one
    for name, write in files.items():
        path = storage.join(folder, name)
        storage.make_dirs(storage.split(path)[0])
        with storage.atomic_writer(path) as file:
            write(file)
    for name in earlier - files.keys():
        if storage.exists(path := storage.join(folder, name)):
            storage.remove(path)
    _record(folder, files)


def recorded_files(folder: str) -> set[str]:
    """The files of a folder that a run's ``samples.json`` there lists; none without it, or where it is damaged."""
    path = storage.join(folder, RECORD)
    if not storage.exists(path):
        return set()
    try:
        names = json.loads(storage.read_text(path, _MAX_RECORD))["files"]
        return {name for name in names if _OWN.fullmatch(name)}
    except (ValueError, LookupError, TypeError, RecursionError):
        log.warning("%s is damaged or was not written by diff_dalle: files of an earlier run may remain there", path)
        return set()


def _record(folder: str, names: Collection[str]) -> None:
    text = json.dumps({"files": sorted(names)}, indent=1)
    storage.write_bytes(storage.join(folder, RECORD), text.encode())


def jpeg_grid(images: np.ndarray, captions: Sequence[str], columns: int | None = None) -> Write:
    """A grid of images, uint8 [N, H, W, 3], with their captions, as a JPEG; see ``image_grid``."""
    # without chroma subsampling, which would blur the edges of small pictures
    return lambda file: image_grid(images, captions, columns).save(file, "JPEG", quality=95, subsampling=0)


def png_bytes(image: Image.Image, compress_level: int = 6) -> bytes:
    """A PNG file. compress_level: 0 = fastest, 9 = smallest."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG", compress_level=compress_level)
    return buffer.getvalue()
