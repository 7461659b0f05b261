"""Tars: reading the table of contents from the headers alone, and writing reproducibly.

Formats read: v7, ustar, GNU (long names, large sizes) and pax. Members before a cut or a damaged header are used.
Layout of the header: POSIX.1-2008, pax, section "ustar Interchange Format"; GNU tar manual, "Basic Tar Format".
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from .. import storage

BLOCK = 512
LONGEST_NAME = 1 << 20  # maximum bytes of an extension header that are read
LONGEST_NUMBER = 20  # digits
LONGEST_SHOWN = 200  # characters of a name in a message
_ADLER = 65521  # the modulus of Adler-32


class Member(NamedTuple):
    """A file in a tar: ``size`` bytes from ``offset`` on."""

    name: str
    offset: int
    size: int


class _Damaged(Exception):
    """A block that is not a tar header."""


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
            kind, own_name, own_size = _parse(header)
        except _Damaged:
            return members, "is not a tar" if offset == 0 else f"is damaged at byte {offset:,}"
        start, length = offset + BLOCK, own_size if size < 0 or kind in b"xgLK" else size
        if start + length > total:
            inside = printable(name or own_name)
            return members, f"was cut inside {inside}: {total - start:,} of its {length:,} bytes are there"
        offset = start + -(-length // BLOCK) * BLOCK
        if kind in b"xL" and length > LONGEST_NAME:
            return members, f"is damaged at byte {start:,}: a name of {length:,} bytes"
        if kind == b"L":
            name = _text(read(start, length))
        elif kind == b"x":
            records = _pax_records(read(start, length))
            name, size = records.get(b"path", b"").decode("utf-8", "backslashreplace") or name, -1
            if _is_number(records.get(b"size", b"")):
                size = int(records[b"size"])
        elif kind not in b"gK":
            if kind in b"07\0" and not own_name.endswith("/"):
                members.append(Member(name or own_name, start, length))
            name, size = "", -1


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("utf-8", "backslashreplace")


def _number(field: bytes) -> int:
    """Octal digits, or a big-endian integer marked by its first bit (GNU, for more than 8 GiB)."""
    if field[0] & 0x80:
        return int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
    digits = field.strip(b" \0")
    if digits.strip(b"01234567"):  # int() accepts a sign, and a negative size leads back to the same header
        raise _Damaged
    return int(digits or b"0", 8)


def _is_number(digits: bytes) -> bool:
    """Whether these are the digits of a size; int() refuses thousands of digits."""
    return digits.isdigit() and len(digits) < LONGEST_NUMBER


def _parse(header: bytes) -> tuple[bytes, str, int]:
    """Type, name and payload size of a member."""
    # The checksum is the sum of all bytes, with its own field read as eight blanks. The low half of Adler-32 is one
    # plus the sum of all bytes (modulo 65521): much faster than adding 512 numbers in Python.
    expected = _number(header[148:156]) + sum(header[148:156]) - 8 * 32
    if ((zlib.adler32(header) & 0xFFFF) - 1 - expected) % _ADLER:
        raise _Damaged
    kind, name = header[156:157], _text(header[:100])
    if header[257:263] == b"ustar\0" and header[345]:
        name = f"{_text(header[345:500])}/{name}"
    has_payload = kind not in b"123456"  # links, devices and directories have none, whatever their size field
    return kind, name, _number(header[124:136]) if has_payload else 0


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
