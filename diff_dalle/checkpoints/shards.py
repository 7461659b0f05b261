"""A checkpoint whose tensors are divided among processes: a folder that each of them writes its share of.

``index.pt``, written last, makes the folder complete. It is a checkpoint file of the role "sharded" (see checkpoint.py)
with all that the ordinary files of the step would say, and where the values of their tensors are: as bytes, nothing
else, in one file for each process. Files that ``torch.distributed.checkpoint`` would write by itself hold pickles.
"""

from __future__ import annotations

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
from tqdm import tqdm

from .. import storage
from ..config import InputError
from ..distributed.parallel import is_written, own_rows
from ..distributed.world import World
from .checkpoint import INDEX, Identity, file_name, load_file, save_file
from .content import DamagedError, is_shape, numbered, replaced

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

    @property
    def row_shape(self) -> torch.Size:
        return self.shape[1:]


def save_sharded(
    folder: str, states: Mapping[str, Any], world: World, identity: Identity, step: int, samples: int
) -> None:
    """Write states by role, whose tensors may be sharded, into a folder. Every rank calls it.

    InputError, on all ranks, when one of them cannot write.
    """
    outline, tensors = numbered(states)
    index = storage.join(folder, INDEX)

    def begin() -> None:
        """An index of an earlier, interrupted attempt must not outlive its files."""
        storage.make_dirs(folder)
        if storage.exists(index):
            storage.remove(index)

    def finish() -> None:
        rows: list[list[list[int]]] = [[] for _ in tensors]
        for file, part in enumerate(written):
            for number, first, count, *place in part:
                rows[number].append([first, count, file, *place])
        entries = []
        for tensor, chunks in zip(tensors, rows, strict=True):
            table = torch.tensor(sorted(chunks), dtype=torch.int64).view(-1, COLUMNS)
            dtype = str(tensor.dtype).removeprefix("torch.")
            entries.append({"shape": list(tensor.shape), "dtype": dtype, "rows": table})
        files = [_file_name(rank) for rank in range(world.size)]
        save_file(index, ROLE, identity, step, samples, {"states": outline, "tensors": entries, "files": files})

    world.on_main(begin)
    path = storage.join(folder, _file_name(world.rank))
    written = world.gather(world.together(lambda: _write_shares(path, tensors, world)))
    world.on_main(finish)


def _file_name(rank: int) -> str:
    return f"rank{rank:05d}.bin"


