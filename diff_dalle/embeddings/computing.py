"""Computing the embeddings of all samples of shards once, into sidecar files."""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import numpy as np
from tqdm import tqdm

from .. import storage
from ..config import Fault, InputError, named, quantity
from ..data.arrays import parse_header
from ..data.collection import Unavailable
from ..distributed.world import World
from ..images.decode import BrokenSample
from .clip import load_clip
from .material import EmbeddingsConfig, Images, Material, Texts
from .sources import FILE, folder_record

LISTED = 1000  # missing samples that are named in a record
AHEAD = 2  # batches that are read while one is encoded
THREADS = 16  # that read and decode
SPARSE = 100  # rows of a file per sample above which the keys are no numbers of rows
TOLERANCE = {"fp32": 0.01, "bf16": 0.05, "fp16": 0.05}  # of embeddings made again; float16 rounds by 0.0005
Item = TypeVar("Item")


def compute_embeddings(config: EmbeddingsConfig, world: World) -> list[str]:
    """Write the embeddings of all samples of ``data_dir`` into ``out_dir``, a file for each shard, and for each kind of
    embedding a record of how they were made (``sources.py``). All processes of ``world`` call it, and share the shards.

    Rows of samples that cannot be read are zeros, the mark of a missing embedding. Files that are there, complete and
    still right stay; called again after an interruption, it goes on. Returns lines about what was made.

    Raises InputError for a missing setting, data without images or captions, and a folder that holds embeddings made
    in another way.
    """
    names = ("data_dir", "clip_path", "out_dir")
    InputError.check(Fault(name, "is not set") for name in names if not getattr(config, name))
    clip = load_clip(config.clip_make, config.clip_path, world.device, config.precision)
    if "text_states" in config.what and not clip.text_width:
        rule = f"has text_states, but the text tower of {clip.name} has none to give: leave it out"
        raise InputError(Fault("what", rule))
    texts = tuple(kind for kind in config.what if kind != "image")
    lines = make_embeddings(Images(config, clip, world), world) if "image" in config.what else []
    return lines + (make_embeddings(Texts(config, clip, texts, world), world) if texts else [])


def make_embeddings(material: Material, world: World) -> list[str]:
    """Make the embeddings of a material, as ``compute_embeddings`` says. Returns lines about what was made."""
    if world.is_main:
        for kind in material.records:
            _claim(material, kind)
    world.barrier()
    collection = material.collection
    sizes = {kind: sum(collection.totals) * record.row_bytes / 1e6 for kind, record in material.records.items()}
    each = ", ".join(f"{kind} {size:,.1f}" for kind, size in sizes.items())
    world.print(f"Disk: about {sum(sizes.values()):,.1f} MB in {material.out_dir} ({each}).")
    works = [ShardWork(material, shard) for shard in range(len(collection.shards))[world.rank :: world.size]]
    # Batch by batch in step with the other processes: one that has done its own would wait for them in a single
    # collective for longer than ``timeout``.
    steps = _steps(material, works, world)
    while world.any(next(steps, False)):
        pass
    found = [
        (work.shard, len(work.missing), [_named(work, member) for member in sorted(work.missing)[:LISTED]])
        for work in works
    ]
    missing = sorted(each for part in world.gather(found) for each in part)
    named_samples = [sample for _, _, samples in missing for sample in samples]
    return _finish(material, sum(count for _, count, _ in missing), named_samples, world)


def _named(work: ShardWork, member: int) -> tuple[str, str]:
    """A missing sample, and why it is."""
    return work.collection.describe(work.shard, member), work.missing[member]


def _claim(material: Material, kind: str) -> None:
    """Write the record of a folder that is empty, or holds embeddings made in the same way."""
    folder, record = material.folder(kind), material.records[kind]
    another = f"choose another {material.place}"
    there = folder_record(folder)
    if there is None:
        if storage.exists(folder) and any(path.endswith(".npy") for path in storage.list_files(folder)):
            raise InputError(f"{folder} holds embeddings without a record ({FILE}): {another}")
        storage.make_dirs(folder)
    elif difference := there.difference(record):
        raise InputError(f"{folder} holds embeddings made in another way ({difference}): {another}")
    record.write(folder, {}, {})


def _steps(material: Material, works: Sequence[ShardWork], world: World) -> Iterator[bool]:
    total = sum(int(material.collection.counts[work.shard]) for work in works)
    of = f" (process 1 of {world.size})" if world.size > 1 else ""
    title = f"embedding {' and '.join(material.records)}{of}"
    with tqdm(total=total, desc=title, unit="sample", disable=not world.is_main or None) as bar:
        for work in works:
            for done in work.steps():
                bar.update(done)
                yield True


