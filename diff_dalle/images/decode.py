"""Decoding of picture files to sRGB images, with a limit on the number of pixels: of png, jpeg and webp, which shards
hold, and of the other formats that people keep pictures in.

Plain JPEGs can be decoded by simplejpeg: Pillow's pixels for less work around the same library, libjpeg-turbo. Layout
of the file: ITU-T T.81, annex B.

The orientation that a camera wrote into a picture (Exif 3.0, tag 274) counts wherever the file keeps it. A png has it
in a chunk eXIf, which may follow the pixels (Portable Network Graphics 3.0, 11.3.4.6), or, written by ImageMagick, as
hexadecimal digits in a text. Pillow reads the former only together with the pixels.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import struct
import warnings
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, UnidentifiedImageError

from ..config import Fault, InputError
from .color import color_note, conversion, on_white, to_srgb

FRACTIONS = (8, 4, 2, 1)  # what libjpeg-turbo divides sides by at little cost, and Pillow's ``draft`` too
BLOCK = 8  # pixels, of the cosine transform
START, SCAN, BASELINE, PROGRESSIVE = b"\xff\xd8", b"\xff\xda", b"\xff\xc0", b"\xff\xc2"  # markers
# Tables (Huffman, quantization, restart interval), applications' data and comments.
TABLES = {bytes((0xFF, code)) for code in (0xC4, 0xDB, 0xDD, *range(0xE0, 0xF0), 0xFE)}
SPECIAL = (b"Exif\0\0", b"MPF\0")  # an orientation, or several images: Pillow reads them
PROFILE = b"ICC_PROFILE\0"  # and the number and count of the part that follows: ICC.1:2022, annex B.4


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
        elif at < content or marker not in TABLES or _is_special(data[content:at]):
            return 0
    return scans


def _is_special(segment: bytes) -> bool:
    """Whether it turns the image, announces others, or has a profile that changes colors, or a part of a profile."""
    if not segment.startswith(PROFILE):
        return segment.startswith(SPECIAL)
    number, profile = segment[len(PROFILE) :][:2], segment[len(PROFILE) + 2 :]
    return number != b"\1\1" or any(conversion(profile, mode).transform for mode in ("RGB", "L"))


DECODERS = ("pillow", "simplejpeg")
FORMATS = ("JPEG", "PNG", "WEBP")  # of images in shards
IMAGE_KINDS = ("jpg", "jpeg", "png", "webp")  # file extensions, in order of preference where a sample has several
#: What a user's own picture may be, beside HEIF, in Pillow's names. Each decoder is limited to the declared size.
ALL_FORMATS = (*FORMATS, "GIF", "BMP", "DIB", "TIFF", "PPM", "ICO", "JPEG2000", "AVIF", "TGA")
ALL_KINDS = (
    *IMAGE_KINDS,
    *("jpe", "jfif", "apng", "gif", "bmp", "dib", "tif", "tiff", "ppm", "pgm", "pbm", "pnm"),
    *("ico", "jp2", "j2k", "jpx", "avif", "tga", "heic", "heif"),
)
#: What a HEIF file names, in its first box, that holds HEVC: ISO/IEC 23008-12, annex B.
HEVC_BRANDS = {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx"}
MAX_BRANDS = 256  # bytes of that box that are looked at
MAX_PIXELS = 1 << 26  # the default limit: 200 MB as RGB
PILLOW_PIXELS = 178_956_970  # its own limit: twice Image.MAX_IMAGE_PIXELS
SCALE = 2  # 45 dB PSNR to the full decoding after downsampling of photographs; 1 = 41 dB
MAX_READS = 1 << 18  # per file; more only where a file consists of tiny chunks, which Pillow handles one by one
MAX_SCANNED = 100 * MAX_PIXELS  # pixels × scans of a jpeg, whose scans each visit the whole image: 10 s at most
NO_IMAGE = "not a jpeg, png or webp"
NO_PICTURE = "not a picture of a known format"
NO_HEIF = "a HEIC picture, which needs `pip install 'diff_dalle[heic]'`"
UNREADABLE = "not a readable image"
TOO_LARGE = "too many pixels"
Size = tuple[int, int]  # height, width
ORIENTATION = 0x0112  # the tag
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
SIDEWAYS = (5, 6, 7, 8)  # orientations that swap rows and columns
EXIF_TEXT, EXIF_CHUNK = "Raw profile type exif", b"eXIf"  # of ImageMagick, and of the specification
MAX_CHUNK = 1 << 16  # bytes, of Exif data in a jpeg too
LATEST = 2 * MAX_CHUNK  # bytes from the end of a file where it is looked for
CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # by the type of color in the header of a png
WHOLE = ((0, 0, 1, 1),)
#: The passes of Adam7: the first column and row of each, and the steps between them (PNG specification, 8.2).
ADAM7 = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
MAX_UNPACKED = 1 << 20  # bytes at a time


class BrokenSample(Exception):
    """A sample that cannot be used; the message says why."""


def decode_image(
    data: bytes,
    max_pixels: int,
    cover: Size | None = None,
    scale: int = SCALE,
    decoder: str = "pillow",
    formats: Sequence[str] = FORMATS,
) -> tuple[Image.Image, Size]:
    """Decode an image to 8-bit sRGB, as a viewer would show it. Returns it and its full (height, width).

    Transparent images are composited on white (the colors of transparent pixels are arbitrary); 16-bit gray is scaled
    to 8 bits; CMYK and palettes are converted; the first frame of an animation is used. The EXIF orientation and the
    color profile are applied, which Guided-Diffusion does not do: captions describe images the right way up.

    max_pixels: maximum width × height, checked in the header, before anything is decoded.
    cover:      (height, width) that the image will be downsampled to cover. A jpeg is then decoded at 1/2, 1/4 or 1/8
                of its size as long as that is at least ``scale`` times as large: 1.5 to 2.5 times as fast, and at least
                40 dB PSNR to the full decoding after downsampling. None decodes at full size.
    decoder:    one of ``DECODERS``. simplejpeg, which must be installed, decodes plain jpegs, and Pillow all others.
                Both use libjpeg-turbo, and their pixels are the same.
    formats:    those that are decoded: ``FORMATS`` or ``ALL_FORMATS``.

    Raises BrokenSample for any other format, a truncated or damaged file, too many pixels, or a file that would take
    minutes to decode.
    """
    least = None if cover is None else (scale * cover[0], scale * cover[1])
    if decoder == "simplejpeg" and (plain := decode_plain_jpeg(data, max_pixels, MAX_SCANNED, least)):
        return Image.fromarray(plain[0]), plain[1]
    with _explained():
        image, full = _decode(data, max_pixels, least, formats)
    return on_white(image), full


def decode_transparent(data: bytes, max_pixels: int, formats: Sequence[str] = FORMATS) -> Image.Image:
    """``decode_image`` at full size, of mode RGBA where the image has transparency, else RGB."""
    with _explained():
        return _decode(data, max_pixels, None, formats)[0]


@dataclass(frozen=True)
class Facts:
    """What decoding a picture changes.

    format:   Pillow's name of its format; MPO is a jpeg with several pictures.
    animated: whether it has several frames or pages, of which the first is used.
    notes:    for people, how it is made 8-bit sRGB.
    """

    format: str
    animated: bool
    notes: tuple[str, ...]


def picture_facts(data: bytes, formats: Sequence[str] = FORMATS) -> Facts:
    """About a picture, from its header. Raises BrokenSample when it is none."""
    with _explained():
        image, _, orientation = _open(data, formats)
        found, animated = str(image.format), image.format != "MPO" and getattr(image, "is_animated", False)
        notes = {
            color_note(image): True,
            "CMYK": image.mode == "CMYK",
            "16-bit gray": image.mode.startswith("I"),
            "turned or mirrored by its EXIF data": orientation not in (None, 1),
            "transparent, on white": image.has_transparency_data,
            "several frames or pages, of which the first is used": animated,
        }
    return Facts(found, animated, tuple(note for note, applies in notes.items() if note and applies))


def image_size(data: bytes) -> Size:
    """The (height, width) that ``decode_image`` would give, from the header: ``data`` may end after it, except that of
    a webp. Raises BrokenSample when it is no image or cut within its header."""
    with _explained():
        return _open(data, FORMATS)[1]


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """BrokenSample for whatever is raised within."""
    try:
        with warnings.catch_warnings():  # about odd EXIF data, large images, …: nobody here can fix those
            warnings.simplefilter("ignore")
            yield
    except BrokenSample:
        raise
    except Exception as error:  # Pillow's parsers raise nearly anything on damaged bytes
        reason = " ".join(str(error).split())
        raise BrokenSample(f"{UNREADABLE}: {reason:.200}") from error


class _File(io.BytesIO):
    """The bytes of an image, which can be read in a limited number of parts."""

    reads = 0

    def read(self, size=-1, /):
        self.reads += 1
        if self.reads > MAX_READS:
            raise BrokenSample(f"{UNREADABLE}: it consists of more than {MAX_READS:,} parts")
        return super().read(size)


def _is_heif(data: bytes) -> bool:
    """Whether it says that it holds HEVC, of which Pillow itself reads none."""
    first = data[4 : min(int.from_bytes(data[:4], "big"), MAX_BRANDS)]
    return first.startswith(b"ftyp") and any(first[at : at + 4] in HEVC_BRANDS for at in range(4, len(first), 4))


@functools.cache
def _register_heif() -> None:
    """Make Pillow read HEIF. BrokenSample without the extra heic."""
    try:
        from pillow_heif import register_heif_opener
    except ImportError:
        raise BrokenSample(NO_HEIF) from None
    register_heif_opener(thumbnails=False)


def _open(data: bytes, formats: Sequence[str]) -> tuple[Image.Image, Size, int | None]:
    """The image, not decoded yet, its (height, width) the right way up, and its EXIF orientation."""
    is_heif = formats != FORMATS and _is_heif(data)
    if is_heif:
        _register_heif()
    try:
        image = Image.open(_File(data), formats=("HEIF",) if is_heif else tuple(formats))
    except UnidentifiedImageError:
        if is_heif:
            raise BrokenSample(f"{UNREADABLE}: a damaged HEIC") from None
        raise BrokenSample(NO_IMAGE if formats == FORMATS else NO_PICTURE) from None
    image.decodermaxblock = len(data)  # else Pillow hands a jpeg to libjpeg in parts, and copies what is left of each
    orientation = _orientation(image, data)
    width, height = image.size
    return image, ((width, height) if orientation in SIDEWAYS else (height, width)), orientation


def _decode(data: bytes, max_pixels: int, least: Size | None, formats: Sequence[str]) -> tuple[Image.Image, Size]:
    """The image, RGB or RGBA, and its full (height, width)."""
    image, full, orientation = _open(data, formats)
    width, height = image.size
    if width * height > max_pixels:
        raise BrokenSample(f"{TOO_LARGE}: {width} × {height}, where the limit is {max_pixels}")
    if image.info.get("progressive"):
        scans = data.count(SCAN)
        if scans * width * height > MAX_SCANNED:
            raise BrokenSample(f"{UNREADABLE}: a jpeg of {width} × {height} pixels in {scans:,} scans")
    if least is not None and image.format == "JPEG":
        rows, columns = least[::-1] if orientation in SIDEWAYS else least
        image.draft("RGB", (columns, rows))
    converted = to_srgb(image)
    if image.format == "PNG" and not _is_complete(image, data):
        raise BrokenSample(f"{UNREADABLE}: its pixels end before its last row")
    found = converted.transpose(TURNS[orientation]) if orientation in TURNS else converted
    if image.format not in FORMATS:  # an icon, a turned tiff: only decoding tells the size
        full = found.height, found.width
    return found, full


def _orientation(image: Image.Image, data: bytes) -> int | None:
    """That of an opened picture, 1 to 8, or None. data: its file, or the beginning of it."""
    if "exif" in image.info or EXIF_TEXT in image.info:
        return image.getexif().get(ORIENTATION)
    if image.format == "PNG" and (exif := _late_exif(data)):
        found = Image.Exif()
        found.load(exif)
        return found.get(ORIENTATION)
    return None


def _late_exif(data: bytes) -> bytes:
    """The Exif data after the pixels of a png, from its file or the end of it; nothing without any."""
    at = data.rfind(EXIF_CHUNK, max(4, len(data) - LATEST))
    if at < 0:
        return b""
    start = at + len(EXIF_CHUNK)
    end = start + int.from_bytes(data[at - 4 : at], "big")
    is_chunk = end - start <= MAX_CHUNK and zlib.crc32(data[at:end]) == int.from_bytes(data[end : end + 4], "big")
    return data[start:end] if is_chunk else b""


def _is_complete(image: Image.Image, data: bytes) -> bool:
    """Whether the pixels of a decoded png are all there. Its stream may end early and be valid all the same; Pillow
    then leaves the other pixels at 0. Only one whose last row is 0, or an interlaced one, is unpacked again to see."""
    width, height = image.size
    if not image.info.get("interlace") and image.crop((0, height - 1, width, height)).getbbox():
        return True
    needed, stream = _bytes_of_pixels(data), zlib.decompressobj()
    for part in _pixel_chunks(data):
        while part and needed > 0:
            needed -= len(stream.decompress(part, MAX_UNPACKED))
            part = stream.unconsumed_tail
    return needed <= 0


def _bytes_of_pixels(data: bytes) -> int:
    """The number of bytes that the header of a png asks for: of each row its filter and its pixels."""
    width, height, bits, color, _, _, interlaced = struct.unpack(">IIBBBBB", data[16:29])
    total = 0
    for left, top, right, down in ADAM7 if interlaced else WHOLE:
        columns, rows = -(-(width - left) // right), -(-(height - top) // down)
        if columns > 0 and rows > 0:
            total += rows * (1 + -(-columns * bits * CHANNELS[color] // 8))
    return total


def _pixel_chunks(data: bytes) -> Iterator[bytes]:
    """The content of the chunks that hold the pixels of a png."""
    at = 8
    while at + 8 <= len(data):
        (size,), kind = struct.unpack(">I", data[at : at + 4]), data[at + 4 : at + 8]
        if kind == b"IDAT":
            yield data[at + 8 : at + 8 + size]
        at += size + 12
