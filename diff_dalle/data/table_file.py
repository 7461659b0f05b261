"""The file that holds a shard's table: an uncompressed .npz, which may come with the data from anybody.

Nothing in it is believed: a file that does not describe a possible shard of the stated size counts as damaged, and is
written again from the shard itself. Reading takes memory in proportion to the file, and no path is taken from it.
"""

from __future__ import annotations

import io
import json
import os
import stat
import struct
import zipfile
from collections.abc import Callable
from dataclasses import asdict
from typing import TypeVar

import numpy as np

from .. import storage
from .npy import parse_header
from .shard_table import ShardSummary, Table
from .tar import BLOCK

FORMAT = 1  # of these files; the summaries of a folder carry it too
MAX_FILE = 1 << 29  # bytes: about ten million members
MAX_DIRECTORY = 1 << 12  # bytes of the zip's own table of contents, which has seven entries
COLUMNS = {"key_ends": np.int64, "sample": np.int32, "kind": np.int32, "offset": np.int64, "size": np.int64}
Result = TypeVar("Result")


def read_bounded(path: str, limit: int) -> bytes:
    """The content of a local file. Raises OSError for one that is missing, not a regular file, or above ``limit``."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode) or status.st_size > limit:  # a FIFO would be opened forever
        raise OSError(f"{path} is no regular file of at most {limit:,} bytes")
    with open(path, "rb") as file:
        return file.read(status.st_size)  # of a number of bytes it reserves as many


def save_table(path: str, summary: ShardSummary, table: Table):
    """Write both to one npz file, atomically."""
    keys = [key.encode() for key in table.keys]
    text = json.dumps({"format": FORMAT, "about": asdict(summary), "kinds": table.kinds})
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


def load_summary(path: str) -> ShardSummary | None:
    """Like ``load_table``, without the table."""
    return _load(path, lambda file, summary, header: summary)


def load_table(path: str) -> tuple[ShardSummary, Table] | None:
    """What ``save_table`` wrote, or None when the file is missing, damaged, impossible or of another format."""
    return _load(path, lambda file, summary, header: (summary, _table(file, summary, header)))


def save_column(path: str, summary: ShardSummary, values: np.ndarray):
    """Write an array with a row for each sample of the shard that ``summary`` describes, atomically."""
    buffer = io.BytesIO()
    header = json.dumps({"format": FORMAT, "about": asdict(summary)})
    np.savez(buffer, header=np.frombuffer(header.encode(), dtype=np.uint8), values=values.ravel())
    storage.write_bytes(path, buffer.getvalue())


def load_column(path: str, summary: ShardSummary, dtype: type, width: int = 1) -> np.ndarray | None:
    """What ``save_column`` wrote, [samples, width], or None when it is missing, damaged or of another shard."""

    def read(file: zipfile.ZipFile, found: ShardSummary, header: dict) -> np.ndarray:
        _check(found == summary, "state")
        return _array(file, "values", dtype).reshape(summary.samples, width)

    return _load(path, read)


def _load(path: str, read: Callable[[zipfile.ZipFile, ShardSummary, dict], Result]) -> Result | None:
    try:
        data = read_bounded(path, MAX_FILE)
        # Before zipfile reads the table of contents: it must be small, and described by the last 22 bytes (APPNOTE.TXT
        # 4.3.16) without the 64-bit locator that may precede them.
        signature, length, _, comment = struct.unpack("<4s8xLLH", data[-22:])
        if signature != b"PK\5\6" or length > MAX_DIRECTORY or comment or data[-42:-38] == b"PK\6\7":
            return None
        with zipfile.ZipFile(io.BytesIO(data)) as file:
            header = json.loads(_array(file, "header", np.uint8).tobytes())
            if not isinstance(header, dict) or header.get("format") != FORMAT:
                return None
            return read(file, ShardSummary.parse(header.get("about")), header)
    except (
        OSError,
        EOFError,
        ValueError,
        KeyError,
        RecursionError,
        NotImplementedError,  # of zipfile, for a later version of the format
        struct.error,
        zipfile.BadZipFile,
    ):
        return None  # a cache is rebuilt, not repaired


def _array(file: zipfile.ZipFile, name: str, dtype: type) -> np.ndarray:
    """A column: [n] of that type. Raises ValueError for anything else."""
    entry = file.getinfo(f"{name}.npy")
    if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:  # compressed bytes may stand for any number
        raise ValueError(f"{name} is compressed or encrypted")
    data = file.read(entry)
    header = parse_header(data[: 1 << 14])
    if len(header.shape) != 1 or header.dtype != dtype:
        raise ValueError(f"{name} is {header.dtype} {header.shape}")
    return np.frombuffer(data, dtype, header.shape[0], header.offset)  # raises ValueError when it is cut


def _table(file: zipfile.ZipFile, summary: ShardSummary, header: dict) -> Table:
    """The table, when it is a possible one of that shard. Raises ValueError otherwise."""
    text = _array(file, "keys", np.uint8).tobytes()
    columns = {name: _array(file, name, dtype) for name, dtype in COLUMNS.items()}
    kinds, ends = header.get("kinds"), columns.pop("key_ends")
    if not isinstance(kinds, list) or not all(isinstance(kind, str) and "/" not in kind for kind in kinds):
        raise ValueError("kinds are not plain names")
    _check(len({len(column) for column in columns.values()}) == 1, "columns differ in length")
    _check(len(ends) == summary.samples, "number of keys")
    starts = np.concatenate([np.zeros(1, np.int64), ends])
    _check((np.diff(starts) >= 0).all() and starts[-1] == len(text), "key_ends")
    _check(len(set(kinds)) == len(kinds), "kinds repeat")
    for name, count in (("sample", len(ends)), ("kind", len(kinds))):
        _check(((columns[name] >= 0) & (columns[name] < count)).all(), name)
    offset, size = columns["offset"], columns["size"]
    # In this order, so that nothing overflows.
    _check(((offset >= BLOCK) & (size > 0) & (size <= summary.size) & (offset <= summary.size - size)).all(), "spans")
    keys = [text[start:end].decode() for start, end in zip(starts[:-1].tolist(), ends.tolist(), strict=True)]
    return Table(keys, kinds, **columns)


def _check(possible: bool | np.bool_, what: str) -> None:
    if not possible:
        raise ValueError(f"impossible {what}")
