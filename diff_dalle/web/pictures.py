"""The pictures of a request: decoded within limits, and at once scaled to the images to sample; and the page's inputs
of them."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ..commands.serve import Limits
from ..config import Fault, InputError
from ..images.decode import FORMATS, BrokenSample, decode_image
from ..images.files import decode_mask
from ..images.output import png_bytes
from ..images.transforms import center_crop, center_crop_mask

Size = tuple[int, int]  # height, width
BRUSH = "#ff00ff"  # on white, its green tells it from what is not drawn
_DRAWN = 128  # brightness of the green channel below which something is drawn
_LAYERS = 4  # drawings over a picture, at most; the page makes one


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


def _data(file: bytes | Path, name: str) -> bytes:
    try:
        return file.read_bytes() if isinstance(file, Path) else file
    except OSError:
        raise InputError(Fault(name, "is no longer on the server: upload it again")) from None


def decode(file: bytes | Path, name: str, limits: Limits) -> Image.Image:
    """A png, jpeg or webp as an RGB image. Raises InputError for anything else, for too many pixels, and for a file
    that is no longer there."""
    with _usable(name):
        return decode_image(_data(file, name), limits.picture_pixels)[0]


def read_pictures(
    files: Mapping[str, bytes | Path], size: Size, limits: Limits, drawings: Sequence[Path] | None = None
) -> Pictures:
    """Pictures from files, by the names in ``PICTURES``, one after another.

    size:     of the images that are sampled. Sampling would scale the pictures to it anyway; until then they wait in
              the queue, where a photograph takes a thousand times the memory.
    drawings: over init_image, in place of a mask.

    Raises InputError as ``decode``, for a picture that is too narrow to be cropped to ``size``, for a mask of another
    size than its picture, and for one that inpaints everything or nothing.
    """
    found: dict[str, np.ndarray] = {}
    full: Size | None = None  # of init_image
    for name in ("init_image", "control_image"):
        if name not in files:
            continue
        image = decode(files[name], name, limits)
        if name == "init_image":
            full = (image.height, image.width)
        with _usable(name):
            found[name] = np.array(center_crop(image, (image.height, image.width), size))
    mask = None
    if drawings is not None and full is not None:
        mask = _drawn(drawings, full, limits)
    elif "mask" in files:
        with _usable("mask"):
            mask = decode_mask(_data(files["mask"], "mask"), limits.picture_pixels, formats=FORMATS)
    if mask is not None:
        (rows, columns), (height, width) = mask.shape, full or mask.shape
        if (rows, columns) != (height, width):
            rule = f"has {columns} × {rows} pixels, but must have those of init_image, {width} × {height}"
            raise InputError(Fault("mask", rule))
        with _usable("mask"):
            cut = center_crop_mask(mask, size)
        found["mask"] = np.repeat(np.where(cut, 255, 0).astype(np.uint8)[:, :, None], 3, axis=2)
    return Pictures(**found)


def _drawn(drawings: Sequence[Path], full: Size, limits: Limits) -> np.ndarray:
    """Where something is drawn over a picture of this size: bool [H, W]."""
    if len(drawings) > _LAYERS:
        raise InputError(f"the picture has {len(drawings)} drawings over it, but may have at most {_LAYERS}")
    drawn = np.zeros(full, dtype=bool)
    for file in drawings:
        strokes = np.asarray(decode(file, "mask", limits))
        if strokes.shape[:2] != full:
            raise InputError("the drawing has another size than the picture: draw it again")
        drawn |= strokes[:, :, 1] < _DRAWN  # transparent parts are white
    if not drawn.any():
        raise InputError("draw over the part of the picture that is to be inpainted, or choose another edit")
    return drawn


# ------------------------------------------------------------------------------------------------------------ the page


def picture_upload(label: str) -> Any:
    import gradio as gr

    return gr.Image(label=label, sources=["upload", "clipboard"], format="png")


def picture_editor(label: str) -> Any:
    import gradio as gr

    return gr.ImageEditor(
        label=label,
        sources=["upload", "clipboard"],
        format="png",
        transforms=[],
        layers=False,
        brush=gr.Brush(colors=[BRUSH], color_mode="fixed"),
    )


def editor_value(pictures: Pictures) -> dict[str, Any] | None:
    """What the editor shows so that the same pictures are read from it again."""
    if pictures.init_image is None:
        return None
    layers = []
    if pictures.mask is not None:
        color = [int(BRUSH[i : i + 2], 16) for i in (1, 3, 5)]
        drawn = pictures.mask[:, :, :1] > 0
        layers.append(np.where(drawn, np.array([*color, 255]), 0).astype(np.uint8))
    return {"background": pictures.init_image, "layers": layers, "composite": pictures.init_image}


@dataclass(frozen=True)
class PictureFiles:
    """Uploaded files, which are not decoded before the request has a place in the queue.

    files:    pictures, by the names in ``PICTURES``.
    drawings: over init_image, for a mask; None = no mask.
    """

    files: Mapping[str, Path] = field(default_factory=dict)
    drawings: Sequence[Path] | None = None

    @classmethod
    def of(cls, control: Any, editor: Any, inpaint: bool) -> PictureFiles:
        """What the values of the inputs say, as gradio has them before it decodes anything. inpaint: whether what is
        drawn is the mask."""
        editor = editor if isinstance(editor, dict) else {}
        files = {"init_image": _path(editor.get("background")), "control_image": _path(control)}
        drawings = [path for path in map(_path, editor.get("layers") or ()) if path] if inpaint else None
        return cls({name: path for name, path in files.items() if path}, drawings)

    def read(self, size: Size, limits: Limits) -> Pictures:
        """The pictures, scaled to the images to sample; size: of these. Raises InputError as ``read_pictures``, and
        where nothing is drawn to be inpainted."""
        return read_pictures(self.files, size, limits, self.drawings)


def _path(value: Any) -> Path | None:
    path = value.get("path") if isinstance(value, dict) else None
    return Path(path) if path and isinstance(path, str) else None
