"""Small png files, chunk by chunk."""

from __future__ import annotations

import struct
import zlib


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width=8, height=8, extra=b"", pixels: bytes | None = None, bits=8, colors=2) -> bytes:
    data = bytes((3 * width + 1) * height) if pixels is None else pixels
    head = struct.pack(">IIBBBBB", width, height, bits, colors, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + extra + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")
    )


def with_chunk(data: bytes, kind: bytes, content: bytes, before: bytes = b"IDAT") -> bytes:
    """A png with another chunk before its first one of the kind ``before``."""
    at = data.index(before) - 4
    return data[:at] + chunk(kind, content) + data[at:]
