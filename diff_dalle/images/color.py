"""Decoded pictures of any mode → 8-bit sRGB: color profiles, transparency, 16 bits, palettes, CMYK.

A picture without a profile is sRGB. One with a profile (ICC.1:2022, embedded in the file) is converted by littleCMS
with the perceptual intent, as viewers do; a profile that cannot be read, or is for another kind of colors than the
picture has, is ignored.
"""

from __future__ import annotations

import functools
import io
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    from PIL.ImageCms import ImageCmsTransform

WHITE = (255, 255, 255)
PROFILE = "icc_profile"  # where Pillow keeps it in ``Image.info``
MAX_PROFILE = 1 << 22  # bytes; those of printers have at most two million
KEPT = 16  # conversions, each of up to 4 MB
LEVELS = (0, 51, 102, 153, 204, 255)  # of each channel, in the colors by which a profile is compared with sRGB
CONVERTED, IGNORED = "color profile, converted to sRGB", "color profile that cannot be used, ignored"


@dataclass(frozen=True)
class Conversion:
    """What a profile asks for: a transform to sRGB, or None, for sRGB itself (note "") and for a profile that is
    ignored."""

    transform: ImageCmsTransform | None
    note: str = ""


@functools.lru_cache(maxsize=KEPT)
def conversion(profile: bytes, mode: str) -> Conversion:
    """From the colors of a profile to sRGB, for pictures of ``mode``: "RGB", "L" or "CMYK"."""
    from PIL import ImageCms  # here, since few pictures need it

    try:
        if len(profile) > MAX_PROFILE:
            raise ValueError("too large")
        source, target = ImageCms.ImageCmsProfile(io.BytesIO(profile)), ImageCms.createProfile("sRGB")
        transform = ImageCms.buildTransform(source, target, mode, "RGB", ImageCms.Intent.PERCEPTUAL)
    except (ImageCms.PyCMSError, OSError, TypeError, ValueError):
        return Conversion(None, IGNORED)
    if mode == "CMYK":
        return Conversion(transform, CONVERTED)
    colors = np.stack(np.meshgrid(LEVELS, LEVELS, LEVELS), -1).reshape(1, -1, 3).astype(np.uint8)
    samples = Image.fromarray(colors).convert(mode)
    change = np.asarray(transform.apply(samples)).astype(int) - np.asarray(samples.convert("RGB"))
    if abs(change).max() <= 1:  # sRGB, whatever it is called
        return Conversion(None)
    return Conversion(transform, CONVERTED)


def color_note(image: Image.Image) -> str:
    """``CONVERTED`` or ``IGNORED`` for a picture whose profile is; "" for sRGB and for one without."""
    profile = image.info.get(PROFILE)
    return conversion(profile, _colors(image.mode)).note if profile else ""


def _colors(mode: str) -> str:
    """What a profile of a picture of this mode is about."""
    if mode == "CMYK":
        return mode
    return "L" if mode in ("1", "L", "LA", "La") or mode.startswith("I") else "RGB"


def to_srgb(image: Image.Image) -> Image.Image:
    """A decoded picture in 8-bit sRGB: of mode RGB, or RGBA where it has transparency.

    Raises ValueError for pixels whose range nobody knows: floating-point numbers.
    """
    profile = image.info.get(PROFILE)
    if image.mode == "RGB" and "transparency" not in image.info and not profile:
        image.load()
        return image
    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers, whose range is unknown")
    if image.mode.startswith("I"):
        image = _eight_bits(image)
    elif isinstance(color := image.info.get("transparency"), tuple) and max(color) > 255:
        image.info["transparency"] = tuple(value >> 8 for value in color)  # as Pillow does with 16-bit pixels
    transparent = image.has_transparency_data
    transform = conversion(profile, _colors(image.mode)).transform if profile else None
    if transform is None:
        return image.convert("RGBA" if transparent else "RGB")
    alpha = image.convert("RGBA").getchannel("A") if transparent else None
    image = transform.apply(image.convert(_colors(image.mode)))
    if alpha:
        image.putalpha(alpha)
    return image


def _eight_bits(image: Image.Image) -> Image.Image:
    """16-bit gray as 8-bit gray, with its transparent value, if it has one. Pillow's ``convert`` clips it at 255."""
    gray, transparent = np.asarray(image), image.info.get("transparency")
    scaled = (gray.astype(np.float32) / 257.0).round().clip(0, 255).astype(np.uint8)  # 65535 / 255
    if transparent is None:
        return Image.fromarray(scaled)
    alpha = np.where(gray == transparent, 0, 255).astype(np.uint8)
    return Image.merge("LA", (Image.fromarray(scaled), Image.fromarray(alpha)))


def on_white(image: Image.Image) -> Image.Image:
    """RGBA or RGB → RGB: composited on white, since the colors of transparent pixels are arbitrary."""
    if image.mode == "RGB":
        return image
    return Image.alpha_composite(Image.new("RGBA", image.size, (*WHITE, 255)), image).convert("RGB")
