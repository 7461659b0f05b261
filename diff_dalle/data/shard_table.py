"""The samples of one shard, their members and locations, and the file that holds this table: an uncompressed .npz,
which may come with the data from anybody.

Nothing in a file is believed: one that does not describe a possible shard of the stated size counts as damaged, and is
written again from the shard itself. Reading takes memory in proportion to the file, and no path is taken from it.
"""

from __future__ import annotations

import io
import json
import os
import re
import stat
import struct
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import numpy as np

from .. import storage
from ..images.decode import IMAGE_KINDS
from .arrays import parse_header
from .tar import BLOCK, Member

IMAGE = "image/*"  # a kind of member that stands for any of IMAGE_KINDS; real kinds contain no slash
FORMAT = 1  # of these files; the summaries of a folder carry it too
MAX_FILE = 1 << 29  # bytes: about ten million members
MAX_DIRECTORY = 1 << 12  # bytes of the zip's own table of contents, which has seven entries
COLUMNS = {"key_ends": np.int64, "sample": np.int32, "kind": np.int32, "offset": np.int64, "size": np.int64}
#: What damaged files raise, and those that do not hold what they should.
DAMAGE = (
    *(OSError, EOFError, ValueError, LookupError, TypeError, AttributeError, RecursionError),
    *(struct.error, zipfile.BadZipFile, NotImplementedError),  # the last of zipfile, for a later version of the format
)
Result = TypeVar("Result")
_NAME = re.compile(r"((?:.*/)?[^./]+)\.([^/]*)")  # the path up to the base name's first dot, and the rest


def alternatives(kind: str) -> tuple[str, ...]:
    """The kinds of members that can serve as ``kind``, in order of preference."""
    return IMAGE_KINDS if kind == IMAGE else (kind,)


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

    def count(self, required: Iterable[str]) -> int:
        """The number of samples that have members of all these kinds."""
        sought = [set(alternatives(kind)) for kind in required]
        found = ((signature.split("/"), count) for signature, count in self.signatures.items())
        return sum(count for kinds, count in found if not any(each.isdisjoint(kinds) for each in sought))

    @property
    def samples(self) -> int:
        return sum(self.signatures.values())

    @classmethod
    def parse(cls, record: Any) -> ShardSummary:
        """A summary from a file. Raises one of ``DAMAGE`` unless it describes a possible shard."""
        found = cls(**record)
        _check(type(found.size) is int and type(found.by_offset) is bool)
        _check(isinstance(found.tag, str) and isinstance(found.problem, str) and found.problem.isprintable())
        members = 0
        for signature, count in found.signatures.items():
            kinds = signature.split("/")
            _check(type(count) is int and count > 0 and len(set(kinds)) == len(kinds))
            members += count * len(kinds)
        _check(members * 2 * BLOCK <= found.size + BLOCK)  # each has a header; the last payload may lack its padding
        return found


def split_name(name: str) -> tuple[str, str] | None:
    """Key and kind of a member, as webdataset defines them: the path up to the base name's first dot, and the rest in
    lower case. None for hidden files (macOS's ``._x.jpg``) and for names without a dot."""
    match = _NAME.fullmatch(name.removeprefix("./"))
    return (match.group(1), match.group(2).lower()) if match else None


def split_at_dots(kinds: Mapping[str, int]) -> str:
    """An explanation of the members that look like images and texts of names with dots; "" without any.

    kinds: of members, with their numbers. A kind of two parts may be meant, such as a control's cond.png.
    """
    ends = (*IMAGE_KINDS, "txt", "json")
    found = {kind: number for kind, number in kinds.items() if "." in kind and kind.rpartition(".")[2] in ends}
    if not found:
        return ""
    kind = max(found, key=lambda each: found[each])
    return (
        f"{sum(found.values()):,} members have names such as NAME.{kind}: a sample's key ends at the first dot of the "
        f"base name, so that this is the member .{kind} of the sample NAME. If the dot belongs to the name, pack them "
        "under names without dots"
    )


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

    def select(self, required: Iterable[str]) -> Members:
        """The samples that have members of all these kinds."""
        spans = {kind: self.spans(alternatives(kind)) for kind in required}
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


# ------------------------------------------------------------------------------------------------------------ files


