import json

import numpy as np
import pytest
from file_server import serving
from PIL import Image
from shard_making import encoded, random_image

from diff_dalle.config import InputError
from diff_dalle.images.decode import MAX_PIXELS
from diff_dalle.images.files import (
    check_mask,
    fit_image,
    fit_mask,
    image_names,
    read_image,
    read_low_res,
    read_mask,
)
from diff_dalle.images.output import RECORD, sample_files, sweep_files, write_files
from diff_dalle.images.transforms import center_crop, center_crop_mask


def test_images_are_local_or_remote():
    with serving() as server:
        server.files["/a/cat.png"] = encoded(random_image(), "PNG")
        pixels = read_image(server.url("/a/cat.png"))
        np.testing.assert_array_equal(pixels, np.asarray(random_image()))
        assert pixels.dtype == np.uint8 and pixels.flags.writeable
        with pytest.raises(InputError, match=r"/a/dog\.png does not exist"):
            read_image(server.url("/a/dog.png"))


@pytest.mark.parametrize("read", [read_image, read_mask])
def test_files_that_cannot_be_used_are_named(tmp_path, read):
    side = int(MAX_PIXELS**0.5) + 1
    (tmp_path / "text.png").write_text("not an image")
    (tmp_path / "cut.jpg").write_bytes(encoded(random_image(90, 90))[:-200])
    (tmp_path / "huge.png").write_bytes(encoded(Image.new("1", (side, side)), "PNG"))
    (tmp_path / "empty.webp").write_bytes(b"")
    cases = {
        "text.png": "text.png cannot be used: not a picture of a known format",
        "cut.jpg": "cut.jpg cannot be used: not a readable image",
        "huge.png": f"huge.png cannot be used: too many pixels: {side} × {side}, where the limit is {MAX_PIXELS}",
        "empty.webp": "empty.webp cannot be used",
        "none.png": "none.png does not exist",
        "": "is a folder, not a file",
    }
    for name, message in cases.items():
        with pytest.raises(InputError, match=message) as caught:
            read(str(tmp_path / name))
        assert "--max_pixels" not in str(caught.value)


def picture(*channels) -> Image.Image:
    """[40, 40] of values, in L, RGB or RGBA."""
    arrays = [np.broadcast_to(np.asarray(channel), (40, 40)).astype(np.uint8) for channel in channels]
    return Image.fromarray(arrays[0] if len(arrays) == 1 else np.stack(arrays, -1))


SQUARE = np.zeros((40, 40), dtype=np.uint8)
SQUARE[10:30, 10:30] = 1
PHOTO = np.asarray(random_image(40, 40)).transpose(2, 0, 1) // 2 + 100
DRAWN = {
    "white brush on a transparent layer": picture(*3 * [255 * SQUARE], 255 * SQUARE),
    "alpha alone": picture(255, 255, 255, 255 * SQUARE),
    "half-transparent red brush": picture(220 * SQUARE, 30 * SQUARE, 30 * SQUARE, 120 * SQUARE),
    "hole in black": picture(0, 0, 0, 255 - 255 * SQUARE),
    "hole in gray": picture(200, 200, 200, 255 - 255 * SQUARE),
    "hole in a photo": picture(*PHOTO, 255 - 255 * SQUARE),
    "white on black with a hole": picture(
        *3 * [255 * (SQUARE * (np.arange(40) < 20))], 255 * (1 - SQUARE * (np.arange(40) >= 20))
    ),
    "red brush on black": picture(255 * SQUARE, 0, 0),
    "labels": picture(SQUARE),
    "1-bit": picture(255 * SQUARE).convert("1"),
    "labels in a palette": picture(SQUARE).quantize(2),
    "opaque": picture(*3 * [255 * SQUARE], 255),
    "grays": picture(127 + SQUARE),
}


@pytest.mark.parametrize("name", DRAWN)
def test_masks_as_people_draw_them(tmp_path, name):
    DRAWN[name].save(tmp_path / "mask.png")
    np.testing.assert_array_equal(read_mask(str(tmp_path / "mask.png")), SQUARE == 1)


