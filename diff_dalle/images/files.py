"""Pictures that a person names on the command line: read, checked, and brought to the size wanted."""

from __future__ import annotations

import numpy as np
from PIL import Image

from .. import storage
from ..errors import InputError
from .decode import IMAGE_KINDS, MAX_PIXELS, BrokenSample, decode_image
from .transforms import center_crop, center_crop_mask

ENDINGS = tuple(f".{kind}" for kind in IMAGE_KINDS)
PAINTED = 128  # brightness of a mask from which on a pixel is painted anew


def read_picture(path: str) -> np.ndarray:
    """A jpeg, png or webp as a viewer would show it, uint8 [H, W, 3]; see ``decode_image``.

    path: local or remote. InputError naming it when there is no such file, or no picture in it.
    """
    return np.array(_read(path))


def read_mask(path: str) -> np.ndarray:
    """Which part of a picture is to be painted anew, bool [H, W]: True where the file is white (a brightness of 128 or
    more of 255) or transparent, False where it is black.

    path: local or remote. InputError naming it when there is no such file, or no picture in it.
    """
    return np.asarray(_read(path).convert("L")) >= PAINTED


def _read(path: str) -> Image.Image:
    try:
        return decode_image(storage.read_bytes(path), MAX_PIXELS)[0]
    except BrokenSample as error:
        reason = str(error).replace("--max_pixels allows", "the limit is")  # that flag is one of training's
        raise InputError(f"{path} cannot be used: {reason}") from error


def picture_names(folder: str) -> list[str]:
    """The names of the png, jpeg and webp files in a local or remote folder, without those below, sorted.

    The ``grid.png`` that sampling puts beside its ``samples.npz`` is left out: it shows the others once more.
    InputError naming --low_res_dir when there are none.
    """
    try:
        files = [storage.split(path)[1] for path in storage.list_files(folder)]
    except InputError as error:
        raise InputError(f"--low_res_dir {error}") from error
    names = sorted(name for name in files if name.lower().endswith(ENDINGS))
    if "samples.npz" in files and "grid.png" in names:
        names.remove("grid.png")
    if not names:
        raise InputError(f"--low_res_dir {folder} holds no pictures ({', '.join(ENDINGS)})")
    return names


def read_low_res(folder: str) -> tuple[list[str], np.ndarray]:
    """The names and pixels, uint8 [N, h, w, 3], of the pictures in a folder, in the order of ``picture_names``.

    InputError naming --low_res_dir when there are none or they differ in size; one naming the file that is broken.
    """
    names, pictures = picture_names(folder), []
    for name in names:
        picture = read_picture(storage.join(folder, name))
        if pictures and picture.shape != pictures[0].shape:
            raise InputError(
                f"--low_res_dir {folder} must hold pictures of one size, but {names[0]} has {_size(pictures[0])} and "
                f"{name} {_size(picture)}"
            )
        pictures.append(picture)
    return names, np.stack(pictures)


def fit_picture(picture: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """The middle of a picture, scaled to just cover ``size``: uint8 [H, W, 3] → [height, width, 3].

    Shrunk as training images are, enlarged by the bicubic filter. InputError for a strip of it.
    """
    try:
        return np.array(center_crop(Image.fromarray(picture), picture.shape[:2], size))
    except BrokenSample:
        raise _too_narrow(picture, size) from None


def fit_mask(mask: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """The part of a mask that ``fit_picture`` shows of its picture: bool [H, W] → [height, width].

    True where any of the area that a pixel shows is to be painted anew. InputError for a strip.
    """
    try:
        return center_crop_mask(mask, size)
    except BrokenSample:
        raise _too_narrow(mask, size) from None


def check_mask(mask: np.ndarray, picture: np.ndarray, flag: str = "--mask") -> None:
    """InputError naming ``flag`` when a mask, [H, W], is of another size than its picture, [H, W, 3]."""
    if mask.shape[:2] != picture.shape[:2]:
        raise InputError(f"{flag} has {_size(mask)}, but must be of the size of its picture, {_size(picture)}")


def _size(picture: np.ndarray) -> str:
    return f"{picture.shape[1]} × {picture.shape[0]} pixels"


def _too_narrow(picture: np.ndarray, size: tuple[int, int]) -> InputError:
    return InputError(f"a picture of {_size(picture)} is too narrow to be cut to {size[1]} × {size[0]}")
