"""The usable samples of many shards: their number, their locations and their bytes."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from .. import storage
from ..config import InputError, named, quantity, redact
from ..distributed.world import ALONE, World
from ..images.decode import IMAGE_KINDS, BrokenSample
from .arrays import KINDS
from .index import Indexed, count_kinds, discard_summaries, index_shards, read_table
from .lru_cache import LRUCache
from .shard_table import IMAGE, Members, Table, alternatives, split_at_dots
from .shards import ShardFiles
from .sidecars import Sidecar, SidecarFiles
from .sources import DATA_DIR, find_shards
from .spec import Required
from .survey import Survey, check_kept, rejections, survey_shards
from .tar import printable

MAX_BYTES = {IMAGE: 1 << 28, "cls": 1 << 10}  # of a member, by kind; larger ones are not read
MAX_OTHER = 1 << 20  # bytes of any other member: captions, json
MAX_EMBEDDING = 1 << 24  # 512 tokens of 8,192 float32
HEADERS = 1536  # bytes between two members below which there are only headers and padding: no third member fits
REMOTE_GAP = 1 << 16  # bytes between two remote members that cost less to read than a second request
log = logging.getLogger(__name__)

NAMED = 8  # shards in a message
REMEMBERED = 64  # tables kept in memory, unless the order of reading says how many


class Unavailable(BrokenSample):
    """A sample whose storage does not answer, for as long as a read is repeated."""


@dataclass(frozen=True)
class Raw:
    """The stored parts of a sample.

    members: bytes, by kind. embeddings: float32, by sidecar. problem: why it cannot be used.
    """

    members: dict[str, bytes] = field(default_factory=dict)
    embeddings: dict[Sidecar, np.ndarray] = field(default_factory=dict)
    problem: BrokenSample | None = None

    def check(self) -> None:
        """Raise BrokenSample when it cannot be used."""
        if self.problem:
            raise self.problem


class Collection:
    """The usable samples of a list of shards: those with all required members.

    remembered: number of shards whose tables are kept in memory.

    ``counts`` [shards] int64: usable samples per shard; ``samples``: their sum; ``totals``: all samples per shard;
    ``left_out``: those without the required members, or in one of the ``absent`` shards, by number, whose sidecar, the
    path, does not exist. ``sizes``: per shard, (height, width) of the images of the usable samples, int32 [n, 2], 0
    where unknown, or None when nobody asked; copies for other processes do not have them.
    Raises InputError for sidecars that do not fit their shards.
    """

    def __init__(
        self,
        entries: Sequence[Indexed],
        required: Required,
        files: ShardFiles,
        remembered: int = REMEMBERED,
    ):
        self.required, self.files = required, files
        self.shards = [entry.shard for entry in entries]
        self.tables = [entry.table for entry in entries]
        self._complete = [
            entry.summary.count(required.members) for entry in entries
        ]  # samples with the required members
        self._kept: list[np.ndarray] | None = None
        self.sizes: list[np.ndarray] | None = None
        self.totals = [entry.summary.samples for entry in entries]
        paths = [entry.path for entry in entries]
        self._sidecars = {
            each: SidecarFiles(each, shape, paths, self.totals, files) for each, shape in required.sidecars.items()
        }
        self.absent = {i: path for each in self._sidecars.values() for i, path in each.absent.items()}
        self.counts = np.array([0 if i in self.absent else n for i, n in enumerate(self._complete)], dtype=np.int64)
        self.left_out = sum(self.totals) - self.samples
        self._members: LRUCache[Members] = LRUCache(remembered)
        self._key_rows: LRUCache[np.ndarray] = LRUCache(remembered)

    @property
    def samples(self) -> int:
        return int(self.counts.sum())

    def take(self, surveys: Sequence[Survey]) -> None:
        """Learn what has been found out about the usable samples of each shard: rejected ones are usable no more."""
        self._kept = [each.kept & (i not in self.absent) for i, each in enumerate(surveys)]
        self.sizes = [
            each.sizes[: 0 if i in self.absent else None] for i, each in enumerate(surveys) if each.sizes is not None
        ] or None
        self.counts = np.array([kept.sum() for kept in self._kept], dtype=np.int64)

    def __getstate__(self):
        return {**vars(self), "sizes": None}

    def reading(self, required: Required) -> Collection:
        """The same samples, of which other members are read, and no sidecars. required: with the same members."""
        found = copy.copy(self)
        found.required, found._sidecars = required, {}
        return found

    def table(self, shard: int) -> Table:
        """A shard's table; read from the shard again when its file is missing or describes another state of it."""
        state, file = self.shards[shard], self.tables[shard]
        found = read_table(state, file, self.files)
        count = len(found.select(self.required.members).rows)
        if count != self._complete[shard]:
            discard_summaries(file)
            raise InputError(
                f"the index counts {self._complete[shard]:,} usable samples in {state.path}, which has {count:,}: the "
                "wrong count has been removed; start again"
            )
        return found

    def members(self, shard: int) -> Members:
        """The locations of the members of a shard's usable samples."""
        return self._members.get(shard, lambda: self._select(shard))

    def _select(self, shard: int) -> Members:
        complete = self.table(shard).select(self.required.members)
        return complete.only(self._kept[shard]) if self._kept else complete

    def key(self, shard: int, member: int) -> str:
        """The key of a usable sample. Reads the shard's table again: for messages only."""
        return self.table(shard).keys[self.members(shard).rows[member]]

    def describe(self, shard: int, member: int) -> str:
        """``shard : key`` of a usable sample, for messages."""
        return f"{redact(self.shards[shard].path)} : {printable(self.key(shard, member))}"

    def in_place(self, shard: int) -> bool:
        """Whether samples are read by range requests, where concurrent reads are faster than consecutive ones."""
        from_tar = bool(self.required.read) and self.files.in_place(self.shards[shard])
        return from_tar or any(sidecar.in_place(shard) for sidecar in self._sidecars.values())

    def rows(self, shard: int, index_width: int) -> np.ndarray:
        """The rows [n] int64 of a shard's usable samples in sidecar files of this ``index_width``; -1 = none."""
        rows = self.members(shard).rows
        if not index_width:
            return rows
        return self._key_rows.get((shard, index_width), lambda: _rows_of_keys(self.table(shard), rows, index_width))

    def fetch(self, shard: int, member: int, kinds: Iterable[str] | None = None, sidecars: bool = False) -> Raw:
        """Find and read a usable sample. Raises InputError when its shard has changed.

        kinds: members to read, None = all that are read, and embeddings from sidecars, which ``sidecars`` asks for too.
        """
        try:
            spans = self.members(shard).spans
            wanted = self.required.read if kinds is None else kinds
            members = self._read_members(shard, {kind: spans[kind][member] for kind in wanted})
            embeddings = {
                each: files.read(shard, int(self.rows(shard, each.index_width)[member]))
                for each, files in self._sidecars.items()
                if kinds is None or sidecars
            }
        except BrokenSample as reason:
            return Raw(problem=reason)
        except storage.UnavailableError as error:
            return Raw(problem=Unavailable(str(error)))
        return Raw(members, embeddings)

    def _read_members(self, shard: int, arrays: Mapping[str, np.ndarray]) -> dict[str, bytes]:
        """The members at these offsets and sizes; adjacent ones are read at once. None is read where one is above its
        size limit."""
        spans = {kind: span.tolist() for kind, span in arrays.items()}
        for kind, (_, size) in spans.items():
            if size > (limit := _limit(kind)):
                raise BrokenSample(f"one of its members has {size:,} bytes, more than {limit:,}")
        gap = REMOTE_GAP if self.files.in_place(self.shards[shard]) else HEADERS - 1
        groups: list[list[str]] = []  # of kinds that are read together
        end = 0
        for kind, (offset, size) in sorted(spans.items(), key=lambda item: item[1]):
            if groups and offset - end <= gap:
                groups[-1].append(kind)
            else:
                groups.append([kind])
            end = offset + size
        members: dict[str, bytes] = {}
        for group in groups:
            begin = spans[group[0]][0]
            block = self.files.read(self.shards[shard], begin, sum(spans[group[-1]]) - begin)
            for kind in group:
                offset, size = spans[kind]
                members[kind] = block[offset - begin : offset - begin + size]
                if len(members[kind]) < size:
                    raise BrokenSample("the shard ends inside it")
        return members

    def in_order(self) -> Iterator[tuple[int, int]]:
        """Every usable sample: its shard and its number there, in the order of the shards."""
        for shard, count in enumerate(self.counts.tolist()):
            for member in range(count):
                yield shard, member


