"""Decoding of plain JPEGs by simplejpeg: Pillow's pixels for less work around the same library, libjpeg-turbo.

Layout of the file: ITU-T T.81, annex B.
"""

from __future__ import annotations

import importlib.util

import numpy as np

from ..errors import Fault, InputError

FRACTIONS = (8, 4, 2, 1)  # what libjpeg-turbo divides sides by at little cost, and Pillow's ``draft`` too
BLOCK = 8  # pixels, of the cosine transform
START, SCAN, BASELINE, PROGRESSIVE = b"\xff\xd8", b"\xff\xda", b"\xff\xc0", b"\xff\xc2"  # markers
# Tables (Huffman, quantization, restart interval), applications' data and comments.
TABLES = {bytes((0xFF, code)) for code in (0xC4, 0xDB, 0xDD, *range(0xE0, 0xF0), 0xFE)}
SPECIAL = (b"Exif\0\0", b"MPF\0")  # an orientation, or several images: Pillow reads them


def require_simplejpeg() -> None:
    """Raise InputError when simplejpeg is not installed."""
    if importlib.util.find_spec("simplejpeg") is None:
        remedy = "run `pip install 'diff_dalle[jpeg]'`, or leave it at pillow, which gives the same pixels"
        raise InputError(Fault("decoder", f"is simplejpeg, but this package is not installed: {remedy}"))


def decode_plain_jpeg(
    data: bytes, max_pixels: int, max_scanned: int, least: tuple[int, int] | None
) -> tuple[np.ndarray, tuple[int, int]] | None:
    """The pixels of a JPEG, uint8 [h, w, 3], and its full (height, width); or None for an image that Pillow must decode
    or refuse: no JPEG, one with EXIF data or several images, in CMYK, damaged or too large.

    max_pixels, max_scanned: maximum width × height, and of a progressive JPEG that times the number of scans.
    least: (height, width). Both sides are divided by the largest of ``FRACTIONS`` that leaves at least these, rounding
           up; None = full size.
    """
    import simplejpeg

    scans = _scans(data)
    if not scans:
        return None
    try:
        height, width, colors, _ = simplejpeg.decode_jpeg_header(data)
        if colors not in ("YCbCr", "Gray") or height * width > min(max_pixels, max_scanned // scans):
            return None
        if max(height, width) < BLOCK:  # its size at one fraction may be that at another
            return None
        fits = min(height // least[0], width // least[1]) if least else 1
        fraction = next((each for each in FRACTIONS if each <= fits), 1)
        rows, columns = -(-height // fraction), -(-width // fraction)
        pixels = simplejpeg.decode_jpeg(data, "RGB", min_height=rows, min_width=columns)
    except ValueError:  # damaged, to any degree
        return None
    return (pixels, (height, width)) if pixels.shape[:2] == (rows, columns) else None


def _scans(data: bytes) -> int:
    """The number of scans that each visit the whole image, or 0 unless it is a plain JPEG, baseline or progressive."""
    if not data.startswith(START):
        return 0
    at, scans = len(START), 0
    while (marker := data[at : at + 2]) != SCAN:
        content = at + 4
        at += 2 + int.from_bytes(data[at + 2 : content], "big")
        if marker == PROGRESSIVE:
            scans = data.count(SCAN)
        elif marker == BASELINE:
            scans = 1
        elif at < content or marker not in TABLES or data.startswith(SPECIAL, content):
            return 0
    return scans
