"""The samples of one shard: which members belong together, where they lie, and the file that remembers it."""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from .. import storage
from ..images.decode import IMAGE_KINDS
from .tar import Member

FORMAT = 1
_NAME = re.compile(r"((?:.*/)?[^./]+)\.([^/]*)")  # the path up to the base name's first dot, and the rest


@dataclass(frozen=True)
class Required:
    """What a sample must have to be used. ``caption`` and ``label`` are kinds of members: "txt", "json", "cls"."""

    image: bool = True
    caption: str = ""
    label: str = ""

    def met_by(self, kinds: set[str]) -> bool:
        image = not self.image or not kinds.isdisjoint(IMAGE_KINDS)
        return image and {kind for kind in (self.caption, self.label) if kind} <= kinds


@dataclass(frozen=True)
class ShardSummary:
    """A shard in short: enough to plan with and to see whether its table still holds.

    size, tag:  of the tar, as ``storage.size_and_tag`` gave them when it was indexed (-1 and "" for a pipe).
    by_offset:  False where the shard must be copied whole before parts of it can be read.
    problem:    what is wrong with the tar, or "".
    signatures: how many samples have which kinds of members: {"jpg/json/txt": 9871, …}.
    """

    size: int
    tag: str
    by_offset: bool
    problem: str
    signatures: dict[str, int]

    def count(self, need: Required) -> int:
        return sum(n for kinds, n in self.signatures.items() if need.met_by(set(kinds.split("/"))))

    @property
    def samples(self) -> int:
        return sum(self.signatures.values())


def split_name(name: str) -> tuple[str, str] | None:
    """Key and kind of a member as webdataset has them: the path up to the base name's first dot, and the rest in
    lower case. None for hidden files (macOS's ``._x.jpg``) and for names without a dot."""
    match = _NAME.fullmatch(name.removeprefix("./"))
    return (match.group(1), match.group(2).lower()) if match else None


@dataclass(frozen=True)
class Table:
    """Members grouped into samples.

    keys:    [S] the samples' keys.
    kinds:   the kinds of members that occur.
    sample, kind, offset, size: [M] each member's sample, kind (a number into ``kinds``), first byte and length.
    """

    keys: list[str]
    kinds: list[str]
    sample: np.ndarray
    kind: np.ndarray
    offset: np.ndarray
    size: np.ndarray

    @classmethod
    def of(cls, members: Sequence[Member]) -> Table:
        """Group members by key, wherever in the tar they are. A second member of the same key and kind begins another
        sample. Empty files count as absent."""
        keys: list[str] = []
        numbers: dict[str, int] = {}
        latest: dict[str, tuple[int, set[int]]] = {}  # the newest sample under each key, and the kinds it has
        rows = []
        for name, offset, size in members:
            parts = split_name(name)
            if parts is None or size == 0:
                continue
            key, kind = parts[0], numbers.setdefault(parts[1], len(numbers))
            if key not in latest or kind in latest[key][1]:
                latest[key] = len(keys), set()
                keys.append(key)
            sample, has = latest[key]
            has.add(kind)
            rows.append((sample, kind, offset, size))
        columns = np.array(rows, dtype=np.int64).reshape(-1, 4).T
        return cls(keys, list(numbers), columns[0].astype(np.int32), columns[1].astype(np.int32), *columns[2:])

    def signatures(self) -> dict[str, int]:
        has: list[list[str]] = [[] for _ in self.keys]
        for sample, kind in zip(self.sample.tolist(), self.kind.tolist(), strict=True):
            has[sample].append(self.kinds[kind])
        return dict(Counter("/".join(sorted(kinds)) for kinds in has))

    def place(self, wanted: Sequence[str]) -> np.ndarray:
        """[S, 2] int64: offset and size of each sample's member of the first wanted kind it has, or -1 and 0."""
        places = np.tile(np.array([-1, 0], dtype=np.int64), (len(self.keys), 1))
        for name in reversed(wanted):
            if name in self.kinds:
                rows = np.flatnonzero(self.kind == self.kinds.index(name))
                places[self.sample[rows], 0] = self.offset[rows]
                places[self.sample[rows], 1] = self.size[rows]
        return places

    def select(self, need: Required) -> Places:
        """The samples that have what is needed."""
        wanted = (IMAGE_KINDS if need.image else (), [need.caption], [need.label])
        places = [self.place([kind for kind in kinds if kind]) for kinds in wanted]
        use = np.ones(len(self.keys), dtype=bool)
        for place, needed in zip(places, (need.image, need.caption, need.label), strict=True):
            if needed:
                use &= place[:, 0] >= 0
        rows = np.flatnonzero(use)
        return Places(rows, *(place[rows] for place in places))


@dataclass(frozen=True)
class Places:
    """Where the needed members of a shard's usable samples are.

    rows: [n] the samples' numbers in the table. image, caption, label: [n, 2] offset and size, or -1 and 0.
    """

    rows: np.ndarray
    image: np.ndarray
    caption: np.ndarray
    label: np.ndarray


def save(path: str, about: ShardSummary, table: Table):
    """Write both to one npz file, atomically."""
    keys = [key.encode() for key in table.keys]
    text = json.dumps({"format": FORMAT, "about": asdict(about), "kinds": table.kinds})
    buffer = io.BytesIO()
    np.savez(
        buffer,
        header=np.frombuffer(text.encode(), dtype=np.uint8),
        keys=np.frombuffer(b"".join(keys), dtype=np.uint8),
        key_ends=np.cumsum([len(key) for key in keys], dtype=np.int64),
        sample=table.sample,
        kind=table.kind,
        offset=table.offset,
        size=table.size,
    )
    storage.write_bytes(path, buffer.getvalue())


def load_about(path: str) -> ShardSummary | None:
    """As ``load``, without reading the table."""
    return _load(path, lambda file, header: ShardSummary(**header["about"]))


def load(path: str) -> tuple[ShardSummary, Table] | None:
    """What ``save`` wrote, or None where there is no such file or it is of no use."""

    def read(file, header) -> tuple[ShardSummary, Table]:
        ends, text = file["key_ends"].tolist(), file["keys"].tobytes()
        keys = [text[start:end].decode() for start, end in zip([0, *ends], ends, strict=False)]
        columns = (file[name] for name in ("sample", "kind", "offset", "size"))
        return ShardSummary(**header["about"]), Table(keys, header["kinds"], *columns)

    return _load(path, read)


def _load(path: str, read: Callable):
    try:
        with np.load(path, allow_pickle=False) as file:
            header = json.loads(file["header"].tobytes())
            return read(file, header) if header["format"] == FORMAT else None
    except (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile):
        return None  # absent, of another version or damaged: a cache is rebuilt, not repaired