@functools.cache
def _limit(kind: str) -> int:
    """The largest size in bytes of a member of this kind."""
    if kind.rpartition(".")[2] in IMAGE_KINDS:
        kind = IMAGE
    return MAX_EMBEDDING if kind.endswith(KINDS) else MAX_BYTES.get(kind, MAX_OTHER)


def _rows_of_keys(found: Table, rows: np.ndarray, index_width: int) -> np.ndarray:
    """The number in the last ``index_width`` characters of each sample's key, -1 without one: [n] int64."""
    ends = [found.keys[row][-index_width:] for row in rows.tolist()]
    return np.array([int(end) if end.isascii() and end.isdigit() else -1 for end in ends], dtype=np.int64)


def collect(
    sources: Sequence[str],
    required: Required,
    files: ShardFiles,
    flag: str = DATA_DIR,
    remembered: int = REMEMBERED,
    world: World = ALONE,
    check: Callable[[Collection], None] = lambda found: None,
) -> Collection:
    """The samples of all sources with all required members that the filters accept, see ``find_shards``.

    check: what rank 0 does with them before the others get them.
    world: the processes that call this together. Rank 0 alone lists the shards and their sizes; the others are told.

    Raises InputError naming ``flag`` when there are none, and naming the filter when it accepts none.
    """
    entries = index_shards(find_shards(sources, flag) if world.is_main else [], files, world)
    found = None
    if world.is_main:
        found = Collection(entries, required, files, remembered)
        check_usable(found, entries, flag)
    if required.needs_survey:
        surveys = survey_shards(entries, required, files, world)
        if found:
            for line in rejections(required.filters, surveys):
                log.warning("%s", line)
            check_kept(required.filters, surveys)
            found.take(surveys)
    if found:
        if not found.samples:
            raise InputError(f"{flag} holds no sample that the filters accept and that has its embeddings")
        check(found)
    return world.broadcast(found)


