"""The page's inputs of pictures, which are decoded within limits: gradio's own decoding has none.

Their ``preprocess`` is replaced in the instances, because gradio writes a file beside the source of every subclass.
"""

from pathlib import Path
from typing import Any

import numpy as np

from ..commands.serve import Limits
from .refusal import Refusal
from .wish import read_picture

BRUSH = "#ff00ff"  # on white, its green tells it from what is not drawn
_DRAWN = 128  # brightness of the green channel below which something is drawn


def picture_upload(limits: Limits, label: str) -> Any:
    """An input whose value is a picture, uint8 [H, W, 3], or None."""
    import gradio as gr

    upload: Any = gr.Image(label=label, sources=["upload", "clipboard"], format="png")
    upload.preprocess = lambda payload: _read(payload, limits)
    return upload


def picture_editor(limits: Limits, label: str) -> Any:
    """An input whose value is None, or a picture and what is drawn over it: uint8 [H, W, 3] and bool [H, W]."""
    import gradio as gr

    def preprocess(payload: Any) -> Any:
        if payload is None or (picture := _read(payload.background, limits)) is None:
            return None
        drawn = np.zeros(picture.shape[:2], dtype=bool)
        for layer in payload.layers:
            strokes = _read(layer, limits)
            if strokes is not None and strokes.shape != picture.shape:
                raise gr.Error("the drawing has another size than the picture: draw it again")
            if strokes is not None:
                drawn |= strokes[:, :, 1] < _DRAWN  # transparent parts are white
        return picture, drawn

    editor: Any = gr.ImageEditor(
        label=label,
        sources=["upload", "clipboard"],
        format="png",
        transforms=[],
        layers=False,
        brush=gr.Brush(colors=[BRUSH], color_mode="fixed"),
    )
    editor.preprocess = preprocess
    return editor


def mask_of(drawn: np.ndarray) -> np.ndarray:
    """bool [H, W] as a picture, uint8 [H, W, 3], white where it is True."""
    return np.repeat(np.where(drawn, 255, 0).astype(np.uint8)[:, :, None], 3, axis=2)


def _read(payload: Any, limits: Limits) -> np.ndarray | None:
    """The picture that gradio keeps in its folder of uploads, which is the only place it takes files from."""
    import gradio as gr

    if payload is None or not payload.path:
        return None
    try:
        return read_picture(Path(payload.path).read_bytes(), "the picture", limits)
    except Refusal as refusal:
        raise gr.Error(refusal.sentence) from None
