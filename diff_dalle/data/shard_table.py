"""The samples of one shard: their members and locations."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

import numpy as np

from ..images.decode import IMAGE_KINDS
from .tar import BLOCK, Member

IMAGE = "image/*"  # a kind of member that stands for any of IMAGE_KINDS; real kinds contain no slash
_NAME = re.compile(r"((?:.*/)?[^./]+)\.([^/]*)")  # the path up to the base name's first dot, and the rest


def alternatives(kind: str) -> tuple[str, ...]:
    """The kinds of members that can serve as ``kind``, in order of preference."""
    return IMAGE_KINDS if kind == IMAGE else (kind,)


@dataclass(frozen=True)
class Required:
    """The members that a sample must have.

    members: their kinds ("txt", "json", or IMAGE for any image), each with what it is needed for ("captions").
    """

    members: Mapping[str, str] = field(default_factory=dict)

    def met_by(self, kinds: set[str]) -> bool:
        return all(not kinds.isdisjoint(alternatives(kind)) for kind in self.members)


@dataclass(frozen=True)
class ShardSummary:
    """The contents of a shard in short: enough to count samples and to detect that its table is out of date.

    size, tag:  of the tar when it was indexed, from ``storage.size_and_tag`` (-1 and "" for a pipe).
    by_offset:  False when the shard must be copied as a whole before parts of it can be read.
    problem:    what is wrong with the tar, or "".
    signatures: the number of samples by their kinds of members: {"jpg/json/txt": 9871, …}.
    """

    size: int
    tag: str
    by_offset: bool
    problem: str
    signatures: dict[str, int]

    def count(self, required: Required) -> int:
        """The number of samples that have all required members."""
        return sum(n for kinds, n in self.signatures.items() if required.met_by(set(kinds.split("/"))))

    @property
    def samples(self) -> int:
        return sum(self.signatures.values())

    @classmethod
    def parse(cls, record: object) -> ShardSummary:
        """A summary from a file. Raises ValueError unless it describes a possible shard."""
        if not isinstance(record, dict) or record.keys() != _SUMMARY_FIELDS:
            raise ValueError("not a summary of a shard")
        found = cls(**record)
        if type(found.size) is not int or type(found.by_offset) is not bool:
            raise ValueError("size and by_offset must be a number and a truth value")
        if not (isinstance(found.tag, str) and isinstance(found.problem, str) and found.problem.isprintable()):
            raise ValueError("tag and problem must be texts")
        if not isinstance(found.signatures, dict):
            raise ValueError("signatures must be counts")
        members = 0
        for signature, count in found.signatures.items():
            kinds = signature.split("/")
            if type(count) is not int or count < 1 or len(set(kinds)) < len(kinds):
                raise ValueError("a signature must be different kinds, and occur")
            members += count * len(kinds)
        if members * 2 * BLOCK > found.size + BLOCK:  # each has a header; the last payload may lack its padding
            raise ValueError("a shard of this size cannot hold as many members")
        return found


_SUMMARY_FIELDS = {each.name for each in fields(ShardSummary)}


def split_name(name: str) -> tuple[str, str] | None:
    """Key and kind of a member, as webdataset defines them: the path up to the base name's first dot, and the rest in
    lower case. None for hidden files (macOS's ``._x.jpg``) and for names without a dot."""
    match = _NAME.fullmatch(name.removeprefix("./"))
    return (match.group(1), match.group(2).lower()) if match else None


@dataclass(frozen=True)
class Table:
    """Members grouped into samples.

    keys:    [S] the samples' keys, in the order of the tar.
    kinds:   the kinds of members that occur.
    sample, kind, offset, size: [M] each member's sample, kind (an index into ``kinds``), first byte and length.
    """

    keys: list[str]
    kinds: list[str]
    sample: np.ndarray
    kind: np.ndarray
    offset: np.ndarray
    size: np.ndarray

    @classmethod
    def of(cls, members: Sequence[Member]) -> Table:
        """Group members by key, wherever in the tar they are. A second member of the same key and kind starts a new
        sample. Empty files count as missing."""
        keys: list[str] = []
        numbers: dict[str, int] = {}
        latest: dict[str, tuple[int, set[int]]] = {}  # the latest sample under each key, and its kinds
        rows = []
        for name, offset, size in members:
            parts = split_name(name)
            if parts is None or size == 0:
                continue
            key, kind = parts[0], numbers.setdefault(parts[1], len(numbers))
            if key not in latest or kind in latest[key][1]:
                latest[key] = len(keys), set()
                keys.append(key)
            sample, present = latest[key]
            present.add(kind)
            rows.append((sample, kind, offset, size))
        columns = np.array(rows, dtype=np.int64).reshape(-1, 4).T
        return cls(keys, list(numbers), columns[0].astype(np.int32), columns[1].astype(np.int32), *columns[2:])

    def signatures(self) -> dict[str, int]:
        """The number of samples by their kinds of members, joined with slashes."""
        present: list[list[str]] = [[] for _ in self.keys]
        for sample, kind in zip(self.sample.tolist(), self.kind.tolist(), strict=True):
            present[sample].append(self.kinds[kind])
        return dict(Counter("/".join(sorted(kinds)) for kinds in present))

    def spans(self, kinds: Sequence[str]) -> np.ndarray:
        """[S, 2] int64: offset and size of each sample's first member of these kinds, or -1 and 0 without one."""
        spans = np.tile(np.array([-1, 0], dtype=np.int64), (len(self.keys), 1))
        for name in reversed(kinds):
            if name in self.kinds:
                rows = np.flatnonzero(self.kind == self.kinds.index(name))
                spans[self.sample[rows], 0] = self.offset[rows]
                spans[self.sample[rows], 1] = self.size[rows]
        return spans

    def select(self, required: Required) -> Members:
        """The samples that have all required members."""
        spans = {kind: self.spans(alternatives(kind)) for kind in required.members}
        usable = np.ones(len(self.keys), dtype=bool)
        for column in spans.values():
            usable &= column[:, 0] >= 0
        rows = np.flatnonzero(usable)
        return Members(rows, {kind: column[rows] for kind, column in spans.items()})


@dataclass(frozen=True)
class Members:
    """The locations of the required members of a shard's usable samples.

    rows:  [n] int64, the samples' numbers in the table, which count every sample of the tar.
    spans: by kind, [n, 2] int64: offset and size.
    """

    rows: np.ndarray
    spans: dict[str, np.ndarray]

    def only(self, kept: np.ndarray) -> Members:
        """Those of some samples. kept: bool [n]."""
        return Members(self.rows[kept], {kind: spans[kept] for kind, spans in self.spans.items()})
