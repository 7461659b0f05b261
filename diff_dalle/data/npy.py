"""Embeddings in numpy's .npy format: parsing headers, reading one embedding per file, checking values."""

from __future__ import annotations

import io
from dataclasses import dataclass

import numpy as np

from ..images.decode import BrokenSample

MAX_HEADER = 1 << 14  # bytes that are read for a header: numpy itself refuses more than 10,000 characters

_READERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


@dataclass(frozen=True)
class NpyHeader:
    """The header of a .npy file: shape, element type and order, and the byte at which the elements start."""

    shape: tuple[int, ...]
    dtype: np.dtype
    fortran_order: bool
    offset: int

    @property
    def is_float(self) -> bool:
        """Whether the elements are numbers of 16, 32 or 64 bits. Pickled objects are not."""
        return self.dtype.kind == "f" and self.dtype.itemsize <= 8


def parse_header(data: bytes) -> NpyHeader:
    """Parse the header at the start of a .npy file. Raises ValueError when there is none.

    numpy evaluates it as a literal, never as code, and bounds its length.
    """
    stream = io.BytesIO(data[:MAX_HEADER])
    try:
        shape, fortran_order, dtype = _READERS[np.lib.format.read_magic(stream)](stream)
    except Exception as error:  # the literal may be wrong in many ways
        raise ValueError("not a .npy file") from error
    return NpyHeader(shape, dtype, fortran_order, stream.tell())


def read_embedding(data: bytes, width: int) -> np.ndarray:
    """The embedding in a .npy file of shape [width] or [1, width], float32 [width].

    Raises BrokenSample for anything else, and for what ``check_embedding`` refuses.
    """
    try:
        header = parse_header(data)
    except ValueError:
        raise BrokenSample("its embedding is not a .npy file") from None
    if header.shape not in ((width,), (1, width)) or not header.is_float:
        kind = f"{header.dtype} {list(header.shape)}"
        raise BrokenSample(f"its embedding is {kind}, but must be floating-point [{width}]")
    if len(data) < header.offset + width * header.dtype.itemsize:
        raise BrokenSample("its embedding is truncated")
    return check_embedding(np.frombuffer(data, header.dtype, width, header.offset))


def check_embedding(values: np.ndarray) -> np.ndarray:
    """``values`` as float32. Raises BrokenSample unless they are finite and not all zero.

    Zeros are how tools that compute embeddings mark the rows of samples they could not read.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        values = values.astype(np.float32)
    if not np.isfinite(values).all():
        raise BrokenSample("its embedding has NaN or infinite values")
    if not values.any():
        raise BrokenSample("its embedding is all zeros, the mark of a missing one")
    return values
