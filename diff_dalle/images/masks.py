"""Inpainting masks as people draw them: white on black, a brush on a transparent layer, holes in a picture, labels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .decode import ALL_FORMATS, BrokenSample, decode_transparent

INPAINTED = 128  # minimum brightness, of the brightest channel, of a mask's pixel that is inpainted
SAME = 8  # levels by which the pixels of one color differ at most
GRAY = 64  # levels by which the channels of a color differ at least, else it is gray
EXTREME, SHARE = 32, 0.95  # levels from 0 or 255 within which this share of a picture in black and white is


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
