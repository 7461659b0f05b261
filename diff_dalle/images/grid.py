"""Image grids with captions."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

MARGIN = 4
FONT_SIZE = 12
CELL = 96  # pixels up to which small images are upsampled; also the least width of a caption, for a few words a line
MAX_LINES = 5


def image_grid(
    images: np.ndarray, captions: Sequence[str] | None = None, columns: int | None = None, cell: int = CELL
) -> Image.Image:
    """An RGB image that shows all images, row by row, each with its caption wrapped below it.

    images: [N, H, W, 3] uint8. columns: None = a square grid. cell: images are upsampled (nearest neighbor) by the
    largest integer factor with which both sides have at most that many pixels; larger ones stay as they are.
    """
    images = np.asarray(images)
    if images.ndim != 4 or images.shape[-1] != 3 or images.dtype != np.uint8 or not len(images):
        raise ValueError(f"images must be [N, H, W, 3] uint8 with N > 0, not {list(images.shape)} {images.dtype}")
    if captions is not None and len(captions) != len(images):
        raise ValueError(f"there are {len(captions)} captions for {len(images)} images")
    columns = columns or math.ceil(math.sqrt(len(images)))
    rows = math.ceil(len(images) / columns)
    scale = max(1, cell // max(images.shape[1:3]))
    height, width = images.shape[1] * scale, images.shape[2] * scale
    font = ImageFont.load_default(FONT_SIZE)
    full = max(width, CELL) if captions is not None else width  # of an image with its caption
    texts = [_wrap(caption, font, full) for caption in captions or []]
    line = math.ceil(FONT_SIZE * 1.25)
    text_height = line * max((text.count("\n") + 1 for text in texts), default=0)
    step_x, step_y = full + MARGIN, height + text_height + MARGIN
    grid = Image.new("RGB", (columns * step_x + MARGIN, rows * step_y + MARGIN), "white")
    draw = ImageDraw.Draw(grid)
    for i, pixels in enumerate(images):
        left, top = MARGIN + i % columns * step_x, MARGIN + i // columns * step_y
        image = Image.fromarray(pixels).resize((width, height), Image.Resampling.NEAREST)
        grid.paste(image, (left + (full - width) // 2, top))
        if texts:
            draw.multiline_text((left, top + height), texts[i], "black", font, spacing=line - FONT_SIZE)
    return grid


def column_grid(columns: Sequence[np.ndarray]) -> np.ndarray:
    """A grid of columns of images, uint8 [rows, H, W, 3] each, as pixels."""
    rows = np.concatenate([*np.stack(columns, 1)])
    return np.asarray(image_grid(rows, columns=len(columns)))


def _wrap(text: str, font, width: int) -> str:
    """Wrap ``text`` to lines of at most ``width`` pixels; longer words are broken, lines beyond MAX_LINES dropped."""
    lines = [""]
    plain = unicodedata.normalize("NFKD", text)  # Pillow's built-in font has no accented letters
    for word in "".join(letter for letter in plain if not unicodedata.combining(letter)).split():
        joined = f"{lines[-1]} {word}".strip()
        if font.getlength(joined) <= width:
            lines[-1] = joined
            continue
        if lines[-1]:
            lines.append("")
        for letter in word:
            if font.getlength(lines[-1] + letter) > width:
                lines.append("")
            lines[-1] += letter
    if len(lines) > MAX_LINES:
        lines[MAX_LINES - 1] = lines[MAX_LINES - 1][:-1] + "…"
    return "\n".join(lines[:MAX_LINES])
