"""What is in the shards: built once from the tars' headers, kept on disk, read shard by shard when needed.

Beside the tars, in ``.diff_dalle_index``, lie one table per tar and one summary of them all, so that a start reads a
single small file however many shards there are. Where that folder cannot be written (remote data, a read-only disk)
they lie in a cache folder. Processes that index the same data at the same time share the work.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

from tqdm import tqdm

from .. import storage
from ..errors import InputError, quantity
from . import shard_table as table
from .shard_table import ShardSummary, Table
from .shards import Shard, ShardFiles, cache_home
from .tar import read_members

FOLDER, SUMMARY = ".diff_dalle_index", "summary.json"
THREADS = 16  # they wait for disks and networks, not for each other
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Indexed:
    """A shard, the file that holds its table, and its contents in short."""

    path: str
    table: str
    about: ShardSummary

    @property
    def shard(self) -> Shard:
        return Shard(self.path, self.about.size, self.about.tag, self.about.by_offset)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _places(path: str, index_cache: str) -> tuple[list[str], str]:
    """The folders in which a shard's table may lie, the best first, and its name there."""
    folder, name = ("pipe:", "") if storage.scheme(path) == "pipe" else storage.split(path)
    if not storage.is_remote(path):
        folder = os.path.abspath(folder)
    if not name.lower().endswith(".tar"):
        name = f"{name[:40]}.{_digest(path)}"
    places = [os.path.join(index_cache or os.path.join(cache_home(), "index"), _digest(folder))]
    if not (storage.is_remote(path) or index_cache):
        places.insert(0, os.path.join(folder, FOLDER))
    return places, name


def _writable(places: Sequence[str]) -> str:
    """The first folder that can be written or made."""
    for place in places[:-1]:
        parent = place if os.path.isdir(place) else os.path.dirname(place)
        if os.access(parent, os.W_OK):
            return place
    return places[-1]


def _load_summary(folder: str) -> dict[str, ShardSummary]:
    try:
        with open(os.path.join(folder, SUMMARY), encoding="utf-8") as file:
            record = json.load(file)
        if record["format"] != table.FORMAT:
            return {}
        return {name: ShardSummary(**about) for name, about in record["shards"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}  # absent, of another version or damaged: it is written anew


def _save_summary(folder: str, shards: dict[str, ShardSummary]):
    record = {"format": table.FORMAT, "shards": {name: asdict(about) for name, about in shards.items()}}
    storage.write_bytes(os.path.join(folder, SUMMARY), json.dumps(record).encode())


def _holds(about: ShardSummary | None, size: int, tag: str) -> bool:
    """Whether what is known of a shard still describes it; a pipe has neither size nor tag and is trusted."""
    return about is not None and size in (-1, about.size) and tag == about.tag


class _Indexer:
    """Finds or builds the table of each shard."""

    def __init__(self, index_cache: str, files: ShardFiles):
        self.index_cache, self.files = index_cache, files
        self.known: dict[str, dict[str, ShardSummary]] = {}  # the summaries, by folder

    def find(self, path: str) -> Indexed | None:
        """The shard with its table, when there is one that still holds."""
        size, tag = storage.size_and_tag(path)
        places, name = _places(path, self.index_cache)
        for place in places:
            file = os.path.join(place, f"{name}.npz")
            about = self.known[place].get(name)
            if not _holds(about, size, tag):
                about = table.load_about(file)
            if _holds(about, size, tag):
                return Indexed(path, file, about)
        return None

    def find_or_build(self, path: str) -> Indexed:
        found = self.find(path)  # another process may have built it meanwhile
        if found:
            return found
        places, name = _places(path, self.index_cache)
        about, members = examine(path, self.files)
        file = os.path.join(_writable(places), f"{name}.npz")
        try:
            storage.make_dirs(os.path.dirname(file))
            table.save(file, about, members)
        except InputError as error:
            raise InputError(f"{error}; --index_cache FOLDER puts the index of the shards elsewhere") from error
        return Indexed(path, file, about)

    def run(self, paths: Sequence[str]) -> list[Indexed]:
        for place in {place for path in paths for place in _places(path, self.index_cache)[0]}:
            self.known[place] = _load_summary(place)
        pool = ThreadPoolExecutor(THREADS)
        try:
            found = dict(zip(paths, pool.map(self.find, paths), strict=True))
            missing = [path for path, entry in found.items() if entry is None]
            turn = os.getpid() * 7919 % max(1, len(missing))  # each process begins elsewhere (a prime spreads them)
            bar = tqdm(total=len(missing), desc="indexing shards", unit="shard", disable=None if missing else True)
            with bar:
                for entry in pool.map(self.find_or_build, missing[turn:] + missing[:turn]):
                    found[entry.path] = entry
                    bar.update()
        finally:
            pool.shutdown(cancel_futures=True)
        self._save_summaries(found.values())
        return [found[path] for path in paths]

    def _save_summaries(self, entries: Iterable[Indexed]):
        news: dict[str, dict[str, ShardSummary]] = {}
        for entry in entries:
            folder, name = os.path.split(entry.table.removesuffix(".npz"))
            if self.known[folder].get(name) != entry.about:
                news.setdefault(folder, {})[name] = entry.about
        for folder, shards in news.items():
            if os.access(folder, os.W_OK):
                _save_summary(folder, {**_load_summary(folder), **shards})


def examine(path: str, files: ShardFiles) -> tuple[ShardSummary, Table]:
    """Read a shard's headers."""
    size, tag = storage.size_and_tag(path)
    read, total, by_offset = files.reader(path, size, tag)
    with storage.explained(path):
        members, problem = read_members(read, total)
    contents = Table.of(members)
    return ShardSummary(total, tag, by_offset, problem, contents.signatures()), contents


def index_shards(paths: Sequence[str], files: ShardFiles, index_cache: str = "") -> list[Indexed]:
    """Index every shard, or find its index; damaged ones are named in the log.

    index_cache: folder for the index, instead of the shards' own.
    """
    entries = _Indexer(index_cache, files).run(paths)
    damaged = [entry for entry in entries if entry.about.problem]
    for entry in damaged[:10]:
        log.warning("%s %s; used of it: %s", entry.path, entry.about.problem, quantity(entry.about.samples, "sample"))
    if len(damaged) > 10:
        log.warning("%s more are damaged", quantity(len(damaged) - 10, "shard"))
    return entries


def count_kinds(entries: Iterable[Indexed]) -> Counter[str]:
    """How many samples have a member of each kind."""
    kinds: Counter[str] = Counter()
    for entry in entries:
        for signature, count in entry.about.signatures.items():
            kinds.update(dict.fromkeys(signature.split("/"), count))
    return kinds
