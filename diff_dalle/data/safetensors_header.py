"""The safetensors format: eight bytes with the length of a JSON header, the header, the elements.

Parsed here because data may not depend on an extra, and one tensor of numbers needs no more than this.
"""

from __future__ import annotations

import json
import math
import mmap

import numpy as np

from .npy import MAX_DIMENSIONS, ArrayHeader

MAX_HEADER = 1 << 16  # bytes; that of one tensor has about 100
_TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}


def parse_safetensors(data: bytes) -> ArrayHeader:
    """Where the only tensor of a safetensors file is. Raises ValueError for any other file."""
    header, begin = header_of(data, MAX_HEADER)
    tensors = [entry for name, entry in header.items() if name != "__metadata__"]
    if len(tensors) != 1:
        raise ValueError(f"a safetensors file of {len(tensors)} tensors, not of one")
    entry = tensors[0] if isinstance(tensors[0], dict) else {}
    kind, shape, span = entry.get("dtype"), _lengths(entry.get("shape")), _lengths(entry.get("data_offsets"))
    if shape is None or len(shape) > MAX_DIMENSIONS or span is None or len(span) != 2:
        raise ValueError("not a safetensors file")
    if not isinstance(kind, str) or kind not in _TYPES:
        raise ValueError(f"a safetensors file of {kind!s:.20}, not of floating-point numbers")
    dtype = np.dtype(_TYPES[kind])
    if span[1] - span[0] != math.prod(shape) * dtype.itemsize:
        raise ValueError("not a safetensors file")
    return ArrayHeader(shape, dtype, False, begin + span[0], kind == "BF16")


def header_of(data: bytes | mmap.mmap, limit: int) -> tuple[dict, int]:
    """The header of a safetensors file, of at most ``limit`` bytes, and where its elements begin. ValueError for any
    other file."""
    length = int.from_bytes(data[:8], "little")
    if not 2 <= length <= min(limit, len(data) - 8):
        raise ValueError("not a safetensors file")
    try:
        header = json.loads(data[8 : 8 + length].decode("utf-8"))
    except (ValueError, RecursionError):
        raise ValueError("not a safetensors file") from None
    if not isinstance(header, dict):
        raise ValueError("not a safetensors file")
    return header, 8 + length


def _lengths(value: object) -> tuple[int, ...] | None:
    """A list of numbers of elements or bytes; None for anything else."""
    if not isinstance(value, list) or not all(type(each) is int and 0 <= each < 10**18 for each in value):
        return None
    return tuple(value)
