"""Bytes of a png, jpeg or webp → an RGB image, with limits on what a file may ask for."""

from __future__ import annotations

import io
import warnings

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

FORMATS = ("JPEG", "PNG", "WEBP")
IMAGE_KINDS = ("jpg", "jpeg", "png", "webp")  # endings, in order of preference where a sample has several
MAX_PIXELS = 1 << 26  # what settings allow by default: 200 MB as RGB
ORIENTATION = 0x0112  # EXIF tag; 1 to 8, of which 5 to 8 swap rows and columns
WHITE = (255, 255, 255)


class BrokenSample(Exception):
    """A sample that cannot be used; the message says why."""


def decode_image(
    data: bytes, max_pixels: int, cover: tuple[int, int] | None = None
) -> tuple[Image.Image, tuple[int, int]]:
    """An 8-bit RGB image as a viewer would show it, and the (height, width) of it in full.

    Transparency is laid on white (what lies under it is arbitrary); 16-bit greys are scaled to 8; CMYK and palettes
    are converted; of an animation the first frame is taken. The orientation in the EXIF data is applied, which
    Guided-Diffusion does not do: captions describe pictures the right way up.

    max_pixels: width × height allowed, checked in the header, before anything is decoded.
    cover:      (height, width) that the image will be shrunk to cover. A jpeg is then decoded at 1/2, 1/4 or 1/8 of
                its size where that is still twice as large: 1.5 to 2.5 times as fast, and after shrinking at least
                40 dB alike. None decodes everything in full.

    Raises BrokenSample for anything else: an unknown format, a truncated or damaged file, too many pixels.
    """
    try:
        with warnings.catch_warnings():  # of what nobody here can mend: odd EXIF data, large pictures, …
            warnings.simplefilter("ignore")
            return _decode(data, max_pixels, cover)
    except BrokenSample:
        raise
    except UnidentifiedImageError:
        raise BrokenSample("not a jpeg, png or webp") from None
    except Exception as error:  # Pillow's parsers raise nearly anything on damaged bytes
        raise BrokenSample(f"not a readable image: {error}") from error


def _decode(data: bytes, max_pixels: int, cover: tuple[int, int] | None) -> tuple[Image.Image, tuple[int, int]]:
    image = Image.open(io.BytesIO(data), formats=FORMATS)
    width, height = image.size
    if width * height > max_pixels:
        raise BrokenSample(f"too many pixels: {width} × {height}, where --max_pixels allows {max_pixels}")
    orientation = image.getexif().get(ORIENTATION) if "exif" in image.info else None
    sideways = orientation in (5, 6, 7, 8)
    if cover is not None and image.format == "JPEG":
        rows, columns = cover[::-1] if sideways else cover
        image.draft("RGB", (2 * columns, 2 * rows))
    if orientation is not None:  # before the conversions, of which some lose the EXIF data
        image = ImageOps.exif_transpose(image)
    return _to_rgb(image), ((width, height) if sideways else (height, width))


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB" and "transparency" not in image.info:
        image.load()
        return image
    if image.mode.startswith("I"):  # 16-bit greys: convert() would clip them at 255
        grey = np.asarray(image).astype(np.float32) / 257.0  # 65535 / 255
        return Image.fromarray(grey.round().clip(0, 255).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        paper = Image.new("RGBA", image.size, (*WHITE, 255))
        return Image.alpha_composite(paper, image).convert("RGB")
    return image.convert("RGB")