def _finish(material: Material, unreadable: int, missing: Sequence[tuple[str, str]], world: World) -> list[str]:
    """Complete the records. Returns lines about what was made."""
    collection = material.collection
    samples = sum(collection.totals)
    embedded = collection.samples - unreadable
    counts = {"shards": len(collection.shards), "samples": samples, "embeddings": embedded}
    counts["missing"] = samples - embedded
    lines = []
    for kind, record in material.records.items():
        folder = material.folder(kind)
        if world.is_main:
            record.write(folder, counts, dict(missing[:LISTED]))
        made, shards = quantity(embedded, "embedding"), quantity(counts["shards"], "shard")
        lines.append(f"{folder}: {made} {list(record.shape)} in {record.dtype}, {shards}, by {record.clip}")
    if counts["missing"]:
        lines.append(
            f"{quantity(counts['missing'], 'sample')} without an embedding: {collection.left_out:,} without "
            f"{material.one}, {unreadable:,} that cannot be read"
        )
        lines += [f"  {sample}: {reason}" for sample, reason in missing[:10]]
    return lines


class ShardWork:
    """A shard, and the embeddings that are made of it.

    missing: samples without an embedding, by their number in the collection, with the reason.
    """

    def __init__(self, material: Material, shard: int):
        self.material, self.collection, self.shard = material, material.collection, shard
        record = next(iter(material.records.values()))
        self.index_width, self.dtype = record.index_width, record.dtype
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
        for found, missing, future in _later(map(self._begun, self._batches(members)), self.material.threads):
            yield found, missing, self._checked(found, future.result())

    def _begun(self, batch: Mapping[int, object]) -> tuple[list[int], dict[int, str], Future]:
        missing = {member: str(part) for member, part in batch.items() if isinstance(part, BrokenSample)}
        found = [member for member in batch if member not in missing]
        return found, missing, self.material.pool.submit(self._encode, [batch[member] for member in found])

    def _encode(self, parts: Sequence) -> Mapping[str, np.ndarray]:
        return self.material.encode(parts) if parts else {}

    def _checked(self, found: Sequence[int], encoded: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Embeddings in the type of the files. InputError for values that are not finite there."""
        embeddings = {}
        for what, values in encoded.items():
            with np.errstate(over="ignore"):
                embeddings[what] = values.astype(self.dtype)
            bad = ~np.isfinite(embeddings[what].reshape(len(values), -1)).all(1)
            if bad.any():
                raise InputError(
                    f"the {what} embedding of {self.collection.describe(self.shard, found[int(bad.argmax())])} "
                    f"has values that are not finite in {self.dtype}: {self.material.finer}"
                )
        return embeddings

    def _finished(self, rows: np.ndarray, count: int) -> Generator[int, None, bool]:
        """Whether the files are there, complete, and those of this shard and CLIP: the samples of their empty rows
        still cannot be read, and the first and the last embedding come out the same again."""
        arrays = {}
        for what, record in self.material.records.items():
            array = _load(self.paths[what], (count, *record.shape), self.dtype)
            if array is None:
                return False
            arrays[what] = array
        members, missing = np.flatnonzero(rows >= 0), dict[int, str]()
        present = np.logical_and.reduce([_filled(array)[rows[members]] for array in arrays.values()])
        for batch in self._batches(members[~present].tolist()):
            if not all(isinstance(part, BrokenSample) for part in batch.values()):
                return False
            missing |= {member: str(part) for member, part in batch.items()}
            yield 0
        tolerance = TOLERANCE[self.material.precision]
        embedded = members[present].tolist()
        for found, broken, embeddings in self._embeddings(sorted({*embedded[:1], *embedded[-1:]})):
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
        size = self.material.batch_size
        batches = (members[start : start + size] for start in range(0, len(members), size))
        pool = ThreadPoolExecutor(THREADS)
        begun = ({member: pool.submit(self._part, member) for member in batch} for batch in batches)
        try:
            for batch in _later(begun, AHEAD):
                yield {member: future.result() for member, future in batch.items()}
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


def _later(items: Iterable[Item], ahead: int) -> Iterator[Item]:
    """The same, each after ``ahead`` further ones have been begun."""
    waiting = deque[Item]()
    for item in items:
        waiting.append(item)
        if len(waiting) > ahead:
            yield waiting.popleft()
    while waiting:  # what is used is not kept
        yield waiting.popleft()


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
    """Which rows hold an embedding, as ``data.arrays.usable_embedding`` sees it: [rows] bool."""
    first = array if array.ndim == 2 else array[:, 0]
    return np.any(first, axis=1)


def _distance(stored: np.ndarray, made: np.ndarray) -> float:
    """The largest distance between embeddings, as a fraction of their norms."""
    a, b = (values.reshape(len(values), -1).astype(np.float64) for values in (stored, made))
    return float((np.linalg.norm(a - b, axis=1) / np.linalg.norm(b, axis=1)).max())
