"""A checkpoint whose tensors are divided among processes: a folder that each of them writes its share of.

``index.pt``, written last, makes the folder complete. It is a checkpoint file of the role "sharded" (see checkpoint.py)
with all that the ordinary files of the step would say, and where the values of their tensors are: as bytes, nothing
else, in one file for each process. Files that ``torch.distributed.checkpoint`` would write by itself hold pickles.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from .. import storage
from ..errors import InputError
from .checkpoint import INDEX, load_file
from .content import DamagedError

ROLE = "sharded"
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.uint8,
        torch.int8, torch.bool,
    )
}  # fmt: skip
ALIGNMENT = 64  # bytes, of mapped tensors
COLUMNS = 6  # of a row in ``Stored.rows``


@dataclass(frozen=True)
class Stored:
    """Where a tensor is. rows: [chunks, COLUMNS] int64, each the first row of a chunk along the first dimension, its
    number of rows, the number of its file, offset and length there in bytes, and CRC-32 of these bytes. A tensor
    without dimensions has one chunk of one row."""

    shape: torch.Size
    dtype: torch.dtype
    rows: Tensor

    def plain(self) -> dict[str, Any]:
        return {"shape": list(self.shape), "dtype": str(self.dtype).removeprefix("torch."), "rows": self.rows}


class ShardedFolder:
    """A complete sharded checkpoint, open for reading. DamagedError unless ``path`` is one.

    content: of its index, as ``load_file`` returns it.
    states:  the states by role, prefixed by the trainee's name in a run of several, with a tensor that is the number
             of an entry of ``tensors`` in place of each tensor.
    """

    def __init__(self, path: str):
        self.path = path
        index = storage.join(path, INDEX)
        self.content = load_file(index, (ROLE,), values=True)
        try:
            state = self.content["state"]
            self.files = [storage.join(path, name) for name in _names(state["files"])]
            self.tensors = [_stored(entry) for entry in state["tensors"]]
            self.states: dict[str, Any] = {str(key): value for key, value in state["states"].items()}
            _check_slots(self.states, len(self.tensors))
            sizes = [storage.size_and_tag(file)[0] if storage.exists(file) else -1 for file in self.files]
            self._check_rows(sizes)
        except InputError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError):
            raise DamagedError(f"{index} is damaged: it does not say where tensors are") from None

    def _check_rows(self, sizes: list[int]) -> None:
        """Every tensor is covered by its chunks, once and in order, and these lie within their files."""
        total = 0
        for stored in self.tensors:
            end = 0
            for first, count, file, offset, length, _ in stored.rows.tolist():
                if first != end or count < 0 or offset < 0 or file < 0 or length != count * _row_bytes(stored):
                    raise ValueError
                if offset + length > sizes[file]:
                    raise DamagedError(f"{self.files[file]} is missing or truncated")
                end, total = end + count, total + length
            if end != (stored.shape[0] if stored.shape else 1):
                raise ValueError
        if total > sum(sizes):  # chunks may overlap, and copies of them need more memory
            raise ValueError

    def read_chunk(self, number: int, chunk: int) -> Tensor:
        """The values of one chunk of a tensor. DamagedError when they are not those that were written."""
        stored = self.tensors[number]
        _, count, file, offset, length, checksum = stored.rows[chunk].tolist()
        data = storage.read_bytes(self.files[file], offset, length)
        if len(data) != length or zlib.crc32(data) != checksum:
            raise DamagedError(f"{self.files[file]} is damaged: the checksum of bytes from {offset:,} on is wrong")
        shape = (count, *stored.shape[1:]) if stored.shape else ()
        if not length:
            return torch.empty(shape, dtype=stored.dtype)
        return torch.frombuffer(bytearray(data), dtype=stored.dtype).view(shape)

    def fill(self, number: int, whole: Tensor) -> None:
        """Write all values of a tensor into ``whole``, chunk by chunk."""
        for chunk, (first, count, *_) in enumerate(self.tensors[number].rows.tolist()):
            target = whole.narrow(0, first, count) if whole.ndim else whole
            target.copy_(self.read_chunk(number, chunk))

    def outline(self, key: str) -> Any:
        """A state with a tensor on the meta device in place of each tensor, but those of one number."""

        def described(number: int) -> Tensor:
            stored = self.tensors[number]
            if stored.shape:
                return torch.empty(stored.shape, dtype=stored.dtype, device="meta")
            whole = torch.empty((), dtype=stored.dtype)
            self.fill(number, whole)
            return whole

        return replaced(self.states[key], lambda slot: described(int(slot)))

    def read(self, key: str, file: BinaryIO) -> Any:
        """A state with all its tensors, which are memory-mapped: ``file``, empty and open, gets their values."""
        numbers: list[int] = []
        replaced(self.states[key], lambda slot: numbers.append(int(slot)))
        stored = [self.tensors[number] for number in numbers]
        tensors = mapped_tensors([(each.shape, each.dtype) for each in stored], file)
        for number, whole in zip(numbers, tensors, strict=True):
            self.fill(number, whole)
        found = iter(tensors)
        return replaced(self.states[key], lambda slot: next(found))


def mapped_tensors(described: Sequence[tuple[torch.Size, torch.dtype]], file: BinaryIO) -> list[Tensor]:
    """Tensors of these shapes and types, each by itself, whose values are those of an open file, which is empty
    before."""
    sizes = [shape.numel() * dtype.itemsize for shape, dtype in described]
    ends = list(itertools.accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes))
    file.truncate(ends[-1] if ends else 0)
    return [
        torch.from_numpy(np.memmap(file, np.uint8, "r+", start, (size,))).view(dtype).view(shape)
        if size
        else torch.empty(shape, dtype=dtype)  # which cannot be mapped
        for start, size, (shape, dtype) in zip([0, *ends], sizes, described, strict=False)
    ]


@contextlib.contextmanager
def temporary_file(folder: str) -> Iterator[BinaryIO]:
    """A file without a name for ``ShardedFolder.read``, in a folder if that is local. What is mapped from it stays."""
    place = None if storage.is_remote(folder) else storage.local_path(folder)
    with storage.explained(folder), tempfile.TemporaryFile(prefix="diff_dalle-", dir=place) as file:
        yield file


def is_sharded_folder(path: str) -> bool:
    """Whether a path is that of a sharded checkpoint."""
    return not path.endswith(".pt") and storage.exists(storage.join(path, INDEX))


def replaced(state: Any, call: Any) -> Any:
    """A state of nested dicts and lists with ``call(tensor)`` in place of each tensor, in their order."""
    if isinstance(state, Tensor):
        return call(state)
    if isinstance(state, Mapping):
        return {key: replaced(value, call) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [replaced(value, call) for value in state]
    return state


def numbered(state: Any) -> tuple[Any, list[Tensor]]:
    """A state with a number in place of each tensor, and the tensors."""
    tensors: list[Tensor] = []

    def number(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return torch.tensor(len(tensors) - 1)

    return replaced(state, number), tensors


def _names(given: Any) -> Iterator[str]:
    for name in given:
        if not (type(name) is str and name.endswith(".bin") and name.removesuffix(".bin").isalnum()):
            raise ValueError  # never a path, which could leave the folder
        yield name


def _stored(entry: Mapping[str, Any]) -> Stored:
    shape, rows = torch.Size(entry["shape"]), entry["rows"]
    if min(shape, default=0) < 0 or rows.dtype is not torch.int64 or rows.ndim != 2 or rows.shape[1] != COLUMNS:
        raise ValueError
    return Stored(shape, DTYPES[entry["dtype"]], rows)


def _row_bytes(stored: Stored) -> int:
    return math.prod(stored.shape[1:]) * stored.dtype.itemsize


def _check_slots(states: Any, count: int) -> None:
    def check(slot: Tensor) -> None:
        if slot.ndim or slot.dtype is not torch.int64 or not 0 <= int(slot) < count:
            raise ValueError

    replaced(states, check)