def test_a_mask_of_everything_or_nothing_is_refused_unless_asked_for(tmp_path):
    path = str(tmp_path / "mask.png")
    everything = [picture(255), picture(255, 255, 255, 255), picture(1)]
    nothing = [picture(0), picture(5 * SQUARE), picture(0, 0, 0, 255)]
    cases = [*((image, True) for image in everything), *((image, False) for image in nothing)]
    for image, value in cases:
        image.save(path)
        words = "it inpaints the whole image" if value else "it inpaints nothing"
        with pytest.raises(InputError, match=rf"--mask .*mask.png cannot be used: {words}.*set whole_mask to True"):
            read_mask(path, "--mask")
        assert (read_mask(path, whole=True) == value).all()


def test_the_images_of_a_folder_are_sorted_by_name(tmp_path):
    for name in ("b.PNG", "10.webp", "a.jpg", "2.jpeg"):
        (tmp_path / name).write_bytes(encoded(random_image(), {"b": "PNG", "1": "WEBP"}.get(name[0], "JPEG")))
    for name in ("notes.txt", ".hidden.png", "c.svg", "png"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "d.png").write_bytes(encoded(random_image(), "PNG"))
    (tmp_path / "folder.png").mkdir()
    assert image_names(str(tmp_path)) == ["10.webp", "2.jpeg", "a.jpg", "b.PNG"]
    names, pixels = read_low_res(str(tmp_path))
    assert names == image_names(str(tmp_path)) and pixels.shape == (4, 20, 24, 3) and pixels.dtype == np.uint8
    for name, one in zip(names, pixels, strict=True):
        np.testing.assert_array_equal(one, read_image(str(tmp_path / name)))


def test_samples_are_read_back_without_their_grid(tmp_path):
    images = np.stack([np.asarray(random_image(16, 16, seed)) for seed in range(3)])
    write_files(str(tmp_path), sample_files(images, ["one", "two", "three"], [0, 1, 2]))
    names, pixels = read_low_res(str(tmp_path))
    assert names == ["000000.png", "000001.png", "000002.png"]
    np.testing.assert_array_equal(pixels, images)
    (tmp_path / RECORD).unlink()
    assert image_names(str(tmp_path)) == [*names, "grid.jpg"]


def test_a_second_run_leaves_nothing_of_the_first(tmp_path, caplog):
    """And nothing of what others have put there; labels are in the array, where Guided-Diffusion has them."""
    images = np.stack([np.asarray(random_image(16, 20, seed)) for seed in range(3)])
    texts = ["one", "two", "three"], [4, 5, 6]
    write_files(str(tmp_path), sweep_files({"scale_0": images, "scale_-1.5": images[::-1]}, *texts))
    sweep = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert {"grid.jpg", "scale_-1.5/samples_3x16x20x3.npz", "scale_0/000002.png"} < sweep and len(sweep) == 14
    others = ("scale_0/own.png", "000007.png", "notes.txt")
    for name in others:
        (tmp_path / name).write_bytes(b"mine")
    write_files(str(tmp_path), sample_files(images, *texts, labels=[7, 8, 9]))
    files = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    own = {"000000.png", "000001.png", "000002.png", "captions.txt", "grid.jpg", "samples_3x16x20x3.npz", RECORD}
    assert files == {*others, *own} and (tmp_path / "000007.png").read_bytes() == b"mine"
    found = np.load(tmp_path / "samples_3x16x20x3.npz")
    assert found.files == ["arr_0", "arr_1"] and found["arr_1"].tolist() == [7, 8, 9]
    np.testing.assert_array_equal(found["arr_0"], images)
    with Image.open(tmp_path / "grid.jpg") as grid:
        assert grid.format == "JPEG" and all(layer[1:3] == (1, 1) for layer in grid.layer)  # no chroma subsampling
        assert np.asarray(grid.quantization[0]).max() < 16  # quality 95
    (tmp_path / "files").mkdir()
    (tmp_path / RECORD).write_text(
        json.dumps({"files": ["notes.txt", "../x.png", "files/../000007.png", "000001.png"]})
    )
    write_files(str(tmp_path), sample_files(images[:1], ["one"], [4]))
    assert (tmp_path / "notes.txt").exists() and (tmp_path / "000007.png").exists()
    assert not (tmp_path / "000001.png").exists() and (tmp_path / "000002.png").exists()
    (tmp_path / RECORD).write_text("[1")
    write_files(str(tmp_path), sample_files(images, *texts))  # what was sampled is not lost
    assert "samples.json is damaged" in caplog.text and image_names(str(tmp_path))[-1] == "000007.png"


