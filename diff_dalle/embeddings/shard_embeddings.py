"""The embeddings of one shard: read, encoded in batches, and checked when they are there already."""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from .. import storage
from ..config import InputError, named, quantity
from ..data.arrays import parse_header
from ..data.collection import Unavailable
from ..images.decode import BrokenSample
from .material import Material

AHEAD = 2  # batches that are read while one is encoded
THREADS = 16  # that read and decode
SPARSE = 100  # rows of a file per sample above which the keys are no numbers of rows
TOLERANCE = {"fp32": 0.01, "bf16": 0.05, "fp16": 0.05}  # of embeddings made again; float16 rounds by 0.0005


class ShardWork:
    """A shard, and the embeddings that are made of it.

    missing: samples without an embedding, by their number in the collection, with the reason.
    """

    def __init__(self, material: Material, shard: int):
        self.material, self.collection, self.shard = material, material.collection, shard
        self.index_width, self.dtype = material.form.index_width, material.form.dtype
        self.paths = {kind: paths[shard] for kind, paths in material.paths.items()}
        self.missing: dict[int, str] = {}

    def rows(self) -> tuple[np.ndarray, int]:
        """The row of each usable sample, -1 = none, and the number of rows. InputError for keys that give none, or
        one row to two samples."""
        rows, path = self.collection.rows(self.shard, self.index_width), self.collection.shards[self.shard].path
        if not self.index_width:
            return rows, self.collection.totals[self.shard]
        taken = rows[rows >= 0]
        if len(rows) and not len(taken):
            raise InputError(
                f"no key in {path} ends with {quantity(self.index_width, 'digit')}, such as "
                f"{self.collection.key(self.shard, 0)}: set {named('index_width')} 0, which numbers rows in the order "
                "of the tar"
            )
        values, counts = np.unique(taken, return_counts=True)
        if (counts > 1).any():
            row = int(values[counts.argmax()])
            first, second = np.flatnonzero(rows == row)[:2].tolist()
            raise InputError(
                f"{self.collection.describe(self.shard, first)} and {self.collection.key(self.shard, second)} would "
                f"share row {row}: set {named('index_width')} to more of the last digits of the keys, or to 0"
            )
        count = int(taken.max(initial=-1)) + 1
        if count > SPARSE * (len(rows) + SPARSE):
            raise InputError(
                f"the keys of {path} would make {count:,} rows for {quantity(len(rows), 'sample')}: set "
                f"{named('index_width')} to fewer of the last digits of the keys, or to 0"
            )
        return rows, count

    def steps(self) -> Iterator[int]:
        """Make the files, unless they are there. Yields the number of samples after each batch."""
        rows, count = self.rows()
        for member in np.flatnonzero(rows < 0).tolist():
            self.missing[member] = f"its key does not end with {quantity(self.index_width, 'digit')}"
        if (yield from self._finished(rows, count)):
            return
        arrays = {what: np.zeros((count, *record.shape), self.dtype) for what, record in self.material.records.items()}
        members = self.material.ordered(self.shard, np.flatnonzero(rows >= 0).tolist())
        for found, missing, embeddings in self._embeddings(members):
            self.missing |= missing
            for what, values in embeddings.items():
                arrays[what][rows[found]] = values
            yield len(found) + len(missing)
        for what, array in arrays.items():
            with storage.atomic_writer(self.paths[what]) as file:
                np.lib.format.write_array(file, array, (1, 0), allow_pickle=False)

    def _embeddings(self, members: Sequence[int]) -> Iterator[tuple[list[int], dict[int, str], dict[str, np.ndarray]]]:
        """Batch by batch, in order: the samples that can be used, the others with the reasons, and the embeddings of
        the former."""
        waiting: deque[tuple[list[int], dict[int, str], Future]] = deque()
        for batch in self._batches(members):
            missing = {member: str(part) for member, part in batch.items() if isinstance(part, BrokenSample)}
            found = [member for member in batch if member not in missing]
            parts = [batch[member] for member in found]
            encoders = self.material.encoders
            waiting.append((found, missing, encoders.pool.submit(self._encode, parts)))
            if len(waiting) > encoders.count:
                yield self._checked(*waiting.popleft())
        while waiting:
            yield self._checked(*waiting.popleft())

    def _encode(self, parts: Sequence) -> Mapping[str, np.ndarray]:
        return self.material.encode(parts) if parts else {}

    def _checked(self, found: list[int], missing: dict[int, str], future: Future):
        """Embeddings in the type of the files. InputError for values that are not finite there."""
        embeddings = {}
        for what, values in future.result().items():
            with np.errstate(over="ignore"):
                embeddings[what] = values.astype(self.dtype)
            bad = ~np.isfinite(embeddings[what].reshape(len(values), -1)).all(1)
            if bad.any():
                raise InputError(
                    f"the {what} embedding of {self.collection.describe(self.shard, found[int(bad.argmax())])} "
                    f"has values that are not finite in {self.dtype}: {self.material.finer}"
                )
        return found, missing, embeddings

    def _finished(self, rows: np.ndarray, count: int) -> Generator[int, None, bool]:
        """Whether the files are there, complete, and those of this shard and CLIP: the samples of their empty rows
        still cannot be read, and the first and the last embedding come out the same again."""
        arrays = {}
        for what, record in self.material.records.items():
            array = _load(self.paths[what], (count, *record.shape), self.dtype)
            if array is None:
                return False
            arrays[what] = array
        present = np.zeros(len(rows), dtype=bool)
        present[rows >= 0] = np.logical_and.reduce([_filled(array)[rows[rows >= 0]] for array in arrays.values()])
        missing: dict[int, str] = {}
        for batch in self._batches(np.flatnonzero(~present & (rows >= 0)).tolist()):
            if not all(isinstance(part, BrokenSample) for part in batch.values()):
                return False
            missing |= {member: str(part) for member, part in batch.items()}
            yield 0
        tolerance = TOLERANCE[self.material.precision]
        members = np.flatnonzero(present).tolist()
        probes = sorted({*members[:1], *members[-1:]})
        for found, broken, embeddings in self._embeddings(probes):
            if broken:
                return False
            for what, values in embeddings.items():
                if _distance(arrays[what][rows[found]], values) > tolerance:
                    return False
        self.missing |= missing
        yield len(rows)
        return True

    def _batches(self, members: Sequence[int]) -> Iterator[dict[int, object]]:
        """Samples in batches, in order; those that cannot be used as the BrokenSample that says why."""
        waiting: deque[dict[int, Future]] = deque()
        batch_size = self.material.form.batch_size
        starts = range(0, len(members), batch_size)
        pool = ThreadPoolExecutor(THREADS)
        try:
            for batch in (members[start : start + batch_size] for start in starts):
                waiting.append({member: pool.submit(self._part, member) for member in batch})
                if len(waiting) > AHEAD:
                    yield {member: future.result() for member, future in waiting.popleft().items()}
            while waiting:
                yield {member: future.result() for member, future in waiting.popleft().items()}
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _part(self, member: int) -> object:
        """What is encoded of a sample, or why there is nothing. InputError when its storage does not answer, which is
        no property of the sample."""
        raw = self.collection.fetch(self.shard, member)
        if isinstance(raw.problem, Unavailable):
            raise storage.UnavailableError(str(raw.problem))
        try:
            raw.check()
            return self.material.read(self.shard, member, raw)
        except BrokenSample as reason:
            return reason


def _load(path: str, shape: tuple[int, ...], dtype: str) -> np.ndarray | None:
    """The array in a file; None unless it exists, whole and with this shape and type."""
    if not storage.exists(path):
        return None
    data = storage.read_bytes(path)
    with contextlib.suppress(ValueError):
        header = parse_header(data)
        count = math.prod(shape)
        whole = len(data) == header.offset + count * header.dtype.itemsize
        if whole and (header.shape, header.dtype, header.fortran_order) == (shape, np.dtype(dtype), False):
            return np.frombuffer(data, header.dtype, count, header.offset).reshape(shape)
    return None


def _filled(array: np.ndarray) -> np.ndarray:
    """Which rows hold an embedding, as ``data.embedding.check_embedding`` sees it: [rows] bool."""
    first = array if array.ndim == 2 else array[:, 0]
    return np.any(first, axis=1)


def _distance(stored: np.ndarray, made: np.ndarray) -> float:
    """The largest distance between embeddings, as a fraction of their norms."""
    a, b = (values.reshape(len(values), -1).astype(np.float64) for values in (stored, made))
    return float((np.linalg.norm(a - b, axis=1) / np.linalg.norm(b, axis=1)).max())
