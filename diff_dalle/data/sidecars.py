"""Sidecar embeddings: one .npy file per shard, read row by row by offset, locally or remotely, never as a whole."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .. import storage
from ..config import Fault, InputError, quantity
from ..images.decode import BrokenSample
from .arrays import MAX_HEADER, ArrayHeader, MissingEmbedding, Shape, described, parse_header, usable_embedding
from .shards import Shard, ShardFiles

_FIELD = re.compile(r"\{(?:(name)|:0?(\d+)d?)?\}")


@dataclass(frozen=True)
class Sidecar:
    """Which .npy file belongs to a shard, and which of its rows to a sample.

    pattern:     the file's path, local or remote, with one field: ``{}`` = the last digits in the shard's name
                 ("laion-00012.tar": 00012), ``{:04d}`` = the same number padded with zeros to four digits, ``{name}`` =
                 the shard's name without ".tar". A pattern without a folder stands for a file beside the shard.
    index_width: 0 = row i belongs to the shard's i-th sample, in the order of the tar; N = the last N characters of a
                 sample's key are its row's number, as in files that were made from img2dataset's shards.

    Raises InputError for a pattern without exactly one field.
    """

    pattern: str
    index_width: int = 0

    def __post_init__(self):
        if len(_FIELD.findall(self.pattern)) != 1:
            raise InputError(f"the pattern of embeddings is {self.pattern!r}, but must contain {{}} or {{name}} once")
        if self.index_width < 0:
            raise InputError(Fault("index_width", "must be at least 0", self.index_width))

    def path(self, shard: str) -> str:
        """The path of the file that belongs to a shard. Raises InputError when the shard's name does not give it."""
        if storage.scheme(shard) == "pipe":
            folder, names = "", re.findall(r"[^/\s'\"=]+\.(?:tar|tgz)\b", shard, re.IGNORECASE)
            name = names[-1] if names else ""
        else:
            folder, name = storage.split(shard)
        name = re.sub(r"\.(tar|tar\.gz|tgz)$", "", name, flags=re.IGNORECASE)
        digits = re.findall(r"\d+", name)

        def fill(field: re.Match) -> str:
            if field[1]:
                return name
            return f"{int(digits[-1]):0{field[2]}d}" if field[2] else digits[-1]

        if not (name if "{name}" in self.pattern else digits):
            raise InputError(f"{shard} has no number in its name to put into the pattern of embeddings {self.pattern}")
        path = _FIELD.sub(fill, self.pattern)
        if storage.is_remote(path) or path != os.path.basename(path):
            return path
        if storage.scheme(shard) == "pipe":
            raise InputError(f"{shard} has no folder for the embeddings {path}: put a folder or a URL before the name")
        return storage.join(folder, path)

    def paths(self, shards: Sequence[str], remedy: str) -> dict[str, str]:
        """Each shard's file, by shard. InputError, which ends with ``remedy``, where two would share one."""
        owners: dict[str, str] = {}
        for shard in shards:
            path = self.path(shard)
            if owners.setdefault(path, shard) != shard:
                raise InputError(f"{owners[path]} and {shard} would share the embeddings {path}: {remedy}")
        return {shard: path for path, shard in owners.items()}


@dataclass(frozen=True)
class _Array:
    """A sidecar file and what its header says: [rows, width] or [rows, tokens, width]."""

    file: Shard
    header: ArrayHeader

    @property
    def rows(self) -> int:
        return self.header.shape[0]


class SidecarFiles:
    """The sidecar files of a list of shards.

    shape:   of an embedding: (width,) of a picture or text, (length, width) of the states of a text's tokens, of which
             the files may have another number.
    shards:  the shards' paths.
    samples: the shards' numbers of samples; a shard without any needs no file.

    All headers are read when it is created. ``absent`` are the paths of files that do not exist, by their shards'
    numbers. Raises InputError when none exists, and naming the file unless it is complete and holds a floating-point
    array [rows, width] or [rows, tokens, width] in C order with a row for every sample of its shard.
    """

    def __init__(
        self,
        sidecar: Sidecar,
        shape: Shape,
        shards: Sequence[str],
        samples: Sequence[int],
        files: ShardFiles,
    ):
        self.sidecar, self.shape, self.files = sidecar, shape, files
        remedy = "use {name}, or a pattern without a folder, which stands for a file beside the shard"
        paths = sidecar.paths([shard for shard, count in zip(shards, samples, strict=True) if count], remedy)
        opened = storage.in_parallel(self._open, list(paths.values()))
        arrays = dict(zip(paths, opened, strict=True))
        self._arrays = [arrays.get(shard) for shard in shards]
        self.absent = {i: paths[shard] for i, shard in enumerate(shards) if shard in paths and not arrays[shard]}
        if self.absent and len(self.absent) == len(paths):
            first = next(iter(self.absent.values()))
            raise InputError(f"none of the embeddings of {quantity(len(paths), 'shard')} exists, the first {first}")
        for shard, array, count in zip(shards, self._arrays, samples, strict=True):
            if array and not sidecar.index_width and array.rows < count:
                raise InputError(f"{array.file.path} has {array.rows:,} embeddings, but {shard} has {count:,} samples")

    def _open(self, path: str) -> _Array | None:
        """None when there is no such file."""
        try:
            file = self.files.examine(path)
        except InputError as error:
            if isinstance(error.__cause__, Exception) and storage.is_missing(error.__cause__):
                return None
            raise InputError(f"the embeddings {path} cannot be read: {error}") from error
        try:
            header = parse_header(self.files.read(file, 0, min(file.size, MAX_HEADER)))
        except ValueError as error:  # InputError too
            raise InputError(f"the embeddings {path} cannot be read: {error}") from error
        shape, expected = header.shape, self.shape
        if len(shape) != len(expected) + 1 or shape[-1] != expected[-1] or 0 in shape[1:] or not header.is_float:
            what = "embeddings" if len(expected) == 1 else "token states of texts"
            rows = described(expected).replace("[", "[rows, ")
            raise InputError(f"{path} holds {header}, but must hold floating-point {what} {rows}")
        if header.fortran_order:
            raise InputError(f"{path} is in Fortran order: save it again with numpy.ascontiguousarray")
        if file.size < header.offset + math.prod(shape) * header.dtype.itemsize:
            raise InputError(f"{path} is truncated: {shape[0]:,} embeddings do not fit in its {file.size:,} bytes")
        return _Array(file, header)

    def in_place(self, shard: int) -> bool:
        """Whether rows are read by range requests, where concurrent reads are faster than consecutive ones."""
        array = self._arrays[shard]
        return array is not None and self.files.in_place(array.file)

    def read(self, shard: int, row: int) -> np.ndarray:
        """A row, float32 of ``shape``. Raises MissingEmbedding when it does not exist or is all zeros, and BrokenSample
        when it is not a usable one."""
        array = self._arrays[shard]
        if array is None or not 0 <= row < array.rows:
            raise MissingEmbedding(f"its embedding would be row {row} of {array.rows if array else 0:,}")
        header, stored = array.header, array.header.shape[1:]
        wanted = stored if len(stored) == 1 else (min(stored[0], self.shape[0]), stored[1])
        size = math.prod(wanted) * header.dtype.itemsize
        start = header.offset + row * math.prod(stored) * header.dtype.itemsize
        data = self.files.read(array.file, start, size)
        if len(data) < size:
            raise BrokenSample(f"its embedding is beyond the end of {array.file.path}")
        return usable_embedding(header, np.frombuffer(data, header.dtype).reshape(wanted), self.shape)
