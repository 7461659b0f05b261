"""Small ICC profiles (ICC.1:2022): of an RGB display, and of a printer with four inks."""

from __future__ import annotations

import struct

D50 = (0.9642, 1.0, 0.8249)
ADOBE_RGB = ((0.60974, 0.31111, 0.01947), (0.20528, 0.62567, 0.06087), (0.14919, 0.06322, 0.74457))  # Adobe's, 1998


def _fixed(values) -> bytes:
    return b"".join(struct.pack(">i", round(value * 65536)) for value in values)


def _profile(device: bytes, colors: bytes, connection: bytes, tags: dict[bytes, bytes]) -> bytes:
    text = b"desc\0\0\0\0" + struct.pack(">I", 5) + b"test\0" + bytes(79)
    tags = {b"desc": text, b"wtpt": b"XYZ \0\0\0\0" + _fixed(D50), **tags}
    start = 128 + 4 + 12 * len(tags)
    table, body = struct.pack(">I", len(tags)), b""
    for name, data in tags.items():
        table += name + struct.pack(">II", start + len(body), len(data))
        body += data + bytes(-len(data) % 4)
    head = struct.pack(">I", start + len(body)) + bytes(4) + b"\2\x40\0\0" + device + colors + connection
    head += bytes(12) + b"acsp" + bytes(28) + _fixed(D50)
    return head.ljust(128, b"\0") + table + body


def rgb_profile(primaries=ADOBE_RGB, gamma: float = 2.19922, filling: int = 0) -> bytes:
    """primaries: X, Y, Z of red, green and blue under D50. filling: bytes before what counts."""
    curve = b"curv\0\0\0\0" + struct.pack(">IH", 1, round(256 * gamma))
    tags = {b"fill": b"data" + bytes(filling)} if filling else {}
    tags |= {
        name + b"XYZ": b"XYZ \0\0\0\0" + _fixed(xyz) for name, xyz in zip((b"r", b"g", b"b"), primaries, strict=True)
    }
    return _profile(b"mntr", b"RGB ", b"XYZ ", tags | {name + b"TRC": curve for name in (b"r", b"g", b"b")})


def gray_profile(gamma: float) -> bytes:
    curve = b"curv\0\0\0\0" + struct.pack(">IH", 1, round(256 * gamma))
    return _profile(b"mntr", b"GRAY", b"XYZ ", {b"kTRC": curve})


def cmyk_profile(lightness: int = 128) -> bytes:
    """Of a printer whose inks give a gray of this lightness (0 = black, 255 = white) each, and black together."""
    identity, levels = bytes(range(256)), {0: 255, 15: 0}
    grid = b"".join(bytes((levels.get(corner, lightness), 128, 128)) for corner in range(16))
    matrix = _fixed((1, 0, 0, 0, 1, 0, 0, 0, 1))
    lut = b"mft1\0\0\0\0" + bytes((4, 3, 2, 0)) + matrix + 4 * identity + grid + 3 * identity
    return _profile(b"prtr", b"CMYK", b"Lab ", {b"A2B0": lut})
