"""Numpy's .npy format: parsing headers."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

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
class ArrayHeader:
    """What a file says about its array: shape, element type and order, and the byte at which the elements start.

    bfloat16: whether the elements, which numpy has no type for, are the upper halves of float32; dtype is then uint16.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    fortran_order: bool
    offset: int
    bfloat16: bool = False

    @property
    def is_float(self) -> bool:
        """Whether the elements are numbers of 16, 32 or 64 bits. Pickled objects are not."""
        return self.bfloat16 or (self.dtype.kind == "f" and self.dtype.itemsize <= 8)

    def __str__(self) -> str:
        return f"{'bfloat16' if self.bfloat16 else self.dtype} {list(self.shape)}"


def parse_header(data: bytes) -> ArrayHeader:
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
    return ArrayHeader(tuple(map(int, lengths)), dtype, values["fortran_order"] == "True", start + length)