def test_an_interrupted_run_is_cleared_by_the_next(tmp_path):
    images = np.zeros((3, 8, 8, 3), dtype=np.uint8)

    def fail(file):
        raise OSError("the disk is full")

    with pytest.raises(OSError):
        write_files(str(tmp_path), sample_files(images, [""] * 3, range(3)) | {"grid.jpg": fail})
    assert (tmp_path / "000002.png").exists()
    write_files(str(tmp_path), sample_files(images[:1], [""], [0]))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("000000.png", "captions.txt", "grid.jpg", RECORD, "samples_1x8x8x3.npz"),
    ]


def test_folders_without_images_are_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("")
    for folder, message in {
        "": r"low_res_dir .* holds no images \(\.jpg, \.jpeg, \.png, \.webp, .*…\)",
        "none": "low_res_dir .*none does not exist",
        "notes.txt": r"low_res_dir .*notes\.txt is not a folder",
    }.items():
        with pytest.raises(InputError, match=message):
            read_low_res(str(tmp_path / folder))


def test_folders_with_a_broken_image_or_several_sizes_are_refused(tmp_path):
    for name, size in {"a": (20, 24), "b": (20, 24), "c": (24, 20), "d": (8, 8)}.items():
        random_image(*size).save(tmp_path / f"{name}.png")
    with pytest.raises(InputError, match=r"but a\.png has 24 × 20 pixels and c\.png 20 × 24 pixels"):
        read_low_res(str(tmp_path))
    (tmp_path / "b.png").write_bytes(b"not an image")
    with pytest.raises(InputError, match=r"b\.png cannot be used: not a picture of a known format"):
        read_low_res(str(tmp_path))


@pytest.mark.parametrize("size", [(64, 64), (130, 97), (40, 90), (7, 9)], ids=str)
def test_images_are_fitted_as_training_images_are(size):
    image = random_image(*size)
    fitted = fit_image(np.asarray(image), (32, 48))
    assert fitted.dtype == np.uint8 and fitted.flags.writeable
    np.testing.assert_array_equal(fitted, center_crop(image, size, (32, 48)))
    np.testing.assert_array_equal(fit_image(np.asarray(image), size), np.asarray(image))
    mask = np.asarray(image)[..., 0] > 200
    np.testing.assert_array_equal(fit_mask(mask, (32, 48)), center_crop_mask(mask, (32, 48)))


def test_images_that_are_too_narrow_are_refused():
    for fit, strip in ((fit_image, np.zeros((1, 9000, 3), np.uint8)), (fit_mask, np.zeros((1, 9000), bool))):
        with pytest.raises(InputError, match="an image of 9000 × 1 pixels is too narrow to be cropped to 64 × 32"):
            fit(strip, (32, 64))


def test_masks_of_another_size_than_their_image_are_refused():
    check_mask(np.zeros((20, 30), bool), np.zeros((20, 30, 3), np.uint8))
    with pytest.raises(InputError, match="mask has 30 × 20 pixels, but must have the size of its image, 20 × 30"):
        check_mask(np.zeros((20, 30), bool), np.zeros((30, 20, 3), np.uint8))


@pytest.mark.parametrize("mask", [np.zeros((20, 30, 3), bool), np.zeros((20, 30), np.uint8)])
def test_masks_are_boolean_and_have_two_dimensions(mask):
    with pytest.raises(InputError, match=r"mask is (bool|uint8) of shape \[20, 30.*\], but must be bool \[H, W\]"):
        check_mask(mask, np.zeros((20, 30, 3), np.uint8))
