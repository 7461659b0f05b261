"""The page's inputs of pictures: the files that were uploaded, and what is drawn over them, decoded within limits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ..commands.serve import Limits
from ..config import InputError
from .pictures import Pictures, Size, cover, cover_mask, decode

BRUSH = "#ff00ff"  # on white, its green tells it from what is not drawn
_DRAWN = 128  # brightness of the green channel below which something is drawn
_LAYERS = 4  # drawings over a picture, at most; the page makes one


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
    """Paths of uploaded files, "" for none, which are not decoded before the request has a place in the queue.

    layers:  drawings over the background.
    inpaint: whether what is drawn is the mask.
    """

    control: str = ""
    background: str = ""
    layers: tuple[str, ...] = ()
    inpaint: bool = False

    def read(self, size: Size, limits: Limits) -> Pictures:
        """The pictures, scaled to the images to sample; size: of these. Raises InputError for what ``read_pictures``
        does, and where nothing is drawn to be inpainted."""
        found: dict[str, np.ndarray] = {}
        if self.background:
            picture = _open(self.background, "the picture", limits)
            full = (picture.height, picture.width)
            found["init_image"] = cover(picture, "the picture", size)
            if self.inpaint:
                found["mask"] = cover_mask(self._drawn(full, limits), "the drawing", size)
        if self.control:
            name = "the picture for the ControlNet"
            found["control_image"] = cover(_open(self.control, name, limits), name, size)
        return Pictures(**found)

    def _drawn(self, full: Size, limits: Limits) -> np.ndarray:
        if len(self.layers) > _LAYERS:
            raise InputError(f"the picture has {len(self.layers)} drawings over it, but may have at most {_LAYERS}")
        drawn = np.zeros(full, dtype=bool)
        for path in self.layers:
            strokes = np.asarray(_open(path, "the drawing", limits))
            if strokes.shape[:2] != full:
                raise InputError("the drawing has another size than the picture: draw it again")
            drawn |= strokes[:, :, 1] < _DRAWN  # transparent parts are white
        if not drawn.any():
            raise InputError("draw over the part of the picture that is to be inpainted, or choose another edit")
        return drawn


def picture_files(control: Any, editor: Any, inpaint: bool) -> PictureFiles:
    """What the values of the inputs say, as gradio has them before it decodes anything."""
    editor = editor if isinstance(editor, dict) else {}
    background, layers = _path(editor.get("background")), editor.get("layers") or ()
    return PictureFiles(_path(control), background, tuple(filter(None, map(_path, layers))), inpaint)


def _path(value: Any) -> str:
    path = value.get("path") if isinstance(value, dict) else None
    return path if isinstance(path, str) else ""


def _open(path: str, name: str, limits: Limits) -> Image.Image:
    try:
        data = Path(path).read_bytes()
    except OSError:
        raise InputError(f"{name} is no longer on the server: upload it again") from None
    return decode(data, name, limits)
