import io
import tracemalloc
import zlib

import numpy as np
import pytest
from PIL import Image
from png_making import chunk, png
from shard_making import encoded, random_image

from diff_dalle.images import decode
from diff_dalle.images.decode import BrokenSample, decode_image

LIMIT = 1 << 20
GRAY = np.linspace(0, 65535, 32 * 32).reshape(32, 32).astype(np.uint16)


def pixels(data: bytes) -> np.ndarray:
    image, size = decode_image(data, LIMIT)
    assert image.mode == "RGB" and size == (image.height, image.width)
    return np.asarray(image).astype(int)


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
def test_plain_images_are_what_pillow_decodes(form):
    data = encoded(random_image(), form)
    np.testing.assert_array_equal(pixels(data), np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))


def test_a_large_jpeg_is_decoded_in_one_part(monkeypatch):
    """Pillow's parts have 64 KiB."""
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (300, 300, 3), dtype=np.uint8))
    data, read, sizes = encoded(noise, quality=95), decode._File.read, []

    def watch(file, size=-1):
        part = read(file, size)
        sizes.append(len(part))
        return part

    monkeypatch.setattr(decode._File, "read", watch)
    np.testing.assert_array_equal(pixels(data), np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))
    assert max(sizes) > len(data) - 1024 > 1 << 16


def test_every_mode_has_the_colors_that_a_viewer_shows():
    color = random_image(32, 32)
    exact = np.asarray(color).astype(int)
    palette = color.quantize(256)
    cases = {
        "gray": (color.convert("L"), np.asarray(color.convert("L").convert("RGB"))),
        "16-bit gray": (Image.fromarray(GRAY), np.repeat((GRAY / 257.0).round()[..., None], 3, 2)),
        "palette": (palette, np.asarray(palette.convert("RGB"))),
        "black and white": (color.convert("1"), np.asarray(color.convert("1").convert("RGB"))),
        "opaque": (color.convert("RGBA"), exact),
        "invisible": (Image.new("RGBA", (32, 32), (9, 9, 9, 0)), np.full((32, 32, 3), 255)),
        "half": (Image.new("LA", (32, 32), (0, 128)), np.full((32, 32, 3), 127)),
    }
    for name, (image, expected) in cases.items():
        np.testing.assert_allclose(pixels(encoded(image, "PNG")), expected, atol=1, err_msg=name)
    see_through = palette.copy()
    see_through.putpixel((0, 0), 3)
    assert pixels(encoded(see_through, "PNG", transparency=3))[0, 0].tolist() == [255] * 3
    cmyk = pixels(encoded(color.convert("CMYK"), quality=95))
    assert np.abs(cmyk - exact).mean() < 4


def test_the_first_frame_of_an_animation_is_used():
    first, second = random_image(seed=1), random_image(seed=2)
    for form, options in (("WEBP", {"lossless": True}), ("PNG", {})):
        data = encoded(first, form, save_all=True, append_images=[second], **options)
        np.testing.assert_array_equal(pixels(data), np.asarray(first))


@pytest.mark.parametrize("cover", [None, (8, 10), (20, 6)])  # in either, one side allows a smaller fraction
def test_exif_orientation_is_applied(cover):
    """A camera's sideways image: EXIF orientation 6, rotate clockwise; height and width are swapped."""
    exif = Image.Exif()
    exif[0x0112] = 6
    upright = random_image(80, 50)
    data = encoded(upright.rotate(90, expand=True), exif=exif, quality=95)
    image, size = decode_image(data, LIMIT, cover)
    assert size == (80, 50) and (image.height, image.width) == ((80, 50) if cover is None else (40, 25))
    expected = np.asarray(upright.resize(image.size)).astype(int)
    assert np.abs(np.asarray(image) - expected).mean() < 6


