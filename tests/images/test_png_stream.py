"""A png whose stream ends early, but validly, is damaged."""

import io

import numpy as np
import pytest
from PIL import Image
from png_making import png

from diff_dalle.images import png_stream
from diff_dalle.images.decode import BrokenSample, decode_image

ROW = 1 + 3 * 8  # bytes of a row of 8 pixels


@pytest.mark.parametrize("rows", [0, 1, 4, 7, 7.9])
def test_pixels_that_end_early_are_damage(rows):
    with pytest.raises(BrokenSample, match="not a readable image"):
        decode_image(png(pixels=(b"\0" + b"\x80" * 24) * int(rows) + bytes(int(ROW * (rows % 1)))), 64)


@pytest.mark.parametrize("rows", [8, 9])
def test_black_pictures_are_whole(rows, monkeypatch):
    monkeypatch.setattr(png_stream, "BLOCK", 7)
    found, _ = decode_image(png(pixels=bytes(ROW * rows)), 64)
    assert not np.array(found).any()


def test_other_depths_and_colors():
    for mode in ("1", "L", "P", "LA", "RGBA", "I;16"):
        buffer = io.BytesIO()
        Image.new(mode, (9, 5)).save(buffer, "PNG")
        decode_image(buffer.getvalue(), 64)


def test_interlaced_pictures():
    """8 × 8 gray pixels in seven passes have 64 bytes and 15 filters."""
    whole = bytes(64 + 15)
    data = png(pixels=whole, colors=0)
    interlaced = data[:28] + b"\1" + data[29:]
    assert png_stream._bytes_of_pixels(interlaced) == len(whole)
    image = Image.new("L", (8, 8))
    image.info["interlace"] = 1
    assert png_stream.is_complete(image, interlaced)
    short = png(pixels=whole[:-1], colors=0)
    assert not png_stream.is_complete(image, short[:28] + b"\1" + short[29:])


def test_a_picture_with_a_last_row_is_not_unpacked_again(monkeypatch):
    monkeypatch.setattr(png_stream, "_has_bytes", lambda *_: pytest.fail("unpacked"))
    decode_image(png(pixels=bytes(ROW * 7) + b"\0" + b"\1" * 24), 64)
