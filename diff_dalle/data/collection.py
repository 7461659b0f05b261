"""The usable samples of many shards: their number, their locations and their bytes."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from .. import storage
from ..distributed.world import ALONE, World
from ..errors import InputError, named, quantity, redact
from ..images.decode import IMAGE_KINDS, BrokenSample
from .embedding import KINDS
from .index import Indexed, count_kinds, discard_summaries, index_shards, read_table
from .lru_cache import LRUCache
from .shard_table import IMAGE, Members, Required, Table, alternatives
from .shards import ShardFiles
from .sidecars import Sidecar, SidecarFiles
from .sources import DATA_DIR, find_shards
from .survey import NOTHING, Questions, Survey, check_kept, rejections, survey_shards
from .tar import printable

MAX_BYTES = {IMAGE: 1 << 28, "cls": 1 << 10}  # of a member, by kind; larger ones are not read
MAX_OTHER = 1 << 20  # bytes of any other member: captions, json
MAX_EMBEDDING = 1 << 24  # 512 tokens of 8,192 float32
HEADERS = 1536  # bytes between two members below which there are only headers and padding: no third member fits
REMOTE_GAP = 1 << 16  # bytes between two remote members that cost less to read than a second request
log = logging.getLogger(__name__)

REMEMBERED = 64  # tables kept in memory, unless the order of reading says how many
Span = tuple[int, int]  # offset and size of a member


@dataclass(frozen=True)
class Place:
    """The location of a sample: the spans of its members in the shard, by kind, and the rows of its embeddings, by
    sidecar."""

    shard: int
    spans: dict[str, Span]
    rows: dict[Sidecar, int]


class Unavailable(BrokenSample):
    """A sample whose storage does not answer, for as long as a read is repeated."""


@dataclass(frozen=True)
class Raw:
    """The stored parts of a sample.

    members: bytes, by kind. embeddings: float32, by sidecar. problem: why it cannot be used, or "".
    unavailable: whether the problem is that its storage does not answer.
    """

    members: dict[str, bytes] = field(default_factory=dict)
    embeddings: dict[Sidecar, np.ndarray] = field(default_factory=dict)
    problem: str = ""
    unavailable: bool = False

    def check(self) -> None:
        """Raise BrokenSample when it cannot be used."""
        if self.problem:
            raise (Unavailable if self.unavailable else BrokenSample)(self.problem)


class Collection:
    """The usable samples of a list of shards: those with all required members.

    sidecars:  embeddings that are required from files beside the shards, with their shapes.
    remembered: number of shards whose tables are kept in memory.
    surveys:   per shard, what has been found out about its usable samples; rejected ones are usable no more.

    ``counts`` [shards] int64: usable samples per shard; ``samples``: their sum; ``totals``: all samples per shard;
    ``left_out``: those without the required members. ``sizes``: per shard, (height, width) of the images of the usable
    samples, int32 [n, 2], 0 where unknown, or None when nobody asked; copies for other processes do not have them.
    Raises InputError for sidecars that do not fit their shards.
    """

    def __init__(
        self,
        entries: Sequence[Indexed],
        required: Required,
        files: ShardFiles,
        remembered: int = REMEMBERED,
        sidecars: Iterable[tuple[Sidecar, tuple[int, ...]]] = (),
        surveys: Sequence[Survey] | None = None,
    ):
        self.required, self.files = required, files
        self.shards = [entry.shard for entry in entries]
        self.tables = [entry.table for entry in entries]
        self._complete = [entry.summary.count(required) for entry in entries]  # samples with the required members
        self._kept = [each.kept for each in surveys] if surveys else None
        sizes = [each.sizes for each in surveys or () if each.sizes is not None]
        self.sizes = sizes or None
        counts = [int(kept.sum()) for kept in self._kept] if self._kept else self._complete
        self.counts = np.array(counts, dtype=np.int64)
        self.samples = int(self.counts.sum())
        self.totals = [entry.summary.samples for entry in entries]
        self.left_out = sum(self.totals) - sum(self._complete)
        paths = [entry.path for entry in entries]
        self._sidecars = {each: SidecarFiles(each, shape, paths, self.totals, files) for each, shape in sidecars}
        self._members: LRUCache[Members] = LRUCache(remembered)
        self._key_rows: LRUCache[np.ndarray] = LRUCache(remembered)

    def __getstate__(self):
        return {**vars(self), "sizes": None}

    def table(self, shard: int) -> Table:
        """A shard's table; read from the shard again when its file is missing or describes another state of it."""
        state, file = self.shards[shard], self.tables[shard]
        found = read_table(state, file, self.files)
        count = len(found.select(self.required).rows)
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
        complete = self.table(shard).select(self.required)
        return complete.only(self._kept[shard]) if self._kept else complete

    def key(self, shard: int, member: int) -> str:
        """The key of a usable sample. Reads the shard's table again: for messages only."""
        return self.table(shard).keys[self.members(shard).rows[member]]

    def describe(self, shard: int, member: int) -> str:
        """``shard : key`` of a usable sample, for messages."""
        return f"{redact(self.shards[shard].path)} : {printable(self.key(shard, member))}"

    def in_place(self, shard: int) -> bool:
        """Whether samples are read by range requests, where concurrent reads are faster than consecutive ones."""
        from_tar = bool(self.required.members) and self.files.in_place(self.shards[shard])
        return from_tar or any(sidecar.in_place(shard) for sidecar in self._sidecars.values())

    def place(self, shard: int, member: int, kinds: Iterable[str] | None = None) -> Place:
        """The location of a usable sample. kinds: members to include; None = all members and embeddings."""
        members = self.members(shard)
        spans = {}
        for kind in self.required.members if kinds is None else kinds:
            offset, size = members.spans[kind][member].tolist()
            spans[kind] = offset, size
        sidecars = self._sidecars if kinds is None else ()
        rows = {each: int(self.rows(shard, each.index_width)[member]) for each in sidecars}
        return Place(shard, spans, rows)

    def rows(self, shard: int, index_width: int) -> np.ndarray:
        """The rows [n] int64 of a shard's usable samples in sidecar files of this ``index_width``; -1 = none."""
        rows = self.members(shard).rows
        if not index_width:
            return rows
        return self._key_rows.get((shard, index_width), lambda: _rows_of_keys(self.table(shard), rows, index_width))

    def fetch(self, shard: int, member: int, kinds: Iterable[str] | None = None) -> Raw:
        """Find and read a usable sample, or those of its members. Raises InputError when its shard has changed."""
        try:
            return self.read(self.place(shard, member, kinds))
        except storage.UnavailableError as error:
            return Raw(problem=str(error), unavailable=True)

    def read(self, place: Place) -> Raw:
        """Read a sample; adjacent members are read at once. One with a member above its size limit is not read."""
        for kind, (_, size) in place.spans.items():
            if size > (limit := _limit(kind)):
                return Raw(problem=f"one of its members has {size:,} bytes, more than {limit:,}")
        members = self._read_members(place)
        for kind, (_, size) in place.spans.items():
            if len(members[kind]) < size:
                return Raw(problem="the shard ends inside it")
        try:
            rows = {each: self._sidecars[each].read(place.shard, row) for each, row in place.rows.items()}
        except BrokenSample as reason:
            return Raw(problem=str(reason))
        return Raw(members, rows)

    def _read_members(self, place: Place) -> dict[str, bytes]:
        shard = self.shards[place.shard]
        gap = REMOTE_GAP if self.files.in_place(shard) else HEADERS - 1
        groups: list[list[str]] = []  # of kinds that are read together
        end = 0
        for kind, (offset, size) in sorted(place.spans.items(), key=lambda item: item[1]):
            if groups and offset - end <= gap:
                groups[-1].append(kind)
            else:
                groups.append([kind])
            end = offset + size
        members: dict[str, bytes] = {}
        for group in groups:
            begin = place.spans[group[0]][0]
            block = self.files.read(shard, begin, sum(place.spans[group[-1]]) - begin)
            for kind in group:
                offset, size = place.spans[kind]
                members[kind] = block[offset - begin : offset - begin + size]
        return members


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
    index_cache: str = "",
    flag: str = DATA_DIR,
    remembered: int = REMEMBERED,
    sidecars: Iterable[tuple[Sidecar, tuple[int, ...]]] = (),
    world: World = ALONE,
    questions: Questions = NOTHING,
) -> Collection:
    """The samples of all sources with all required members that the filters accept, see ``find_shards``.

    world: the processes that call this together. Rank 0 alone lists the shards and their sizes; the others are told.

    Raises InputError naming ``flag`` when there are none, and naming the filter when it accepts none.
    """
    paths = find_shards(sources, flag) if world.is_main else []
    entries = index_shards(paths, files, index_cache, world)
    found = surveys = None
    if world.is_main:
        found = Collection(entries, required, files, remembered, sidecars)
        check_usable(found, entries, flag)
    if questions:
        surveys = survey_shards(entries, required, questions, files, index_cache, world)
    if surveys:
        for line in rejections(questions, surveys):
            log.warning("%s", line)
        check_kept(questions, surveys)
        found = Collection(entries, required, files, remembered, sidecars, surveys)
    return world.broadcast(found)


def check_usable(found: Collection, entries: Sequence[Indexed], flag: str) -> None:
    """Raise InputError naming ``flag`` when there are no samples."""
    required = found.required
    if not found.samples:
        raise InputError(_nothing_usable(entries, required, flag))
    if found.left_out:
        log.warning("%s left out: without %s", quantity(found.left_out, "sample"), _listed(required, "or"))


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
            return f"{source} holds no {purpose} ({missing}{hint}); found: {found}"
    return f"{source} holds no sample with {_listed(required, 'and')}; found: {found}"
