"""HEIC, as phones write it: read with the extra heic, upright and in size limits; named without it."""

import io
import json
import sys

import numpy as np
import pytest
from PIL import Image
from shard_making import encoded, random_image

from diff_dalle.commands.own_pictures import OwnPictures, make_plan
from diff_dalle.config import InputError
from diff_dalle.data.packing import PackingConfig, pack_folder
from diff_dalle.images import decode
from diff_dalle.images.decode import ALL_FORMATS, BrokenSample, decode_image, picture_facts

LIMIT = 1 << 20


@pytest.fixture
def heic() -> bytes:
    """Of 80 × 40 pixels, red in its upper left quarter, to be turned by 90 degrees to the right."""
    pillow_heif = pytest.importorskip("pillow_heif")
    pillow_heif.register_heif_opener(thumbnails=False)
    image = Image.new("RGB", (80, 40))
    image.paste((255, 0, 0), (0, 0, 40, 20))
    exif = image.getexif()
    exif[0x112] = 6
    buffer = io.BytesIO()
    image.save(buffer, "HEIF", exif=exif.tobytes(), quality=95)
    return buffer.getvalue()


@pytest.fixture
def without_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    decode._register_heif.cache_clear()
    yield
    decode._register_heif.cache_clear()


def test_it_is_read_upright(heic):
    image, full = decode_image(heic, LIMIT, formats=ALL_FORMATS)
    pixels = np.array(image, float)
    assert full == pixels.shape[:2] == (80, 40)
    expected = np.zeros((80, 40, 3))
    expected[:40, 20:, 0] = 255
    assert np.abs(pixels - expected).mean() < 3
    assert picture_facts(heic, ALL_FORMATS).format == "HEIF"


def test_its_size_is_limited_and_its_damage_named(heic):
    with pytest.raises(BrokenSample, match="too many pixels"):
        decode_image(heic, 80 * 40 - 1, formats=ALL_FORMATS)
    for length in (40, len(heic) - 20):
        with pytest.raises(BrokenSample, match="not a readable image"):
            decode_image(heic[:length], LIMIT, formats=ALL_FORMATS)


def test_shards_do_not_hold_it(heic):
    with pytest.raises(BrokenSample, match="not a jpeg, png or webp"):
        decode_image(heic, LIMIT)


def test_the_missing_extra_is_named(heic, without_extra, tmp_path):
    photos = tmp_path / "photos"
    photos.mkdir()
    (photos / "a cat.heic").write_bytes(heic)
    assert make_plan(str(photos), OwnPictures(), []).pack  # the folder holds a picture, packed or not
    with pytest.raises(InputError, match=r"skipped 1 file: a HEIC picture, .*pip install 'diff_dalle\[heic\]'"):
        pack_folder(PackingConfig(source=str(photos), out_dir=str(tmp_path / "out"), name_captions=True))
    (photos / "a dog.avif").write_bytes(encoded(random_image(), "AVIF"))  # Pillow's own, in the same container
    report = pack_folder(PackingConfig(source=str(photos), out_dir=str(tmp_path / "both"), name_captions=True))
    assert report["written"] == 1 and json.dumps(report).count("a cat.heic") == 1
