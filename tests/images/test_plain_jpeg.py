"""JPEGs by simplejpeg have Pillow's pixels, and Pillow decodes or refuses what is not plain."""

import importlib.util
import io

import numpy as np
import pytest
from PIL import Image, ImageFile
from shard_making import encoded, random_image

from diff_dalle.config import InputError
from diff_dalle.images import decode
from diff_dalle.images.decode import BrokenSample, decode_image

pytestmark = pytest.mark.skipif(importlib.util.find_spec("simplejpeg") is None, reason="simplejpeg is missing")
LIMIT = 1 << 20


@pytest.fixture(autouse=True, scope="module")
def room_for_noise():
    """Pillow writes a progressive file as one block, for which it expects fewer bytes than pixels; noise takes more."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ImageFile, "MAXBLOCK", LIMIT)
        yield


def both(data: bytes, cover=None, scale: int = 2) -> list[tuple[np.ndarray, tuple[int, int]]]:
    found = [decode_image(data, LIMIT, cover, scale, decoder) for decoder in decode.DECODERS]
    return [(np.asarray(image), full) for image, full in found]


def assert_same(data: bytes, cover=None, scale: int = 2) -> None:
    (pillow, size), (ours, own_size) = both(data, cover, scale)
    np.testing.assert_array_equal(pillow, ours)
    assert size == own_size


@pytest.mark.parametrize("seed", range(5))
def test_pixels_are_those_of_pillow(seed):
    """Of random sizes of up to 300 pixels a side, at every fraction, with every subsampling of colors that Pillow
    writes."""
    draw = np.random.default_rng(seed)
    for number in range(30):
        sides = tuple(draw.integers(1, 301, 2) if number % 3 else draw.integers(1, 20, 2))
        image = random_image(*map(int, sides), seed=number)
        if draw.random() < 0.5:
            image = Image.fromarray(draw.integers(0, 256, (*sides, 3), dtype=np.uint8))
        gray, cover = draw.random() < 0.5, None if draw.random() < 0.3 else tuple(draw.integers(1, 71, 2).tolist())
        options = {"quality": int(draw.integers(5, 99)), "progressive": bool(draw.random() < 0.5)}
        options |= {} if gray else {"subsampling": ("4:4:4", "4:2:2", "4:2:0")[number % 3]}
        assert_same(encoded(image.convert("L") if gray else image, **options), cover, int(draw.integers(1, 4)))


@pytest.mark.parametrize("scale, sides", [(1, (75, 100)), (2, (150, 200)), (4, (300, 400))])
def test_the_scale_is_the_least_size_relative_to_the_target(scale, sides):
    data = encoded(random_image(300, 400))
    assert [pixels.shape[:2] for pixels, _ in both(data, (75, 100), scale)] == [sides, sides]


def plain(data: bytes, max_pixels: int = LIMIT, max_scanned: int = decode.MAX_SCANNED, least=None):
    return decode.decode_plain_jpeg(data, max_pixels, max_scanned, least)


def with_segment(data: bytes, marker: int, content: bytes) -> bytes:
    return data[:2] + bytes((0xFF, marker)) + (len(content) + 2).to_bytes(2, "big") + content + data[2:]


def test_plain_jpegs_do_not_reach_pillow(monkeypatch):
    monkeypatch.setattr(decode, "_decode", None)
    for options in ({}, {"progressive": True}, {"comment": b"hello"}, {"icc_profile": b"\xff\xda" * 300}):
        image, full = decode_image(encoded(random_image(80, 96), **options), LIMIT, (20, 20), decoder="simplejpeg")
        assert (image.size, full) == ((48, 40), (80, 96))


def test_pillow_decodes_what_is_not_plain():
    exif, photo = Image.Exif(), random_image(80, 96)
    exif[0x0112] = 6
    several = io.BytesIO()
    photo.save(several, "MPO", save_all=True, append_images=[random_image(80, 96, seed=1)])
    cases = {
        "EXIF": encoded(photo, exif=exif),
        "EXIF after a profile with any bytes": with_segment(encoded(photo, exif=exif), 0xE2, b"\xff\xda" * 300),
        "several": several.getvalue(),
        "CMYK": encoded(photo.convert("CMYK")),
        "RGB": encoded(photo, keep_rgb=True),
        "PNG": encoded(photo, "PNG"),
        "tiny": encoded(random_image(7, 7)),
        "fill bytes": (data := encoded(photo))[:2] + b"\xff\xff" + data[2:],
    }
    for name, data in cases.items():
        assert plain(data) is None, name
        assert_same(data, (20, 20))


def test_the_same_images_are_broken():
    data = encoded(random_image(80, 96), quality=90)
    middle = len(data) // 2
    cases = {
        "cut": data[:middle],
        "cut at the end": data[:-60],
        "header": data[:100],
        "no end marker": data[:-2],
        "damaged": data[:-40] + bytes(range(7, 39)) + data[-8:],
        "text": b"<html>",
        "empty": b"",
        "start": data[:2],
        "no length": data[:2] + b"\xff\xe0\x00\x00" + data[2:],
    }
    for name, bad in cases.items():
        results = []
        for decoder in decode.DECODERS:
            try:
                results.append(np.asarray(decode_image(bad, LIMIT, None, decoder=decoder)[0]).tolist())
            except BrokenSample as error:
                results.append(str(error))
        assert results[0] == results[1], name


def test_limits_are_those_of_pillow():
    data = encoded(random_image(80, 96), progressive=True)
    for decoder in decode.DECODERS:
        with pytest.raises(BrokenSample, match="too many pixels: 96 × 80"):
            decode_image(data, 96 * 80 - 1, decoder=decoder)
    scans = data.count(decode.SCAN)
    assert scans > 5 and plain(data, max_scanned=scans * 96 * 80) and plain(data, max_pixels=96 * 80)
    assert plain(data, max_scanned=scans * 96 * 80 - 1) is None and plain(data, max_pixels=96 * 80 - 1) is None
    assert plain(encoded(random_image(80, 96)) + 50 * decode.SCAN, max_scanned=96 * 80)  # one scan


def test_a_missing_simplejpeg_is_named(monkeypatch):
    monkeypatch.setattr(decode.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"decoder is simplejpeg.*pip install 'diff_dalle\[jpeg\]'"):
        decode.require_simplejpeg()
