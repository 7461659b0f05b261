"""The pictures of a request: decoded within limits, and at once scaled to the images to sample."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

import numpy as np
from PIL import Image

from ..commands.serve import Limits
from ..config import Fault, InputError
from ..images.decode import FORMATS, BrokenSample, decode_image
from ..images.files import decode_mask
from ..images.output import png_bytes
from ..images.transforms import center_crop, center_crop_mask

Size = tuple[int, int]  # height, width


@dataclass(frozen=True, eq=False)
class Pictures:
    """The pictures of a wish, uint8 [H, W, 3] each: to edit, its mask (white = inpainted), and to control by."""

    init_image: np.ndarray | None = None
    mask: np.ndarray | None = None
    control_image: np.ndarray | None = None

    def given(self) -> dict[str, np.ndarray]:
        """Those that are there, by name."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: picture for name, picture in found.items() if picture is not None}

    def texts(self) -> dict[str, str]:
        """Those that are there as the API takes them: PNG files as base64 texts, by name."""
        return {name: base64_png(picture) for name, picture in self.given().items()}


PICTURES = tuple(each.name for each in fields(Pictures))


def png(image: np.ndarray) -> bytes:
    """A PNG file of uint8 [H, W, 3]."""
    return png_bytes(Image.fromarray(image))


def base64_png(image: np.ndarray) -> str:
    return base64.b64encode(png(image)).decode("ascii")


@contextlib.contextmanager
def _usable(name: str) -> Iterator[None]:
    """Raises InputError for a broken sample within."""
    try:
        yield
    except BrokenSample as error:
        raise InputError(Fault(name, f"cannot be used: {error}")) from None


def decode(data: bytes, name: str, limits: Limits) -> Image.Image:
    """A png, jpeg or webp as an RGB image. Raises InputError for anything else and for too many pixels."""
    with _usable(name):
        return decode_image(data, limits.picture_pixels)[0]


def cover(image: Image.Image, name: str, size: Size) -> np.ndarray:
    """Scaled to just cover ``size`` and cropped, as sampling would: uint8 [*size, 3]. Raises InputError if too
    narrow."""
    with _usable(name):
        return np.array(center_crop(image, (image.height, image.width), size))


def cover_mask(mask: np.ndarray, name: str, size: Size) -> np.ndarray:
    """A mask, bool [H, W], cut as ``cover`` cuts its picture: uint8 [*size, 3], white where it is True."""
    with _usable(name):
        cut = center_crop_mask(mask, size)
    return np.repeat(np.where(cut, 255, 0).astype(np.uint8)[:, :, None], 3, axis=2)


def read_pictures(files: Mapping[str, bytes], size: Size, limits: Limits) -> Pictures:
    """Pictures from the bytes of their files, by the names in ``PICTURES``, one after another.

    size: of the images that are sampled. Sampling would scale the pictures to it anyway; until then they wait in the
    queue, where a photograph takes a thousand times the memory.

    Raises InputError as ``decode`` and ``cover``, for a mask of another size than its picture, and for one that
    inpaints everything or nothing.
    """
    found: dict[str, np.ndarray] = {}
    full: dict[str, Size] = {}
    for name in PICTURES:
        if name not in files:
            continue
        if name != "mask":
            image = decode(files[name], name, limits)
            full[name] = (image.height, image.width)
            found[name] = cover(image, name, size)
            continue
        with _usable(name):
            mask = decode_mask(files[name], limits.picture_pixels, formats=FORMATS)
        rows, columns = mask.shape
        height, width = full.get("init_image", mask.shape)
        if (rows, columns) != (height, width):
            rule = f"has {columns} × {rows} pixels, but must have those of init_image, {width} × {height}"
            raise InputError(Fault(name, rule))
        found[name] = cover_mask(mask, name, size)
    return Pictures(**found)
