"""Images that users name: read, checked, and resized to the resolution of a network; and inpainting masks as people
draw them: white on black, a brush on a transparent layer, holes in a picture, labels."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
from PIL import Image

from .. import storage
from ..config import Fault, InputError, named
from .decode import ALL_FORMATS, ALL_KINDS, MAX_PIXELS, BrokenSample, Size, decode_image, decode_transparent
from .output import recorded_files
from .transforms import center_crop, center_crop_mask

EXTENSIONS = tuple(f".{kind}" for kind in ALL_KINDS)
INPAINTED = 128  # minimum brightness, of the brightest channel, of a mask's pixel that is inpainted
SAME = 8  # levels by which the pixels of one color differ at most
GRAY = 64  # levels by which the channels of a color differ at least, else it is gray
EXTREME, SHARE = 32, 0.95  # levels from 0 or 255 within which this share of a picture in black and white is


def read_image(path: str, setting: str = "") -> np.ndarray:
    """Read a picture of any of ``ALL_FORMATS`` as a viewer would show it: uint8 [H, W, 3]; see ``decode_image``.

    path: local or remote. Raises InputError naming ``setting`` and it when the file does not exist or is not an image.
    """
    with _named(path, setting):
        return np.array(decode_image(storage.read_bytes(path), MAX_PIXELS, formats=ALL_FORMATS)[0])


def read_mask(path: str, setting: str = "", whole: bool = False) -> np.ndarray:
    """Read an inpainting mask: bool [H, W], True (inpainted) where the file is white or transparent, False where it is
    black, and as ``mask_of`` says for drawings on a transparent layer and labels.

    path: local or remote. whole: accept a mask that inpaints everything or nothing.
    Raises InputError naming ``setting`` and path when the file does not exist or is no such mask.
    """
    with _named(path, setting):
        return decode_mask(storage.read_bytes(path), MAX_PIXELS, whole)


@contextlib.contextmanager
def _named(path: str, setting: str) -> Iterator[None]:
    """Raises InputError naming both for what cannot be read within."""
    begin = f"{setting} " if setting else ""
    try:
        yield
    except WholeMask as error:
        remedy = f"if this is meant, set {named('whole_mask')} to True"
        raise InputError(f"{begin}{path} cannot be used: {error}; {remedy}") from error
    except BrokenSample as error:
        raise InputError(f"{begin}{path} cannot be used: {error}") from error
    except InputError as error:
        raise InputError(f"{begin}{error}") from error


def image_names(folder: str, setting: str = named("low_res_dir")) -> list[str]:
    """The sorted names of the pictures, of any of ``ALL_KINDS``, in a local or remote folder, without its subfolders.

    Of what sampling wrote there, the grids are left out: they repeat the other images.
    Raises InputError naming ``setting`` when there are none.
    """
    try:
        files = [storage.split(path)[1] for path in storage.list_files(folder)]
    except InputError as error:
        raise InputError(f"{setting} {error}") from error
    names = sorted(name for name in files if name.lower().endswith(EXTENSIONS))
    grids = {name for name in recorded_files(folder) if not name.removesuffix(".png").isdecimal()}
    names = [name for name in names if name not in grids]
    if not names:
        raise InputError(f"{setting} {folder} holds no images ({', '.join(EXTENSIONS[:8])}, …)")
    return names


def read_low_res(folder: str) -> tuple[list[str], np.ndarray]:
    """The names and pixels, uint8 [N, h, w, 3], of the images in a folder, in the order of ``image_names``.

    Raises InputError naming ``low_res_dir`` when there are none or their sizes differ, or naming a broken file.
    """
    names = image_names(folder)
    images: list[np.ndarray] = []
    for name in names:
        image = read_image(storage.join(folder, name), named("low_res_dir"))
        if images and image.shape != images[0].shape:
            sizes = f"{names[0]} has {_size(images[0])} and {name} {_size(image)}"
            raise InputError(Fault("low_res_dir", f"{folder} must hold images of one size, but {sizes}"))
        images.append(image)
    return names, np.stack(images)


def fit_image(image: np.ndarray, size: Size) -> np.ndarray:
    """Scale an image to just cover ``size`` and crop its center: uint8 [H, W, 3] → [height, width, 3].

    Downsampled as training images are, upsampled with the bicubic filter. Raises InputError when it is too narrow.
    """
    try:
        return np.array(center_crop(Image.fromarray(image), image.shape[:2], size))
    except BrokenSample:
        raise _too_narrow(image, size) from None


def fit_mask(mask: np.ndarray, size: Size) -> np.ndarray:
    """The part of a mask that belongs to ``fit_image`` of its image: bool [H, W] → [height, width].

    True where any part of the area that a pixel covers is to be inpainted. Raises InputError when it is too narrow.
    """
    try:
        return center_crop_mask(mask, size)
    except BrokenSample:
        raise _too_narrow(mask, size) from None


def check_mask(mask: np.ndarray, image: np.ndarray, setting: str = named("mask")) -> None:
    """Raise InputError naming ``setting`` unless a mask is bool [H, W], of the size of its image [H, W, 3]."""
    if mask.dtype != bool or mask.ndim != 2:
        raise InputError(f"{setting} is {mask.dtype} of shape {list(mask.shape)}, but must be bool [H, W]")
    if mask.shape != image.shape[:2]:
        raise InputError(f"{setting} has {_size(mask)}, but must have the size of its image, {_size(image)}")


def _size(image: np.ndarray) -> str:
    return f"{image.shape[1]} × {image.shape[0]} pixels"


def _too_narrow(image: np.ndarray, size: Size) -> InputError:
    return InputError(f"an image of {_size(image)} is too narrow to be cropped to {size[1]} × {size[0]}")


class WholeMask(BrokenSample):
    """A mask that inpaints everything or nothing."""


def decode_mask(data: bytes, max_pixels: int, whole: bool = False, formats: Sequence[str] = ALL_FORMATS) -> np.ndarray:
    """Decode a mask: bool [H, W], True = inpainted; see ``mask_of``.

    whole: accept one that inpaints everything or nothing. max_pixels, formats: as in ``decode_image``.
    Raises BrokenSample as ``decode_image``, and WholeMask.
    """
    pixels = np.asarray(decode_transparent(data, max_pixels, formats))
    mask = mask_of(pixels)
    if not whole and mask.all():
        raise WholeMask("it inpaints the whole image: no part of it is black or, in a transparent layer, empty")
    if not whole and not mask.any():
        brightest = int(pixels[..., :3].max())
        raise WholeMask(
            f"it inpaints nothing: no part of it is white or transparent, and the brightest value is {brightest} of 255"
        )
    return mask


def mask_of(pixels: np.ndarray) -> np.ndarray:
    """What a picture, uint8 [H, W, 3 or 4] (RGB or RGBA), says is to be inpainted: bool [H, W].

    Without transparency: what is white, or of any bright color; or what is 1, if this is the maximum (a label).
    With transparency: where everything opaque is of one color and this is white or no gray, it was drawn with a brush,
    and is the mask; otherwise what is transparent is the mask, together with what is white if the opaque part is in
    black and white.
    """
    brightness = pixels[..., :3].max(2)
    if pixels.shape[2] == 4 and pixels[..., 3].min() < pixels[..., 3].max():
        alpha = pixels[..., 3]
        opaque = alpha >= alpha.max() / 2
        colors = pixels[opaque][:, :3].astype(int)
        if (np.ptp(colors, axis=0) <= SAME).all() and _is_brush(colors.mean(0)):
            return opaque
        in_black_and_white = ((colors <= EXTREME) | (colors >= 255 - EXTREME)).mean() >= SHARE
        return ~opaque | (brightness >= INPAINTED) if in_black_and_white else ~opaque
    if brightness.max() == 1:
        return brightness == 1
    return brightness >= INPAINTED


def _is_brush(color: np.ndarray) -> bool:
    """Whether something of this color alone was drawn with a brush; else it is a plain black or gray picture."""
    return bool(color.min() >= 255 - SAME or np.ptp(color) >= GRAY)