def read_bounded(path: str, limit: int) -> bytes:
    """The content of a local file. Raises OSError for one that is missing, not a regular file, or above ``limit``."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode) or status.st_size > limit:  # a FIFO would be opened forever
        raise OSError(f"{path} is no regular file of at most {limit:,} bytes")
    with open(path, "rb") as file:
        return file.read(status.st_size)  # of a number of bytes it reserves as many


def save_table(path: str, summary: ShardSummary, table: Table):
    """Write both to one npz file, atomically. Creates its folder."""
    keys = [key.encode() for key in table.keys]
    _save(
        path,
        {"about": asdict(summary), "kinds": table.kinds},
        keys=np.frombuffer(b"".join(keys), dtype=np.uint8),
        key_ends=np.cumsum([len(key) for key in keys], dtype=np.int64),
        sample=table.sample,
        kind=table.kind,
        offset=table.offset,
        size=table.size,
    )


def load_summary(path: str) -> ShardSummary | None:
    """Like ``load_table``, without the table."""
    return _load(path, lambda file, summary, header: summary)


def load_table(path: str) -> tuple[ShardSummary, Table] | None:
    """What ``save_table`` wrote, or None when the file is missing, damaged, impossible or of another format."""
    return _load(path, lambda file, summary, header: (summary, _table(file, summary, header)))


def save_column(path: str, summary: ShardSummary, values: np.ndarray):
    """Write an array with a row for each sample of the shard that ``summary`` describes, atomically. Creates its
    folder."""
    _save(path, {"about": asdict(summary)}, values=values.ravel())


def _save(path: str, header: dict, **arrays: np.ndarray):
    buffer = io.BytesIO()
    text = json.dumps({"format": FORMAT, **header})
    np.savez(buffer, header=np.frombuffer(text.encode(), dtype=np.uint8), **arrays)  # type: ignore[arg-type]
    storage.make_dirs(os.path.dirname(path))
    storage.write_bytes(path, buffer.getvalue())


def load_column(path: str, summary: ShardSummary, dtype: type, width: int = 1) -> np.ndarray | None:
    """What ``save_column`` wrote, [samples, width], or None when it is missing, damaged or of another shard."""

    def read(file: zipfile.ZipFile, found: ShardSummary, header: dict) -> np.ndarray:
        _check(found == summary)
        return _array(file, "values", dtype).reshape(summary.samples, width)

    return _load(path, read)


def _load(path: str, read: Callable[[zipfile.ZipFile, ShardSummary, dict], Result]) -> Result | None:
    try:
        data = read_bounded(path, MAX_FILE)
        # Before zipfile reads the table of contents: it must be small, and described by the last 22 bytes (APPNOTE.TXT
        # 4.3.16) without the 64-bit locator that may precede them.
        signature, length, _, comment = struct.unpack("<4s8xLLH", data[-22:])
        _check(signature == b"PK\5\6" and length <= MAX_DIRECTORY and not comment and data[-42:-38] != b"PK\6\7")
        with zipfile.ZipFile(io.BytesIO(data)) as file:
            header = json.loads(_array(file, "header", np.uint8).tobytes())
            _check(header["format"] == FORMAT)
            return read(file, ShardSummary.parse(header["about"]), header)
    except DAMAGE:
        return None  # a cache is rebuilt, not repaired


def _array(file: zipfile.ZipFile, name: str, dtype: type) -> np.ndarray:
    """A column: [n] of that type. Raises one of ``DAMAGE`` for anything else."""
    entry = file.getinfo(f"{name}.npy")
    _check(entry.compress_type == zipfile.ZIP_STORED and not entry.flag_bits & 1)  # others may stand for any number
    data = file.read(entry)
    header = parse_header(data[: 1 << 14])
    _check(len(header.shape) == 1 and header.dtype == dtype)
    return np.frombuffer(data, dtype, header.shape[0], header.offset)  # raises ValueError when it is cut


def _table(file: zipfile.ZipFile, summary: ShardSummary, header: dict) -> Table:
    """The table, when it is a possible one of that shard. Raises one of ``DAMAGE`` otherwise."""
    text = _array(file, "keys", np.uint8).tobytes()
    columns = {name: _array(file, name, dtype) for name, dtype in COLUMNS.items()}
    kinds, ends = header["kinds"], columns.pop("key_ends")
    _check(isinstance(kinds, list) and len(set(kinds)) == len(kinds))
    _check(all(isinstance(kind, str) and "/" not in kind for kind in kinds))
    _check(len({len(column) for column in columns.values()}) == 1 and len(ends) == summary.samples)
    starts = np.concatenate([np.zeros(1, np.int64), ends])
    _check((np.diff(starts) >= 0).all() and starts[-1] == len(text))
    for name, count in (("sample", len(ends)), ("kind", len(kinds))):
        _check(((columns[name] >= 0) & (columns[name] < count)).all())
    offset, size = columns["offset"], columns["size"]
    # In this order, so that nothing overflows.
    _check(((offset >= BLOCK) & (size > 0) & (size <= summary.size) & (offset <= summary.size - size)).all())
    keys = [text[start:end].decode() for start, end in zip(starts[:-1].tolist(), ends.tolist(), strict=True)]
    return Table(keys, kinds, **columns)


def _check(possible: bool | np.bool_) -> None:
    """Raise ValueError unless what a file says is possible."""
    if not possible:
        raise ValueError
