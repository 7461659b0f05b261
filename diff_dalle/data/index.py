"""The index of the shards: built once from the tars' headers, stored on disk, read shard by shard when needed.

The folder ``.diff_dalle_index`` beside the tars holds one table per tar and one summary of all of them, so that a
start reads a single small file however many shards there are. When that folder cannot be written (remote data, a
read-only disk), a cache folder takes its place. Of the processes of a job one looks for the tables, and all build the
missing ones. Jobs that index the same data at the same time share the work too.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TypeVar

from tqdm import tqdm

from .. import storage
from ..config import InputError, named, quantity, redact
from ..distributed.world import ALONE, World
from .lru_cache import LRUCache
from .shard_table import DAMAGE, FORMAT, ShardSummary, Table, load_summary, load_table, read_bounded, save_table
from .shards import Shard, ShardFiles, cache_home, packed_tag
from .sources import TARS
from .tar import read_members

FOLDER, SUMMARY = ".diff_dalle_index", "summary.json"
MAX_SUMMARY = 1 << 28  # bytes: about a million shards
ROUND = 64  # shards that each process indexes or surveys before all exchange results: no process waits long for another
MAX_FOLDERS = 10_000  # of shards, whose summaries are in memory while they are indexed
UNREAD = "is compressed: unpack it first"  # what earlier versions say about gzipped shards
Item = TypeVar("Item")
Result = TypeVar("Result")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Indexed:
    """A shard, the file that holds its table, and its summary."""

    path: str
    table: str
    summary: ShardSummary

    @property
    def shard(self) -> Shard:
        return Shard(self.path, self.summary.size, self.summary.tag, self.summary.by_offset)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def table_folders(path: str, index_cache: str) -> tuple[Sequence[str], str]:
    """The folders that may hold a shard's table, in order of preference, and its name there."""
    scheme = storage.scheme(path)
    folder, name = ("pipe:", "") if scheme == "pipe" else storage.split(path)
    if not scheme:
        folder = os.path.abspath(folder)
    if not name.lower().endswith(TARS):
        name = f"{name[:40]}.{_digest(path)}"
    return _folders(folder, index_cache or os.path.join(cache_home(), "index"), not (scheme or index_cache)), name


@functools.lru_cache(maxsize=1024)
def _folders(folder: str, cache: str, beside: bool) -> tuple[str, ...]:
    """``table_folders`` of the shards in a folder; beside: whether the tables may be in it."""
    cached = os.path.join(cache, _digest(folder))
    return (os.path.join(folder, FOLDER), cached) if beside else (cached,)


def writable_file(path: str, files: ShardFiles, ending: str) -> str:
    """The file to keep what is known of a shard in: in the first of its folders that can be written or created."""
    folders, name = table_folders(path, files.index_cache)
    for folder in folders:
        parent = folder if os.path.isdir(folder) else os.path.dirname(folder)
        if os.access(parent, os.W_OK):
            break
    return os.path.join(folder, f"{name}.{ending}")


def _load_summary(folder: str) -> dict[str, ShardSummary]:
    """The summaries in a folder, by the tables' names. They are looked up by name: none is taken for a path."""
    try:
        record = json.loads(read_bounded(os.path.join(folder, SUMMARY), MAX_SUMMARY))
        if record["format"] == FORMAT and record["digest"] == _digest(json.dumps(record["shards"])):
            return {name: ShardSummary.parse(summary) for name, summary in record["shards"].items()}
    except DAMAGE:
        pass
    return {}  # missing, of another format or damaged: it is written again


def save_summaries(folder: str, shards: dict[str, ShardSummary]):
    found = {name: asdict(summary) for name, summary in shards.items()}
    record = {"format": FORMAT, "digest": _digest(json.dumps(found)), "shards": found}
    storage.write_bytes(os.path.join(folder, SUMMARY), json.dumps(record).encode())


def discard_summaries(table: str):
    """Remove the summaries beside a table, which contradicts them. The next start collects them from the tables."""
    with contextlib.suppress(OSError):
        os.remove(os.path.join(os.path.dirname(table), SUMMARY))


def _is_current(summary: ShardSummary, size: int, tag: str) -> bool:
    """Whether a summary still describes its shard; a pipe, which has neither size nor tag, is trusted."""
    if summary.problem == UNREAD:
        return False
    return (size in (-1, summary.size) and tag == summary.tag) or summary.tag == packed_tag(size, tag)


