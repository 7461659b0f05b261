"""Pictures with color profiles come out in sRGB, as a viewer shows them."""

import importlib.util
import io
import zlib

import numpy as np
import pytest
from icc_making import cmyk_profile, gray_profile, rgb_profile
from PIL import Image, ImageCms, ImageOps
from png_making import png, with_chunk
from shard_making import encoded, random_image, tar_bytes

from diff_dalle.data.collection import collect
from diff_dalle.data.shard_table import IMAGE
from diff_dalle.data.shards import ShardFiles
from diff_dalle.data.spec import Required
from diff_dalle.data.survey import HEADERS
from diff_dalle.images import color, decode
from diff_dalle.images.decode import decode_image, decode_transparent, image_size, picture_facts

LIMIT = 1 << 20
WIDE = rgb_profile()
SRGB = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()


def decoded(data: bytes) -> np.ndarray:
    return np.asarray(decode_image(data, LIMIT)[0]).astype(int)


def shown(data: bytes) -> np.ndarray:
    """By littleCMS itself."""
    image = Image.open(io.BytesIO(data))
    source = ImageCms.ImageCmsProfile(io.BytesIO(image.info["icc_profile"]))
    return np.asarray(ImageCms.profileToProfile(image, source, ImageCms.createProfile("sRGB"), outputMode="RGB"))


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
def test_colors_of_a_profile_are_converted(form):
    options = {"lossless": True} if form == "WEBP" else {}
    data = encoded(random_image(), form, icc_profile=WIDE, **options)
    np.testing.assert_array_equal(decoded(data), shown(data))
    assert np.abs(decoded(data) - decoded(encoded(random_image(), form, **options))).max() > 8
    assert picture_facts(data).notes == ("color profile, converted to sRGB",)
    green = decoded(encoded(Image.new("RGB", (4, 4), (60, 180, 60)), "PNG", icc_profile=WIDE))
    assert np.abs(green[0, 0] - [0, 181, 42]).max() <= 1  # Adobe RGB (1998): its green is beyond sRGB's


def test_profiles_of_transparent_gray_palette_and_printed_pictures():
    opaque = decoded(encoded(random_image(), "PNG", icc_profile=WIDE))
    see_through = random_image().convert("RGBA")
    see_through.putpixel((3, 0), (9, 9, 9, 0))
    data = encoded(see_through, "PNG", icc_profile=WIDE)
    assert decoded(data)[0, 3].tolist() == [255] * 3
    np.testing.assert_array_equal(decoded(data)[1:], opaque[1:])
    alpha = np.asarray(decode_transparent(data, LIMIT))[..., 3]
    assert alpha[0, 3] == 0 and alpha.mean() > 254
    palette = random_image().quantize(64)
    same = encoded(palette.convert("RGB"), "PNG", icc_profile=WIDE)
    np.testing.assert_array_equal(decoded(encoded(palette, "PNG", icc_profile=WIDE)), decoded(same))
    gray = decoded(encoded(Image.new("L", (4, 4), 128), "PNG", icc_profile=gray_profile(1.0)))
    assert np.abs(gray - 188).max() <= 1  # half of the light: 0.735 in sRGB's curve
    inks = encoded(Image.new("CMYK", (8, 8), (255, 0, 0, 0)), quality=100, icc_profile=cmyk_profile())
    assert np.abs(decoded(inks) - 119).max() <= 3  # L* = 50.2; without the profile it would be cyan
    assert set(picture_facts(inks).notes) == {"color profile, converted to sRGB", "CMYK"}