def check_usable(found: Collection, entries: Sequence[Indexed], flag: str) -> None:
    """Raise InputError naming ``flag`` when there are no samples."""
    required = found.required
    if not found.samples:
        raise InputError(_nothing_usable(entries, required, flag))
    absent = sum(found.totals[i] for i in found.absent)
    if found.left_out > absent:
        count, lacked = quantity(found.left_out - absent, "sample"), _listed(required, "or")
        empty = [entry.path for entry in entries if entry.summary.samples and not entry.summary.count(required.members)]
        log.warning("%s left out: without %s%s", count, lacked, _named("all those of", empty))
    if absent:
        count, files = quantity(absent, "sample"), list(found.absent.values())
        log.warning("%s left out: without embeddings%s", count, _named("there is no", files))


def _named(what: str, paths: Sequence[str]) -> str:
    """``; WHAT a.tar, b.tar, …``; "" without any."""
    if not paths:
        return ""
    rest = f" and {len(paths) - NAMED:,} more" if len(paths) > NAMED else ""
    return f"; {what} {', '.join(map(redact, paths[:NAMED]))}{rest}"


def _listed(required: Required, conjunction: str) -> str:
    return f" {conjunction} ".join("an image" if kind == IMAGE else f"a .{kind}" for kind in required.members)


def _nothing_usable(entries: Sequence[Indexed], required: Required, flag: str) -> str:
    source = f"{flag} ({quantity(len(entries), 'shard')}, the first {entries[0].path})"
    kinds = count_kinds(entries)
    if not kinds:
        return f"{source} holds no samples; the first shard {entries[0].summary.problem or 'is empty'}"
    found = ", ".join(f".{kind} ({count:,})" for kind, count in kinds.most_common(8))
    for kind, purpose in required.members.items():
        if kinds.keys().isdisjoint(alternatives(kind)):
            missing = ", ".join(IMAGE_KINDS) if kind == IMAGE else f"no .{kind} members"
            hint = f"; set {named('caption_field')}" if purpose == "captions" else ""
            dots = f"; {said}" if (said := split_at_dots(kinds)) else ""
            return f"{source} holds no {purpose} ({missing}{hint}); found: {found}{dots}"
    return f"{source} holds no sample with {_listed(required, 'and')}; found: {found}"