class _Indexer:
    """Finds or builds the tables of shards."""

    def __init__(self, files: ShardFiles):
        self.files = files
        self._summaries: LRUCache[dict[str, ShardSummary]] = LRUCache(MAX_FOLDERS)

    def _known(self, folder: str) -> dict[str, ShardSummary]:
        return self._summaries.get(folder, lambda: _load_summary(folder))

    def find(self, path: str) -> Indexed | None:
        """The shard with its table, if there is a current one."""
        size, tag = storage.size_and_tag(path, listed=True)
        folders, name = table_folders(path, self.files.index_cache)
        for folder in folders:
            file = os.path.join(folder, f"{name}.npz")
            summary = self._known(folder).get(name)
            if summary is None or not _is_current(summary, size, tag):
                summary = load_summary(file)
            if summary is not None and _is_current(summary, size, tag):
                return Indexed(path, file, summary)
        return None

    def find_or_build(self, path: str) -> Indexed:
        found = self.find(path)  # another process may have built it in the meantime
        if found:
            return found
        summary, members = examine(path, self.files)
        file = writable_file(path, self.files, "npz")
        try:
            save_table(file, summary, members)
        except InputError as error:
            remedy = f"set {named('index_cache')} to another folder for the index of the shards"
            raise InputError(f"{error}; {remedy}") from error
        return Indexed(path, file, summary)

    def run(self, paths: Sequence[str], world: World) -> list[Indexed]:
        parts = [paths[start::ROUND] for start in range(min(ROUND, len(paths)))]  # a task for each path costs more
        tasks = storage.in_parallel(lambda part: [self.find(path) for path in part], parts)
        found = {entry.path: entry for part in tasks for entry in part if entry}
        missing: list[str] = world.broadcast([path for path in dict.fromkeys(paths) if path not in found])
        found |= {entry.path: entry for entry in shared(self.find_or_build, missing, world, "indexing shards")}
        self._save_summaries(found.values())
        return [found[path] for path in paths]

    def _save_summaries(self, entries: Iterable[Indexed]):
        news: dict[str, dict[str, ShardSummary]] = {}
        for entry in entries:
            folder, name = os.path.split(entry.table.removesuffix(".npz"))
            if self._known(folder).get(name) != entry.summary:
                news.setdefault(folder, {})[name] = entry.summary
        for folder, shards in news.items():
            if os.access(folder, os.W_OK):
                save_summaries(folder, {**_load_summary(folder), **shards})


def shared(call: Callable[[Item], Result], items: Sequence[Item], world: World, title: str) -> list[Result]:
    """``call(item)`` of each item, in order, on rank 0: the processes of ``world`` take turns at the items."""
    found: list[Result] = []
    with tqdm(total=len(items), desc=title, unit="shard", disable=not (items and world.is_main) or None) as bar:
        for start in range(0, len(items), ROUND * world.size):
            turns, mine = items[start : start + ROUND * world.size], []
            for result in storage.in_parallel(call, turns[world.rank :: world.size]):
                mine.append(result)
                bar.update(world.size)
            parts = world.gather(mine)
            if world.is_main:
                found += [parts[i % world.size][i // world.size] for i in range(len(turns))]
    return found


def examine(path: str, files: ShardFiles) -> tuple[ShardSummary, Table]:
    """The summary and the table of a shard, from its headers."""
    shard = files.examine(path)
    with storage.explained(path):
        read = files.headers(shard)
        if shard.by_offset and read(0, len(storage.GZIP)) == storage.GZIP:
            shard = files.copied(shard)
            read = files.headers(shard)
        members, problem = read_members(read, shard.size)
    contents = Table.of(members)
    return ShardSummary(shard.size, shard.tag, shard.by_offset, problem, contents.signatures()), contents


def read_table(shard: Shard, file: str, files: ShardFiles) -> Table:
    """The table of an indexed shard from its file; from the shard again when the file is missing, as another node's
    may be, or describes another state of it. Raises ``storage.ChangedError`` when the shard has changed."""
    found = load_table(file)
    if found is None or (found[0].size, found[0].tag) != (shard.size, shard.tag):
        found = examine(shard.path, files)
        shard.check(found[0].size, found[0].tag)
        with contextlib.suppress(InputError):  # for the next time
            save_table(file, *found)
    return found[1]


def index_shards(paths: Sequence[str], files: ShardFiles, world: World = ALONE) -> list[Indexed]:
    """Index every shard, or find its index; damaged shards are named in the log.

    world: the processes that call this together. Rank 0 alone has the paths, and gets the result.
    """
    entries = _Indexer(files).run(paths, world)
    packed = [entry for entry in entries if entry.shard.is_packed]
    if packed:
        log.warning("%s", _said_packed(packed, files))
    damaged = [entry for entry in entries if entry.summary.problem]
    for entry in damaged[:10]:
        usable = quantity(entry.summary.samples, "sample")
        log.warning("%s %s; %s before the damage", redact(entry.path), entry.summary.problem, usable)
    if len(damaged) > 10:
        log.warning("%s more are damaged", quantity(len(damaged) - 10, "shard"))
    return entries


def _said_packed(packed: Sequence[Indexed], files: ShardFiles) -> str:
    size = sum(entry.summary.size for entry in packed)
    said = (
        f"{quantity(len(packed), 'shard')} gzipped: read from unpacked copies of {size / 1e9:,.2f} GB in "
        f"{files.cache_dir}, which holds at most shard_cache_gb {files.cache_bytes / 1e9:g}"
    )
    if size > files.cache_bytes:
        said += "; since this is less, they are unpacked again and again: raise it, or unpack the shards"
    return said


def count_kinds(entries: Iterable[Indexed]) -> Counter[str]:
    """The number of samples with a member of each kind."""
    kinds: Counter[str] = Counter()
    for entry in entries:
        for signature, count in entry.summary.signatures.items():
            kinds.update(dict.fromkeys(signature.split("/"), count))
    return kinds
