"""The data of a large run: index and order of a billion samples in a hundred thousand shards, for a thousand processes.

The shards are described and not written: they are commands, which nothing looks at before a sample is read, with the
summaries that indexing would have left. Only the tables of the shards that a resumed process reads first exist.
"""

from __future__ import annotations

import functools
import os
import pickle
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from diff_dalle.config import InputError
from diff_dalle.data.collection import Collection, collect
from diff_dalle.data.index import save_summaries, table_folders
from diff_dalle.data.loader import CHUNK, DataConfig
from diff_dalle.data.order import Order, streams_for, windows_kept
from diff_dalle.data.shard_table import IMAGE, ShardSummary, Table, save_table
from diff_dalle.data.shards import ShardFiles
from diff_dalle.data.spec import Required
from diff_dalle.data.tar import BLOCK
from diff_dalle.distributed.world import deal
from diff_dalle.evaluation.report import markdown_table

from .timing import in_fresh_process

REQUIRED = Required({IMAGE: "images", "txt": "captions"})
SEED = 0
LISTING, RECEIVING = "rank 0: list the shards and find their index", "other ranks: receive the index"
TABLES = "tables of the first chunk"
MEMBERS = ("jpg", "txt")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Fleet:
    """A data set and the processes that share it.

    shards, samples: their numbers; the same number of samples in each shard.
    nodes, local:    machines, and processes on each.
    fraction:        of an epoch, from its start: the part whose order is computed for every process.
    resumed:         position in epochs at which a process resumes.
    """

    shards: int = 100_000
    samples: int = 10**9
    nodes: int = 128
    local: int = 8
    fraction: float = 0.01
    resumed: float = 7.9

    def __str__(self) -> str:
        return (
            f"{self.samples:,} samples in {self.shards:,} shards, {self.processes:,} processes on {self.nodes} nodes, "
            f"{streams_for(self.nodes)} streams, windows of {self.window} shards; the shards are described and not "
            "written; the index is there, as the first start of a run leaves it."
        )

    @property
    def per_shard(self) -> int:
        return self.samples // self.shards

    @property
    def processes(self) -> int:
        return self.nodes * self.local

    @property
    def source(self) -> str:
        return f"expand:pipe:cat {{{0:06d}..{self.shards - 1:06d}}}.tar"

    @property
    def window(self) -> int:
        return DataConfig.shuffle_window

    def order(self, counts: np.ndarray) -> Order:
        """The order that one process computes, as ``Loader`` makes it."""
        return Order(counts, SEED, streams_for(self.nodes), self.window, processes=self.processes)

    def slots(self) -> list[int]:
        """The slot of each rank; the ranks of a node follow each other."""
        return deal([rank // self.local for rank in range(self.processes)])

    def first_chunk(self) -> np.ndarray:
        """The positions of the first samples that rank 0 prepares after it has resumed."""
        position = int(self.resumed * self.samples) // self.processes * self.processes
        return position + self.slots()[0] + self.processes * np.arange(CHUNK)


def shard_table(samples: int) -> Table:
    """The table of a shard whose samples have a member of one block each of ``MEMBERS``."""
    members = np.arange(samples * len(MEMBERS))
    kinds = (members % len(MEMBERS)).astype(np.int32)
    offsets = (2 * members + 1) * BLOCK  # after its header
    keys = [f"{number:09d}" for number in range(samples)]
    sizes = np.full_like(members, BLOCK)
    return Table(keys, list(MEMBERS), (members // len(MEMBERS)).astype(np.int32), kinds, offsets, sizes)


def describe_shards(fleet: Fleet, index_cache: str) -> None:
    """Write the index that the first start of a run would have left in ``index_cache``."""
    size = (2 * len(MEMBERS) * fleet.per_shard + 2) * BLOCK
    about = ShardSummary(size, "", False, "", {"/".join(MEMBERS): fleet.per_shard})
    folder, _ = table_folders(path_of(0), index_cache)
    os.makedirs(folder[0])
    save_summaries(folder[0], {table_folders(path_of(i), index_cache)[1]: about for i in range(fleet.shards)})
    shards, _ = fleet.order(np.full(fleet.shards, fleet.per_shard)).samples_at(fleet.first_chunk())
    contents = shard_table(fleet.per_shard)
    for shard in np.unique(shards).tolist():
        save_table(os.path.join(folder[0], f"{table_folders(path_of(shard), index_cache)[1]}.npz"), about, contents)


def path_of(shard: int) -> str:
    return f"pipe:cat {shard:06d}.tar"


def measured_part(call: Callable[[], Result], traced: bool) -> tuple[Result, float]:
    """What ``call`` returns, with the seconds it takes, or, traced, the bytes that it leaves allocated."""
    if not traced:
        start = time.perf_counter()
        result = call()
        return result, time.perf_counter() - start
    tracemalloc.start()
    result = call()
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return result, size


@dataclass(frozen=True)
class Start:
    """A start of a process: seconds and bytes kept by its parts; bytes of the index as it is sent; tables that the
    first chunk needs, and how many a process keeps."""

    seconds: dict[str, float]
    kept: dict[str, float]
    message: int
    tables: int
    remembered: int


def start(fleet: Fleet, index_cache: str) -> Start:
    """Every part once for its time and once more for its memory, which takes longer to measure; but for the listing,
    which only rank 0 does."""
    remembered = windows_kept(streams_for(fleet.nodes), fleet.processes) * fleet.window
    files = ShardFiles(index_cache=index_cache)
    found: dict[bool, dict[str, float]] = {False: {}, True: {}}

    def part(name: str, call: Callable[[], Result], traced: bool = False) -> Result:
        result, found[traced][name] = measured_part(call, traced)
        return result

    message = pickle.dumps(  # as ``World.broadcast`` sends it
        part(LISTING, lambda: collect([fleet.source], REQUIRED, files, remembered=remembered))
    )
    chunk, tables = fleet.first_chunk(), 0
    for traced in (False, True):
        # The bytes above, never a file's.
        received: Collection = part(RECEIVING, lambda: pickle.loads(message), traced)
        order = part("order, from the start", functools.partial(_begun, fleet, received, np.arange(1)), traced)
        part("order, resumed deep in a run", functools.partial(_begun, fleet, received, chunk), traced)
        part("order of one chunk more", functools.partial(order.samples_at, fleet.processes * np.arange(CHUNK)), traced)
        shards, members = order.samples_at(chunk)
        part(TABLES, functools.partial(_places, received, shards, members), traced)
        tables = len(np.unique(shards))
    return Start(found[False], found[True], len(message), tables, remembered)


def _places(collection: Collection, shards: np.ndarray, members: np.ndarray) -> None:
    for shard, member in zip(shards.tolist(), members.tolist(), strict=True):
        collection.members(shard).spans["txt"][member].tolist()


def _begun(fleet: Fleet, collection: Collection, positions: np.ndarray) -> Order:
    order = fleet.order(collection.counts)
    order.samples_at(positions)
    return order


def an_epoch(fleet: Fleet) -> tuple[float, int]:
    """What the order of one process keeps in bytes after all of an epoch's positions, and the shards it has opened."""
    counts, slot = np.full(fleet.shards, fleet.per_shard), fleet.slots()[0]

    def walk() -> tuple[Order, set[int]]:
        order, opened = fleet.order(counts), set[int]()
        for begin in range(slot, fleet.samples, fleet.processes * 10_000):
            end = min(fleet.samples, begin + fleet.processes * 10_000)
            opened |= set(np.unique(order.samples_at(np.arange(begin, end, fleet.processes))[0]).tolist())
        return order, opened

    (_, opened), size = measured_part(walk, traced=True)
    return size, len(opened)


@dataclass(frozen=True)
class Reading:
    """Who reads what in the part of an epoch. opened: [nodes] shards opened on each node. distinct: of them together.
    samples: positions that were dealt."""

    opened: np.ndarray
    distinct: int
    samples: int


def reading(fleet: Fleet) -> Reading:
    """The samples of every process in the part of an epoch. InputError when two get the same one, or one is left
    out."""
    counts = np.full(fleet.shards, fleet.per_shard)
    order = Order(counts, SEED, streams_for(fleet.nodes), fleet.window)  # one for all: it keeps all streams' windows
    samples = int(fleet.fraction * fleet.samples)
    opened = np.zeros((fleet.nodes, fleet.shards), dtype=bool)
    numbers = []
    for rank, slot in enumerate(fleet.slots()):
        shards, members = order.samples_at(np.arange(slot, samples, fleet.processes))
        opened[rank // fleet.local, shards] = True
        numbers.append(shards * fleet.per_shard + members)
    check_disjoint(np.concatenate(numbers), samples)
    return Reading(opened.sum(1), int(opened.any(0).sum()), samples)


def check_disjoint(numbers: np.ndarray, samples: int) -> None:
    """Raise InputError unless these are the numbers of so many different samples."""
    different = len(np.unique(numbers))
    if not len(numbers) == different == samples:
        raise InputError(
            f"{samples:,} positions gave {len(numbers):,} samples, {different:,} of them different: the processes do "
            "not share the data"
        )


def tables(fleet: Fleet) -> str:
    with tempfile.TemporaryDirectory() as index_cache:
        describe_shards(fleet, index_cache)
        begun = in_fresh_process(start, fleet, index_cache)
    order_bytes, opened = in_fresh_process(an_epoch, fleet)
    found = in_fresh_process(reading, fleet)
    rows = [
        [name, f"{seconds:.4f}", f"{begun.kept[name] / 2**20:,.1f}" if name in begun.kept else ""]
        for name, seconds in begun.seconds.items()
    ]
    most = min(begun.remembered, opened)
    table_bytes = begun.kept[TABLES] / begun.tables * most
    for name, size in {
        "order after an epoch": order_bytes,
        f"tables of {most:,} shards, the most it keeps": table_bytes,
        "index, order and tables together": begun.kept[RECEIVING] + order_bytes + table_bytes,
    }.items():
        rows.append([name, "", f"{size / 2**20:,.1f}"])
    return (
        f"{markdown_table(['a process', 'seconds', 'MiB kept'], rows)}\n\n"
        f"The index is a message of {begun.message / 2**20:,.1f} MiB to each process. Resumed after "
        f"{fleet.resumed:g} epochs, the first chunk of {CHUNK} samples needs {begun.tables} tables.\n\n"
        f"In {fleet.fraction:.2%} of an epoch no two of {fleet.processes:,} processes read the same of "
        f"{found.samples:,} samples, and together they read all. A node opens {found.opened.mean():,.1f} shards on "
        f"average and {found.opened.max()} at most; each of the {found.distinct:,} shards is opened on "
        f"{found.opened.sum() / found.distinct:.2f} nodes. In all of an epoch one process opens {opened:,} shards."
    )
