"""Numpy's .npy format: parsing headers, reading one embedding per file, checking values."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from ..images.decode import BrokenSample

MAX_HEADER = 1 << 14  # bytes that are read for a header: numpy itself refuses more than 10,000 characters
MAX_DIMENSIONS = 32  # numpy's own limit

# The header is a Python dictionary. It is searched, not evaluated: nested brackets can exhaust the interpreter's stack.
_ENTRIES = {
    name: re.compile(rf"'{name}':\s*{value}\s*[,}}]")
    for name, value in {
        "descr": r"'([<>|=]?[a-zA-Z]\d{0,9})'",
        "fortran_order": r"(True|False)",
        "shape": r"\(([\d, L]*)\)",  # L: written by Python 2
    }.items()
}


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
    """Parse the header at the start of a .npy file of plain elements. Raises ValueError when there is none."""
    start = 10 if data[6:7] == b"\1" else 12  # the length has two bytes in version 1, four in versions 2 and 3
    length = int.from_bytes(data[8:start], "little")
    text = data[start : start + length].decode("latin-1")
    if data[:6] != b"\x93NUMPY" or data[6:7] not in (b"\1", b"\2", b"\3") or length > MAX_HEADER or len(text) < length:
        raise ValueError("not a .npy file")
    entries = {name: pattern.search(text) for name, pattern in _ENTRIES.items()}
    values = {name: match[1] for name, match in entries.items() if match}
    if len(values) < len(_ENTRIES):
        raise ValueError("not a .npy file of numbers")
    lengths = re.findall(r"\d+", values["shape"])
    if len(lengths) > MAX_DIMENSIONS or max(map(len, lengths), default=0) > 18:
        raise ValueError(f"a .npy file of an impossible shape, ({values['shape']:.60})")
    try:
        dtype = np.dtype(values["descr"])
    except (TypeError, ValueError):
        raise ValueError(f"a .npy file of unknown elements, {values['descr']}") from None
    return NpyHeader(tuple(map(int, lengths)), dtype, values["fortran_order"] == "True", start + length)


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
