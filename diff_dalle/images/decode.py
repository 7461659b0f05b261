"""Decoding of png, jpeg and webp files to RGB images, with a limit on the number of pixels.

Plain JPEGs can be decoded by simplejpeg: Pillow's pixels for less work around the same library, libjpeg-turbo. Layout
of the file: ITU-T T.81, annex B.
"""

from __future__ import annotations

import importlib.util
import io
import warnings
from collections.abc import Callable
from typing import TypeVar

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from ..config import Fault, InputError

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
    data: bytes, max_pixels: int, max_scanned: int, least: Size | None
) -> tuple[np.ndarray, Size] | None:
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


DECODERS = ("pillow", "simplejpeg")
FORMATS = ("JPEG", "PNG", "WEBP")
IMAGE_KINDS = ("jpg", "jpeg", "png", "webp")  # file extensions, in order of preference where a sample has several
MAX_PIXELS = 1 << 26  # the default limit: 200 MB as RGB
PILLOW_PIXELS = 178_956_970  # its own limit: twice Image.MAX_IMAGE_PIXELS
ORIENTATION = 0x0112  # EXIF tag; 1 to 8
SIDEWAYS = (5, 6, 7, 8)  # orientations that swap rows and columns
WHITE = (255, 255, 255)
SCALE = 2  # 45 dB PSNR to the full decoding after downsampling of photographs; 1 = 41 dB
MAX_READS = 1 << 18  # per file; more only where a file consists of tiny chunks, which Pillow handles one by one
MAX_SCANNED = 100 * MAX_PIXELS  # pixels × scans of a jpeg, whose scans each visit the whole image: 10 s at most
Result = TypeVar("Result")
Size = tuple[int, int]  # height, width


class BrokenSample(Exception):
    """A sample that cannot be used; the message says why."""


def decode_image(
    data: bytes, max_pixels: int, cover: Size | None = None, scale: int = SCALE, decoder: str = "pillow"
) -> tuple[Image.Image, Size]:
    """Decode an image to 8-bit RGB, as a viewer would show it. Returns it and its full (height, width).

    Transparent images are composited on white (the colors of transparent pixels are arbitrary); 16-bit gray is scaled
    to 8 bits; CMYK and palettes are converted; the first frame of an animation is used. The EXIF orientation is
    applied, which Guided-Diffusion does not do: captions describe images the right way up.

    max_pixels: maximum width × height, checked in the header, before anything is decoded.
    cover:      (height, width) that the image will be downsampled to cover. A jpeg is then decoded at 1/2, 1/4 or 1/8
                of its size as long as that is at least ``scale`` times as large: 1.5 to 2.5 times as fast, and at least
                40 dB PSNR to the full decoding after downsampling. None decodes at full size.
    decoder:    one of ``DECODERS``. simplejpeg, which must be installed, decodes plain jpegs, and Pillow all others.
                Both use libjpeg-turbo, and their pixels are the same.

    Raises BrokenSample for any other format, a truncated or damaged file, too many pixels, or a file that would take
    minutes to decode.
    """
    least = None if cover is None else (scale * cover[0], scale * cover[1])
    if decoder == "simplejpeg" and (plain := decode_plain_jpeg(data, max_pixels, MAX_SCANNED, least)):
        return Image.fromarray(plain[0]), plain[1]
    return _explained(lambda: _decode(data, max_pixels, least))


def image_size(data: bytes) -> Size:
    """The (height, width) that ``decode_image`` would give, from the header: ``data`` may end after it, except that of
    a webp. Raises BrokenSample when it is no image or cut within its header."""
    return _explained(lambda: _open(data)[1])


def _explained(read: Callable[[], Result]) -> Result:
    """``read()``, with BrokenSample for whatever it raises."""
    try:
        with warnings.catch_warnings():  # about odd EXIF data, large images, …: nobody here can fix those
            warnings.simplefilter("ignore")
            return read()
    except BrokenSample:
        raise
    except UnidentifiedImageError:
        raise BrokenSample("not a jpeg, png or webp") from None
    except Exception as error:  # Pillow's parsers raise nearly anything on damaged bytes
        reason = " ".join(str(error).split())
        raise BrokenSample(f"not a readable image: {reason:.200}") from error


class _File(io.BytesIO):
    """The bytes of an image, which can be read in a limited number of parts."""

    reads = 0

    def read(self, size=-1, /):
        self.reads += 1
        if self.reads > MAX_READS:
            raise BrokenSample(f"not a readable image: it consists of more than {MAX_READS:,} parts")
        return super().read(size)


def _open(data: bytes) -> tuple[Image.Image, Size, int | None]:
    """The image, not decoded yet, its (height, width) the right way up, and its EXIF orientation."""
    image = Image.open(_File(data), formats=FORMATS)
    image.decodermaxblock = len(data)  # else Pillow hands a jpeg to libjpeg in parts, and copies what is left of each
    orientation = image.getexif().get(ORIENTATION) if "exif" in image.info else None
    width, height = image.size
    return image, ((width, height) if orientation in SIDEWAYS else (height, width)), orientation


def _decode(data: bytes, max_pixels: int, least: Size | None) -> tuple[Image.Image, Size]:
    image, full, orientation = _open(data)
    width, height = image.size
    if width * height > max_pixels:
        raise BrokenSample(f"too many pixels: {width} × {height}, where the limit is {max_pixels}")
    if image.info.get("progressive"):
        scans = data.count(SCAN)
        if scans * width * height > MAX_SCANNED:
            raise BrokenSample(f"not a readable image: a jpeg of {width} × {height} pixels in {scans:,} scans")
    if least is not None and image.format == "JPEG":
        rows, columns = least[::-1] if orientation in SIDEWAYS else least
        image.draft("RGB", (columns, rows))
    if orientation is not None:  # before the conversions, some of which lose the EXIF data
        image = ImageOps.exif_transpose(image)
    return _to_rgb(image), full


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB" and "transparency" not in image.info:
        image.load()
        return image
    if image.mode.startswith("I"):  # 16-bit gray: convert() would clip it at 255
        gray = np.asarray(image).astype(np.float32) / 257.0  # 65535 / 255
        return Image.fromarray(gray.round().clip(0, 255).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        background = Image.new("RGBA", image.size, (*WHITE, 255))
        return Image.alpha_composite(background, image).convert("RGB")
    return image.convert("RGB")
