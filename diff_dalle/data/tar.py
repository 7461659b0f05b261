"""Tars: reading the table of contents from the headers alone, and writing reproducibly.

Formats read: v7, ustar, GNU (long names, large sizes) and pax. Members before a cut or a damaged header are used.
Layout of the header: POSIX.1-2008, pax, section "ustar Interchange Format"; GNU tar manual, "Basic Tar Format".
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from .. import storage

BLOCK = 512
LONGEST_NAME = 1 << 20  # maximum bytes of an extension header that are read
LONGEST_NUMBER = 20  # digits
LONGEST_SHOWN = 200  # characters of a name in a message


class Member(NamedTuple):
    """A file in a tar: ``size`` bytes from ``offset`` on."""

    name: str
    offset: int
    size: int


def printable(name: str) -> str:
    """A member's name on one line, for messages: control characters are escaped, and a long name is shortened."""
    text = name if name.isprintable() else repr(name)[1:-1]
    return text if len(text) <= LONGEST_SHOWN else text[: LONGEST_SHOWN - 1] + "…"


def read_members(read: Callable[[int, int], bytes], total: int) -> tuple[list[Member], str]:
    """The files of a tar of ``total`` bytes, in order, and what is wrong with it, or "".

    read: ``read(offset, size)`` returns the bytes at an offset, fewer at the end.
    """
    members: list[Member] = []
    offset, name, size = 0, "", -1  # name and size announced by an extension header for the next member
    while True:
        header = read(offset, BLOCK)
        if len(header) < BLOCK:
            return members, "is empty" if offset == 0 else "was cut: its end mark is missing"
        if not any(header):
            return members, ""
        try:
            info = tarfile.TarInfo.frombuf(header, "utf-8", "backslashreplace")
        except tarfile.HeaderError:
            info = None
        if info is None or info.size < 0:  # a negative size leads back to the same header
            return members, "is not a tar" if offset == 0 else f"is damaged at byte {offset:,}"
        kind = info.type
        own_size = 0 if kind in b"123456" else info.size  # links, devices and directories have no payload
        start, length = offset + BLOCK, own_size if size < 0 or kind in b"xgLK" else size
        if start + length > total:
            inside = printable(name or info.name)
            return members, f"was cut inside {inside}: {total - start:,} of its {length:,} bytes are there"
        offset = start + -(-length // BLOCK) * BLOCK
        if kind in b"xL" and length > LONGEST_NAME:
            return members, f"is damaged at byte {start:,}: a name of {length:,} bytes"
        if kind == b"L":
            name = read(start, length).partition(b"\0")[0].decode("utf-8", "backslashreplace")
        elif kind == b"x":
            records = _pax_records(read(start, length))
            name, size = records.get(b"path", b"").decode("utf-8", "backslashreplace") or name, -1
            if _is_number(records.get(b"size", b"")):
                size = int(records[b"size"])
        elif kind not in b"gK":
            if kind in b"07\0":
                members.append(Member(name or info.name, start, length))
            name, size = "", -1


def _is_number(digits: bytes) -> bool:
    """Whether these are the digits of a size; int() refuses thousands of digits."""
    return digits.isdigit() and len(digits) < LONGEST_NUMBER


def _pax_records(payload: bytes) -> dict[bytes, bytes]:
    """``b"12 path=name\\n…"`` → names and values; the length includes itself, the blank and the newline."""
    records = {}
    start = 0  # of a record; only the record itself is copied, since there may be very many
    while (blank := payload.find(b" ", start, start + LONGEST_NUMBER)) > 0:
        length = payload[start:blank]
        if not _is_number(length) or int(length) <= len(length):
            break
        name, _, value = payload[blank + 1 : start + int(length) - 1].partition(b"=")
        records[name] = value
        start += int(length)
    return records


def write_tar(path: str, samples: Iterable[tuple[str, Mapping[str, bytes]]]) -> None:
    """Write samples (key, members by kind) as a webdataset shard, atomically. The same samples give the same bytes."""
    from webdataset import TarWriter  # here, because reading does not need this slow import

    with storage.atomic_writer(path) as file, TarWriter(file, encoder=False, mtime=0) as tar:
        for key, members in samples:
            tar.write({"__key__": key, **members})
