"""Whether the pixels of a png are all there. Its stream may end early and be valid all the same; Pillow then leaves the
other pixels at 0, and says nothing."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

from PIL import Image

CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # by the type of color in the header
WHOLE = ((0, 0, 1, 1),)
#: The passes of Adam7: the first column and row of each, and the steps between them (PNG specification, 8.2).
ADAM7 = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
BLOCK = 1 << 20  # bytes that are unpacked at a time


def is_complete(image: Image.Image, data: bytes) -> bool:
    """Of a decoded png. Only one whose last row is 0, or an interlaced one, is unpacked again to see."""
    width, height = image.size
    if not image.info.get("interlace") and image.crop((0, height - 1, width, height)).getbbox():
        return True
    return _has_bytes(data, _bytes_of_pixels(data))


def _bytes_of_pixels(data: bytes) -> int:
    """The number of bytes that the header asks for: of each row its filter and its pixels."""
    width, height, bits, color, _, _, interlaced = struct.unpack(">IIBBBBB", data[16:29])
    total = 0
    for left, top, right, down in ADAM7 if interlaced else WHOLE:
        columns, rows = -(-(width - left) // right), -(-(height - top) // down)
        if columns > 0 and rows > 0:
            total += rows * (1 + -(-columns * bits * CHANNELS[color] // 8))
    return total


def _has_bytes(data: bytes, needed: int) -> bool:
    stream = zlib.decompressobj()
    for part in _parts(data):
        while part and needed > 0:
            needed -= len(stream.decompress(part, BLOCK))
            part = stream.unconsumed_tail
    return needed <= 0


def _parts(data: bytes) -> Iterator[bytes]:
    """The content of the chunks that hold the pixels."""
    at = 8
    while at + 8 <= len(data):
        (size,), kind = struct.unpack(">I", data[at : at + 4]), data[at + 4 : at + 8]
        if kind == b"IDAT":
            yield data[at + 8 : at + 8 + size]
        at += size + 12
