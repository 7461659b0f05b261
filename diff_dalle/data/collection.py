"""The usable samples of many shards: how many there are, where they lie, and their bytes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import InputError, quantity
from ..images.decode import IMAGE_KINDS
from . import shard_table as table
from .index import Indexed, count_kinds, examine, index_shards
from .lru_cache import LRUCache
from .shard_table import Places, Required, ShardSummary, Table
from .shards import Shard, ShardFiles

LIMITS = (1 << 28, 1 << 20, 1 << 10)  # bytes of an image, a caption and a label that are read at most
GAP = 1 << 16  # bytes between two members that are cheaper to read along than to ask for twice
log = logging.getLogger(__name__)

Span = tuple[int, int]  # offset and size of a member; offset -1 = not there


@dataclass(frozen=True)
class Raw:
    """The bytes of a sample's members, empty where there is none. problem: why they are of no use; "" = they are."""

    image: bytes
    caption: bytes
    label: bytes
    problem: str = ""


def _describes(about: ShardSummary, shard: Shard) -> bool:
    return (about.size, about.tag) == (shard.size, shard.tag)


class Collection:
    """The usable samples of a list of shards.

    remembered: how many shards' tables are kept in memory.

    ``counts`` [shards] int64: usable samples of each; ``samples``: of all; ``left_out``: those that lack something.
    """

    def __init__(self, entries: Sequence[Indexed], need: Required, files: ShardFiles, remembered: int = 64):
        self.need, self.files = need, files
        self.shards = [entry.shard for entry in entries]
        self.tables = [entry.table for entry in entries]
        self.counts = np.array([entry.about.count(need) for entry in entries], dtype=np.int64)
        self.samples = int(self.counts.sum())
        self.left_out = sum(entry.about.samples for entry in entries) - self.samples
        self._members: LRUCache[Places] = LRUCache(remembered)

    def _table(self, shard: int) -> Table:
        """The table, read from the shard again where its file is gone or speaks of another state of the shard."""
        where = self.shards[shard]
        found = table.load(self.tables[shard])
        if found is None or not _describes(found[0], where):
            found = examine(where.path, self.files)
            if not _describes(found[0], where):
                raise InputError(f"{where.path} changed while in use: start again")
        return found[1]

    def members(self, shard: int) -> Places:
        """Where the usable samples of a shard lie."""
        return self._members.get(shard, lambda: self._table(shard).select(self.need))

    def key(self, shard: int, member: int) -> str:
        """The key of a usable sample; reads the shard's table again, for messages only."""
        return self._table(shard).keys[self.members(shard).rows[member]]

    def describe(self, shard: int, member: int) -> str:
        return f"{self.shards[shard].path} : {self.key(shard, member)}"

    def in_place(self, shard: int) -> bool:
        """Whether samples are read where the shard is, on another machine: best several at once."""
        return self.files.in_place(self.shards[shard])

    def spans(self, shard: int, member: int) -> list[Span]:
        """Where a sample's image, caption and label are."""
        places = self.members(shard)
        return [tuple(column[member].tolist()) for column in (places.image, places.caption, places.label)]

    def read(self, shard: int, spans: Sequence[Span]) -> Raw:
        """A sample's members, in one read when they lie close together; nothing is read of one that is too large."""
        for size, limit in zip((size for _, size in spans), LIMITS, strict=True):
            if size > limit:
                return Raw(b"", b"", b"", f"one of its members has {size:,} bytes, more than {limit:,}")
        read, where = self.files.read, self.shards[shard]
        wanted = [(offset, size) for offset, size in spans if offset >= 0]
        begin, end = min(offset for offset, _ in wanted), max(sum(span) for span in wanted)
        if end - begin > sum(size for _, size in wanted) + GAP:
            parts = [read(where, offset, size) if offset >= 0 else b"" for offset, size in spans]
        else:
            block = read(where, begin, end - begin)
            parts = [block[offset - begin :][:size] if offset >= 0 else b"" for offset, size in spans]
        whole = sum(map(len, parts)) == sum(size for _, size in wanted)
        return Raw(*parts, "" if whole else "the shard ends inside it")


def collect(
    paths: Sequence[str],
    need: Required,
    files: ShardFiles,
    index_cache: str = "",
    flag: str = "--data_dir",
    remembered: int = 64,
) -> Collection:
    """The samples of ``paths`` that have what is needed. InputError naming ``flag`` when there are none."""
    entries = index_shards(paths, files, index_cache)
    found = Collection(entries, need, files, remembered)
    if not found.samples:
        raise InputError(_nothing_usable(entries, need, flag))
    if found.left_out:
        log.warning("%s left out for want of %s", quantity(found.left_out, "sample"), _wanted(need))
    return found


def _wanted(need: Required) -> str:
    wanted = ["an image"] * need.image + [f"a .{kind}" for kind in (need.caption, need.label) if kind]
    return " or ".join(wanted)


def _nothing_usable(entries: Sequence[Indexed], need: Required, flag: str) -> str:
    where = f"{flag} ({quantity(len(entries), 'shard')}, the first {entries[0].path})"
    kinds = count_kinds(entries)
    if not kinds:
        return f"{where} holds no samples; the first shard {entries[0].about.problem or 'is empty'}"
    found = ", ".join(f".{kind} ({count:,})" for kind, count in kinds.most_common(8))
    if need.image and not kinds.keys() & set(IMAGE_KINDS):
        return f"{where} holds no images ({', '.join(IMAGE_KINDS)}); found: {found}"
    if need.caption and need.caption not in kinds:
        return f"{where} holds no captions: no .{need.caption} beside the images (--caption_field); found: {found}"
    if need.label and need.label not in kinds:
        return f"{where} holds no labels: no .{need.label} beside the images; found: {found}"
    return f"{where} holds no sample with {_wanted(need).replace(' or ', ' and ')}; found: {found}"
