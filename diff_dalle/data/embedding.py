"""The arrays of embeddings: reading one from a member of a shard, fitting and checking it.

Shapes are (width,) for the embedding of a picture or text, and (length, width) for the states of a text's tokens.
"""

from __future__ import annotations

import math

import numpy as np

from ..images.decode import BrokenSample
from .npy import ArrayHeader, parse_header

_TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}  # by their names in safetensors files
KINDS = ("npy", "safetensors")  # how the names of members that hold embeddings end


def read_embedding(kind: str, data: bytes, shape: tuple[int, ...]) -> np.ndarray:
    """The embedding in a member of this kind, a .npy or safetensors file of an array [width], or [tokens, width] with
    any number of tokens, or of one of these in a list of one: float32 of ``shape``.

    Raises BrokenSample for anything else, and for what ``check_embedding`` refuses.
    """
    try:
        header, data = _parse_safetensors(data) if kind.endswith("safetensors") else (parse_header(data), data)
    except ValueError as reason:
        raise BrokenSample(f"its embedding cannot be read: {reason}") from None
    found = header.shape[1:] if len(header.shape) > len(shape) and header.shape[0] == 1 else header.shape
    if len(found) != len(shape) or found[-1] != shape[-1] or not header.is_float or 0 in found:
        raise BrokenSample(f"its embedding is {header}, but must be floating-point {described(shape)}")
    if len(data) < header.offset + math.prod(found) * header.dtype.itemsize:
        raise BrokenSample("its embedding is truncated")
    values = np.frombuffer(data, header.dtype, math.prod(found), header.offset)
    values = values.reshape(found, order="F" if header.fortran_order else "C")
    return check_embedding(fit_embedding(as_float(header, values), shape))


def _parse_safetensors(data: bytes) -> tuple[ArrayHeader, bytes]:
    """The only tensor of a safetensors file, and its elements. Raises ValueError for any other file."""
    from safetensors import SafetensorError, deserialize

    try:
        tensors = deserialize(data)
    except SafetensorError as error:
        raise ValueError(f"not a safetensors file ({error})") from None
    if len(tensors) != 1:
        raise ValueError(f"a safetensors file of {len(tensors)} tensors, not of one")
    ((_, entry),) = tensors
    if entry["dtype"] not in _TYPES:
        raise ValueError(f"a safetensors file of {entry['dtype']}, not of floating-point numbers")
    dtype = np.dtype(_TYPES[entry["dtype"]])
    return ArrayHeader(tuple(entry["shape"]), dtype, False, 0, entry["dtype"] == "BF16"), entry["data"]


def described(shape: tuple[int, ...]) -> str:
    """A shape for messages: [768], or [tokens, 768] of texts with any number of tokens."""
    return f"[{shape[0]}]" if len(shape) == 1 else f"[tokens, {shape[1]}]"


def as_float(header: ArrayHeader, values: np.ndarray) -> np.ndarray:
    """The elements of a file as numbers: float32. Those out of range become infinite."""
    if header.bfloat16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(np.float32)


def fit_embedding(values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Token states [tokens, width] cut or padded with zeros to ``shape``; an embedding [width] as it is."""
    if len(shape) == 1 or values.shape == shape:
        return values
    fitted = np.zeros(shape, values.dtype)
    fitted[: len(values)] = values[: len(fitted)]
    return fitted


def check_embedding(values: np.ndarray) -> np.ndarray:
    """``values``, float32. Raises BrokenSample unless they are finite and neither an embedding nor the state of the
    first token is all zeros.

    Zeros are how tools that compute embeddings mark the rows of samples they could not read. Tokens of zeros are
    padding; a text has a first token.
    """
    if not np.isfinite(values).all():
        raise BrokenSample("its embedding has NaN or infinite values")
    first = values if values.ndim == 1 else values[0]
    if not first.any():
        raise BrokenSample("its embedding is all zeros, the mark of a missing one")
    return values