@pytest.mark.parametrize("form", ["PNG", "WEBP"])
@pytest.mark.parametrize("image", [Image.new("RGBA", (50, 80), (1, 2, 3, 99)), Image.fromarray(GRAY[:, :20])])
def test_exif_orientation_is_applied_to_converted_images(form, image):
    exif = Image.Exif()
    exif[0x0112] = 6
    assert pixels(encoded(image, form, exif=exif)).shape == (image.width, image.height, 3)


def test_jpegs_are_decoded_at_a_fraction_at_least_twice_as_large_as_the_target():
    data = encoded(random_image(256, 300))
    for cover, expected in {(64, 64): (128, 150), (32, 32): (64, 75), (16, 37): (64, 75), (65, 65): (256, 300)}.items():
        image, size = decode_image(data, LIMIT, cover)
        assert (image.height, image.width) == expected and size == (256, 300)


def test_too_large_and_damaged_files_are_refused():
    bomb = encoded(Image.new("1", (2000, 2000)), "PNG")
    whole = {form: encoded(random_image(64, 64, seed=3), form) for form in ("JPEG", "PNG", "WEBP")}
    cases = {bomb: "too many pixels: 2000 × 2000, where the limit is 1048576", b"": "not a jpeg, png or webp"}
    cases |= {encoded(random_image(), "BMP"): "not a jpeg, png or webp", b"<svg></svg>": "not a jpeg, png or webp"}
    cases |= {data[: len(data) // 2]: "not a" for data in whole.values()}
    cases |= {data[:100] + bytes(60) + data[160:]: "not a readable image" for data in (whole["PNG"],)}
    for data, reason in cases.items():
        with pytest.raises(BrokenSample, match=reason):
            decode_image(data, LIMIT)


def webp(width: int, height: int) -> bytes:
    """An animation whose header states another size than its frames have."""
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue")]
    data = bytearray(encoded(frames[0], "WEBP", save_all=True, append_images=frames[1:]))
    sizes = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    start = data.index(b"VP8X") + 12
    data[start : start + 6] = sizes
    return bytes(data)


def packed(kind: bytes, size: int, count: int = 1) -> bytes:
    """A png with chunks of so many zeros, compressed."""
    return png(extra=chunk(kind, b"x\0\0" + zlib.compress(bytes(size))) * count)


BOMBS = {
    "many pixels": lambda: png(30_000, 30_000, pixels=b""),
    "more pixels than Pillow opens": lambda: png(2**31 - 1, 2**31 - 1, pixels=b""),
    "no pixels": lambda: png(0, 8, pixels=b""),
    "a large animation": lambda: webp(16_000, 16_000),
    "an impossible animation": lambda: webp(1 << 24, 255),
    "a compressed profile": lambda: packed(b"iCCP", 64 << 20),
    "compressed text": lambda: packed(b"zTXt", 64 << 20),
    "much compressed text": lambda: packed(b"zTXt", 1 << 20, 80),
    "few pixels of many": lambda: png(64, 64, pixels=bytes(100)),
    "unknown bits": lambda: png(bits=3),
    "unknown colors": lambda: png(colors=5),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_broken_samples_that_take_little_memory(name):
    data = BOMBS[name]()
    tracemalloc.start()
    with pytest.raises(BrokenSample) as broken:
        decode_image(data, LIMIT)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 24 << 20 and len(str(broken.value)) < 300 and str(broken.value).isprintable()


def test_more_pixel_data_than_pixels_is_not_unpacked():
    assert pixels(png(pixels=bytes(32 << 20))).shape == (8, 8, 3)


@pytest.mark.parametrize("name", ["chunks", "segments", "junk between segments"])
def test_files_of_very_many_parts_are_not_read_to_their_end(name):
    """Pillow takes microseconds for each, so the largest files would take minutes."""
    jpeg = encoded(random_image())
    data = {
        "chunks": lambda: png(extra=chunk(b"abCd", b"") * 200_000),
        "segments": lambda: jpeg[:2] + b"\xff\xfe\0\2" * 100_000 + jpeg[2:],
        "junk between segments": lambda: jpeg[:20] + bytes(300_000) + jpeg[20:],
    }[name]()
    with pytest.raises(BrokenSample, match="consists of more than 262,144 parts"):
        decode_image(data, LIMIT)


def test_a_jpeg_of_very_many_scans_is_refused_by_their_number_and_size(monkeypatch):
    data = encoded(random_image(32, 32), progressive=True)
    scans = data.count(b"\xff\xda")
    last = data[data.rindex(b"\xff\xda") : -2]
    many = data[:-2] + 50 * last + data[-2:]
    assert pixels(many).shape == (32, 32, 3)
    monkeypatch.setattr(decode, "MAX_SCANNED", 1024 * (scans + 49))
    pixels(data)
    with pytest.raises(BrokenSample, match=f"32 × 32 pixels in {scans + 50} scans"):
        pixels(many)


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
def test_every_cut_and_many_flips_are_broken_samples_or_images(form):
    data = encoded(random_image(), form)
    generator = np.random.default_rng(0)
    cases = [data[:size] for size in range(0, len(data), 7)]
    for _ in range(100):
        flipped = bytearray(data)
        for place in generator.integers(0, len(data), 5):
            flipped[place] ^= 1 << generator.integers(8)
        cases.append(bytes(flipped))
    for case in cases:
        try:
            decode_image(case, LIMIT)
        except BrokenSample as broken:
            assert len(str(broken)) < 300


# ------------------------------------------------------------------- pngs whose stream ends early, but validly

ROW = 1 + 3 * 8  # bytes of a row of 8 pixels


@pytest.mark.parametrize("rows", [0, 1, 4, 7, 7.9])
def test_pixels_that_end_early_are_damage(rows):
    with pytest.raises(BrokenSample, match="not a readable image"):
        decode_image(png(pixels=(b"\0" + b"\x80" * 24) * int(rows) + bytes(int(ROW * (rows % 1)))), 64)


@pytest.mark.parametrize("rows", [8, 9])
def test_black_pictures_are_whole(rows, monkeypatch):
    monkeypatch.setattr(decode, "MAX_UNPACKED", 7)
    found, _ = decode_image(png(pixels=bytes(ROW * rows)), 64)
    assert not np.array(found).any()


def test_other_depths_and_colors():
    for mode in ("1", "L", "P", "LA", "RGBA", "I;16"):
        assert pixels(encoded(Image.new(mode, (9, 5)), "PNG")).shape == (5, 9, 3)


def interlaced(content: bytes, height: int = 7) -> bytes:
    """``height`` × 8 gray pixels."""
    data = png(height=height, pixels=content, colors=0)
    head = data[12:28] + b"\1"
    return data[:12] + head + zlib.crc32(head).to_bytes(4, "big") + data[33:]


def test_interlaced_pictures():
    """Seven passes have 56 bytes and 14 filters; the last row is in the sixth, before the last 27 bytes. 8 × 8 pixels
    have 64 bytes and 15 filters."""
    for height, size in ((7, 70), (8, 79)):
        whole = interlaced(bytes(size), height)
        assert decode._bytes_of_pixels(whole) == size and pixels(whole).max() == 0
        image = Image.new("L", (8, height))
        image.info["interlace"] = 1
        assert decode._is_complete(image, whole)
        assert not decode._is_complete(image, interlaced(bytes(size - 1), height))
    for missing in (9, 18):
        with pytest.raises(BrokenSample, match="its pixels end before"):
            pixels(interlaced(bytes(39) + b"\1" * 4 + bytes(27 - missing)))


def test_a_picture_with_a_last_row_is_not_unpacked_again(monkeypatch):
    monkeypatch.setattr(decode, "_bytes_of_pixels", lambda *_: pytest.fail("unpacked"))
    decode_image(png(pixels=bytes(ROW * 7) + b"\0" + b"\1" * 24), 64)