def test_srgb_changes_nothing_and_an_unusable_profile_is_ignored():
    plain = decoded(encoded(random_image(), "PNG"))
    unusable = {"garbage": b"x" * 200, "cut": WIDE[:150], "of gray": gray_profile(1.0), "of inks": cmyk_profile()}
    for name, profile in {"sRGB": SRGB, **unusable}.items():
        data = encoded(random_image(), "PNG", icc_profile=profile)
        np.testing.assert_array_equal(decoded(data), plain, err_msg=name)
        notes = () if name == "sRGB" else ("color profile that cannot be used, ignored",)
        assert picture_facts(data).notes == notes
    assert color.conversion(SRGB, "RGB").transform is None and color.conversion(b"x", "RGB").note == color.IGNORED
    assert color.conversion(bytes(color.MAX_PROFILE + 1), "RGB").note == color.IGNORED


def test_a_picture_without_a_profile_is_not_converted(monkeypatch):
    monkeypatch.setattr(color, "conversion", lambda *_: pytest.fail("looked for a conversion"))
    for form in decode.FORMATS:
        decoded(encoded(random_image(), form))


@pytest.mark.skipif(importlib.util.find_spec("simplejpeg") is None, reason="simplejpeg is missing")
@pytest.mark.parametrize(
    ("profile", "is_plain"), [(None, True), (SRGB, True), (WIDE, False), (rgb_profile(filling=70_000), False)]
)
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_both_decoders_give_the_same_colors(profile, is_plain, mode):
    data = encoded(random_image(64, 64).convert(mode), icc_profile=profile)
    images = [np.asarray(decode_image(data, LIMIT, (8, 8), 2, name)[0]) for name in decode.DECODERS]
    np.testing.assert_array_equal(*images)
    assert (decode.decode_plain_jpeg(data, LIMIT, LIMIT, None) is not None) == is_plain


def test_16_bit_gray_and_colors_have_their_transparent_value():
    gray = np.full((4, 4), 65535, np.uint16)
    gray[0] = 20000
    gray[1] = 20001
    found = decoded(with_chunk(encoded(Image.fromarray(gray), "PNG"), b"tRNS", (20000).to_bytes(2, "big")))
    assert found[:2, 0, 0].tolist() == [255, 78]
    pixels = b"".join(b"\0" + (b"\x30\0\x60\0\x90\0" if row else b"\x20\0\x60\0\x90\0") * 2 for row in range(2))
    data = with_chunk(png(2, 2, pixels=pixels, bits=16), b"tRNS", b"\x20\0\x60\0\x90\0")
    assert decoded(data)[:, 0].tolist() == [[255] * 3, [0x30, 0x60, 0x90]]


def test_an_orientation_is_found_wherever_a_png_keeps_it(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8))
    upright, plain = np.asarray(noise.transpose(Image.Transpose.ROTATE_270)), encoded(noise, "PNG")
    body = exif.tobytes().removeprefix(b"Exif\0\0")
    digits = (b"Exif\0\0" + body).hex().encode()
    raw = (
        b"\nexif\n%8d\n" % (len(digits) // 2)
        + b"\n".join(digits[i : i + 72] for i in range(0, len(digits), 72))
        + b"\n"
    )
    late = with_chunk(plain, b"eXIf", body, b"IEND")
    for data in (late, with_chunk(plain, b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(raw))):
        np.testing.assert_array_equal(decoded(data), upright)
        assert "turned or mirrored by its EXIF data" in picture_facts(data).notes
        assert image_size(data) == (60, 40)
    damaged = late[:-20] + bytes((late[-20] ^ 1,)) + late[-19:]  # its checksum does not fit
    np.testing.assert_array_equal(decoded(damaged), np.asarray(noise))
    (tmp_path / "0.tar").write_bytes(tar_bytes([("0.png", late), ("1.png", plain)]))
    required = Required({IMAGE: "images"}, sizes=True)
    sizes = collect([str(tmp_path)], required, ShardFiles()).sizes
    assert len(late) > HEADERS[0] and sizes[0].tolist() == [[60, 40], [40, 60]]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_orientation_is_that_of_pillow(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(random_image(), "PNG", exif=exif)
    np.testing.assert_array_equal(decoded(data), np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data)))))
