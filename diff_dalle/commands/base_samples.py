"""Samples in a .npz file, as Guided-Diffusion's scripts write them, for an upsampler."""

from __future__ import annotations

import math
import zipfile

import numpy as np

from .. import storage
from ..config import Fault, InputError, quantity
from ..data.arrays import MAX_HEADER, parse_header

MAX_BYTES = 2**33  # of one array: 700,000 images of 64 × 64 pixels


def read_samples(path: str) -> tuple[np.ndarray, list[int] | None]:
    """``arr_0``, images uint8 [N, h, w, 3], and ``arr_1``, N classes; None without these.

    Raises InputError for a file of anything else.
    """
    try:
        with storage.explained(path), storage.open_read(path) as file, zipfile.ZipFile(file) as archive:
            images = _array(archive, "arr_0")
            labels = _array(archive, "arr_1") if "arr_1.npy" in archive.namelist() else None
    except (ValueError, KeyError, zipfile.BadZipFile, OSError) as error:
        if isinstance(error, InputError):
            raise
        raise _refused(path, f"cannot be read ({error})") from None
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3 or not images.size:
        raise _refused(path, f"has {images.dtype} {list(images.shape)} as arr_0")
    if labels is None:
        return images, None
    if labels.dtype.kind not in "iu" or labels.shape != images.shape[:1]:
        raise _refused(path, f"has {labels.dtype} {list(labels.shape)} as arr_1")
    return images, labels.tolist()


def _refused(path: str, what: str) -> InputError:
    expected = "it must be a .npz file with arr_0, uint8 [N, h, w, 3], and perhaps arr_1, N classes"
    return InputError(Fault("base_samples", f"{path} {what}: {expected}"))


def _array(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    """Reads no more than the array has by its header."""
    with archive.open(f"{name}.npy") as file:
        start = file.read(MAX_HEADER + 12)
        header = parse_header(start)
        size = math.prod(header.shape) * header.dtype.itemsize
        if header.dtype.kind not in "iuf" or header.fortran_order or size > MAX_BYTES:
            raise ValueError(f"{name} is {header}, of at most {MAX_BYTES:,} bytes")
        data = start[header.offset :] + file.read(max(header.offset + size - len(start), 0))
    if len(data) != size:
        raise ValueError(f"{name} has {quantity(len(data), 'byte')}, not {size:,}")
    return np.frombuffer(data, header.dtype).reshape(header.shape)