def _write_shares(path: str, tensors: Sequence[Tensor], world: World) -> list[tuple[int, ...]]:
    """Write what this rank has of tensors: the number of each, first row, number of rows, offset, length, checksum."""
    found: list[tuple[int, ...]] = []
    with storage.atomic_writer(path) as file:
        for number, tensor in enumerate(tensors):
            first, own = own_rows(tensor.detach())
            count = len(own) if own.ndim else 1
            if count and is_written(tensor, world):
                data = own.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
                found.append((number, first, count, file.tell(), len(data), zlib.crc32(data)))
                file.write(data)
    return found


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
            replaced(self.states, self._check_slot)
            self._check_rows()
        except InputError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError):
            raise DamagedError(f"{index} is damaged: it does not say where tensors are") from None

    def _check_slot(self, slot: Tensor) -> None:
        if slot.ndim or slot.dtype is not torch.int64 or not 0 <= int(slot) < len(self.tensors):
            raise ValueError

    def _check_rows(self) -> None:
        """Every tensor is covered by its chunks, once and in order, and these lie within their files."""
        sizes = [storage.size_and_tag(file)[0] if storage.exists(file) else -1 for file in self.files]
        total = 0
        for stored in self.tensors:
            end, row_bytes = 0, math.prod(stored.row_shape) * stored.dtype.itemsize
            for first, count, file, offset, length, _ in stored.rows.tolist():
                if first != end or count < 0 or offset < 0 or file < 0 or length != count * row_bytes:
                    raise ValueError
                if offset + length > sizes[file]:
                    raise DamagedError(f"{self.files[file]} is missing or truncated")
                end, total = end + count, total + length
            if end != (stored.shape[0] if stored.shape else 1):
                raise ValueError
        if total > sum(sizes):  # chunks may overlap, and copies of them need more memory
            raise ValueError

    def fill(self, slot: Tensor, first: int, target: Tensor) -> None:
        """Overwrite ``target`` with the rows of a tensor from ``first`` on. DamagedError when they are not those that
        were written."""
        stored = self.tensors[int(slot)]
        target = target if target.ndim else target.view(1)
        for begin, count, file, offset, length, checksum in stored.rows.tolist():
            low, high = max(begin, first), min(begin + count, first + len(target))
            if low >= high or not length:
                continue
            data = storage.read_bytes(self.files[file], offset, length)
            if len(data) != length or zlib.crc32(data) != checksum:
                raise DamagedError(f"{self.files[file]} is damaged: the checksum of bytes from {offset:,} on is wrong")
            chunk = torch.frombuffer(bytearray(data), dtype=stored.dtype).view(count, *stored.row_shape)
            target[low - first : high - first] = chunk[low - begin : high - begin]

    def outline(self, key: str) -> Any:
        """A state with a tensor on the meta device in place of each tensor, but those of one number."""

        def described(slot: Tensor) -> Tensor:
            stored = self.tensors[int(slot)]
            found = torch.empty(stored.shape, dtype=stored.dtype, device="meta" if stored.shape else "cpu")
            if not stored.shape:
                self.fill(slot, 0, found)
            return found

        return replaced(self.states[key], described)

    def read(self, key: str, folder: str) -> Any:
        """A state with all its tensors, which are memory-mapped from a file without a name, in a folder if that is
        local."""
        outline, slots = numbered(self.states[key])
        place = None if storage.is_remote(folder) else storage.local_path(folder)
        with storage.explained(folder), tempfile.TemporaryFile(prefix="diff_dalle-", dir=place) as file:
            tensors = _mapped([self.tensors[int(slot)] for slot in slots], file)
            for slot, whole in zip(slots, tensors, strict=True):
                self.fill(slot, 0, whole)
        return replaced(outline, lambda number: tensors[int(number)])


def _mapped(described: Sequence[Stored], file: BinaryIO) -> list[Tensor]:
    """Tensors of these shapes and types, each by itself, whose values are those of an open file, which is empty
    before."""
    sizes = [stored.shape.numel() * stored.dtype.itemsize for stored in described]
    ends = list(itertools.accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes))
    file.truncate(ends[-1] if ends else 0)
    return [
        torch.from_numpy(np.memmap(file, np.uint8, "r+", start, (size,))).view(stored.dtype).view(stored.shape)
        if size
        else torch.empty(stored.shape, dtype=stored.dtype)  # which cannot be mapped
        for start, size, stored in zip([0, *ends], sizes, described, strict=False)
    ]


def _names(given: Any) -> Iterator[str]:
    for name in given:
        if not (type(name) is str and name.endswith(".bin") and name.removesuffix(".bin").isalnum()):
            raise ValueError  # never a path, which could leave the folder
        yield name


def _stored(entry: Mapping[str, Any]) -> Stored:
    shape, rows = torch.Size(entry["shape"]), entry["rows"]
    if not is_shape(shape) or rows.dtype is not torch.int64 or rows.ndim != 2 or rows.shape[1] != COLUMNS:
        raise ValueError
    return Stored(shape, DTYPES[entry["dtype"]], rows)


def consolidate(path: str, out: str) -> list[str]:
    """Write all that a sharded checkpoint holds as ordinary files, as a run without sharding would have, with one
    tensor at a time in memory; returns their paths. out: their folder. DamagedError for a checkpoint that is not
    whole."""
    folder, paths = ShardedFolder(path), []
    content = folder.content
    identity = Identity(content["kind"], content["config"], content["tokenizer"], content["vocabulary"])
    storage.make_dirs(out)
    for key in tqdm(folder.states, desc="consolidating", unit="file", disable=None):
        trainee, _, role = key.rpartition("/")
        paths.append(storage.join(out, file_name(key, content["step"])))
        state = folder.read(key, out)
        save_file(paths[-1], role, identity, content["step"], content["samples"], state, trainee)
    return paths
