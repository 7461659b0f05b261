"""The orientation that a camera wrote into a picture (Exif 3.0, tag 274), wherever the file keeps it.

A png has it in a chunk eXIf, which may follow the pixels (Portable Network Graphics 3.0, 11.3.4.6), or, written by
ImageMagick, as hexadecimal digits in a text. Pillow reads the former only together with the pixels.
"""

from __future__ import annotations

import zlib

from PIL import Image

TAG = 0x0112
SIDEWAYS = (5, 6, 7, 8)  # orientations that swap rows and columns
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
RAW = "Raw profile type exif"  # ImageMagick's text
CHUNK = b"eXIf"
MAX_CHUNK = 1 << 16  # bytes, of Exif data in a jpeg too
LATEST = 2 * MAX_CHUNK  # bytes from the end of a file where it is looked for


def orientation_of(image: Image.Image, data: bytes) -> int | None:
    """The orientation of an opened picture, 1 to 8, or None. data: its file, or the beginning of it."""
    if "exif" in image.info or RAW in image.info:
        return image.getexif().get(TAG)
    if image.format == "PNG" and (exif := late_exif(data)):
        found = Image.Exif()
        found.load(exif)
        return found.get(TAG)
    return None


def late_exif(data: bytes) -> bytes:
    """The Exif data after the pixels of a png, from its file or the end of it; nothing without any."""
    at = data.rfind(CHUNK, max(4, len(data) - LATEST))
    if at < 0:
        return b""
    start = at + len(CHUNK)
    end = start + int.from_bytes(data[at - 4 : at], "big")
    is_chunk = end - start <= MAX_CHUNK and zlib.crc32(data[at:end]) == int.from_bytes(data[end : end + 4], "big")
    return data[start:end] if is_chunk else b""


def upright(image: Image.Image, orientation: int | None) -> Image.Image:
    """The picture as it was seen."""
    return image.transpose(TURNS[orientation]) if orientation in TURNS else image
