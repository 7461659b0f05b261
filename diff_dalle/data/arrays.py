"""Arrays in files from elsewhere: headers of numpy's .npy format, and embeddings.

Shapes of embeddings are (width,) for that of a picture or text, and (length, width) for the states of a text's tokens.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..config import InputError
from ..images.decode import BrokenSample, Size

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


Shape = tuple[int, ...]


@dataclass(frozen=True)
class Grid:
    """The maps [channels, h, w] that a network makes of images of several sizes, and their rows in a file: h, w and the
    elements, then zeros up to the width that the largest one needs.

    stride: pixels per position, of the image scaled by ``scale``, whose sides are rounded down to multiples of it.
    """

    channels: int
    stride: int
    scale: float = 1.0

    def size(self, image: Size) -> Size:
        """h and w for an image of this size."""
        height, width = (max(1, int(side * self.scale) // self.stride) for side in image)
        return height, width

    def pixels(self, image: Size) -> Size:
        """The size of an image of this size after scaling."""
        height, width = self.size(image)
        return height * self.stride, width * self.stride

    def width(self, images: Sequence[Size]) -> int:
        """Elements of a row, for images of these sizes."""
        return 2 + self.channels * max(math.prod(self.size(image)) for image in images)

    def packed(self, maps: np.ndarray, width: int) -> np.ndarray:
        """Maps [n, channels, h, w] → rows [n, width] of their type."""
        rows = np.zeros((len(maps), width), maps.dtype)
        rows[:, :2] = maps.shape[2:]
        flat = maps.reshape(len(maps), -1)
        rows[:, 2 : 2 + flat.shape[1]] = flat
        return rows

    def unpacked(self, row: np.ndarray, image: Size) -> np.ndarray:
        """The map [channels, h, w] of an image of this size. InputError when the row holds that of another."""
        size = self.size(image)
        if tuple(row[:2].tolist()) != size:
            raise InputError(
                f"a sample has latents of {row[1]:g}×{row[0]:g} positions, but its image of {image[1]}×{image[0]} "
                f"pixels would have {size[1]}×{size[0]}: its aspect ratio is another than when they were made; make "
                "them again"
            )
        return row[2 : 2 + self.channels * math.prod(size)].reshape(self.channels, *size)


class MissingEmbedding(BrokenSample):
    """A sample without an embedding: it is skipped and counted, and is no sign of damage."""


@dataclass(frozen=True)
class ArrayHeader:
    """What a file says about its array: shape, element type and order, and the byte at which the elements start.

    bfloat16: whether the elements, which numpy has no type for, are the upper halves of float32; dtype is then uint16.
    """

    shape: Shape
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


# ------------------------------------------------------------------------------------------------------- embeddings

_TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}  # by their names in safetensors files
KINDS = ("npy", "safetensors")  # how the names of members that hold embeddings end


def read_embedding(kind: str, data: bytes, shape: Shape) -> np.ndarray:
    """The embedding in a member of this kind, a .npy or safetensors file of an array [width], or [tokens, width] with
    any number of tokens, or of one of these in a list of one: float32 of ``shape``.

    Raises BrokenSample for anything else, and for what ``usable_embedding`` refuses.
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
    return usable_embedding(header, values.reshape(found, order="F" if header.fortran_order else "C"), shape)


def is_zero(kind: str, data: bytes) -> bool:
    """Whether a member of this kind holds only zeros, whatever its shape is. False for one that cannot be read."""
    try:
        if kind.endswith("safetensors"):
            _, elements = _parse_safetensors(data)
        else:
            elements = data[parse_header(data).offset :]
    except ValueError:
        return False
    return not elements.strip(b"\0")


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


def described(shape: Shape) -> str:
    """A shape for messages: [768], or [tokens, 768] of texts with any number of tokens."""
    return f"[{shape[0]}]" if len(shape) == 1 else f"[tokens, {shape[1]}]"


def usable_embedding(header: ArrayHeader, stored: np.ndarray, shape: Shape) -> np.ndarray:
    """The elements of a file as an embedding, float32 of ``shape``: token states [tokens, width] are cut or padded with
    zeros. Raises BrokenSample unless they are finite, and MissingEmbedding when an embedding or the state of the first
    token is all zeros.

    Zeros are how tools that compute embeddings mark the rows of samples they could not read. Tokens of zeros are
    padding; a text has a first token.
    """
    if header.bfloat16:
        values = (stored.astype(np.uint32) << 16).view(np.float32)
    else:
        with np.errstate(over="ignore", invalid="ignore"):
            values = stored.astype(np.float32)  # those out of range become infinite
    if len(shape) > 1 and values.shape != shape:
        values = values[: shape[0]]
        values = np.pad(values, ((0, shape[0] - len(values)), (0, 0)))
    if not np.isfinite(values).all():
        raise BrokenSample("its embedding has NaN or infinite values")
    first = values if values.ndim == 1 else values[0]
    if not first.any():
        raise MissingEmbedding("its embedding is all zeros, the mark of a missing one")
    return values
