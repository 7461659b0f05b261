"""Crops around what a saliency map finds."""

import sys
from importlib.metadata import EntryPoint

import numpy as np
import pytest
from PIL import Image
from shard_making import encoded, random_image, tar_bytes

from diff_dalle.config import InputError, registry
from diff_dalle.data.loader import DataConfig, Loader
from diff_dalle.data.spec import ImageSpec, SampleSpec
from diff_dalle.images.decode import BrokenSample
from diff_dalle.images.transforms import GROUP, smart_crop


def brightness(pixels: np.ndarray) -> np.ndarray:
    assert pixels.dtype == np.uint8 and min(pixels.shape[:2]) == 240
    return pixels.mean(2)[::8, ::8] / 255


def with_spot(height, width, top, left) -> Image.Image:
    pixels = np.zeros((height, width, 3), dtype=np.uint8)
    pixels[top : top + 16, left : left + 16] = 255
    return Image.fromarray(pixels)


@pytest.mark.parametrize(("height", "width"), [(64, 256), (256, 64)])
@pytest.mark.parametrize("place", [0, 60, 120, 200, 240])
def test_the_crop_lies_around_the_spot_and_inside_the_image(height, width, place):
    top, left = (24, place) if width > height else (place, 24)
    image = with_spot(height, width, top, left)
    crop = smart_crop(image, (height, width), (64, 64), brightness, None)
    assert crop.shape == (64, 64, 3)
    middle = np.argwhere(crop[..., 0] > 128).mean(0)
    expected = np.clip(place + 8, 32, 256 - 32)  # of the crop's center
    assert abs(middle[1 if width > height else 0] - (place + 8 - expected + 32)) < 6
    assert np.argwhere(crop[..., 0] > 128).size


def test_the_center_moves_with_chance_point_three():
    image = with_spot(64, 640, 24, 312)

    def shift(*uniforms):
        crop = smart_crop(image, (64, 640), (64, 320), brightness, uniforms)
        return 160 - np.argwhere(crop[..., 0] > 128).mean(0)[1]

    assert abs(shift(0.31, 0.0, 0.0)) < 6 and abs(shift(0.29, 0.5, 0.5)) < 6
    assert abs(shift(0.29, 0.5, 0.0) + 0.2 * 640) < 8 and abs(shift(0.29, 0.5, 0.999) - 0.2 * 640) < 8


@pytest.mark.parametrize(("second", "expected"), [(1.0, 96), (0.992, 96), (0.99, 0), (0.9, 0)])
def test_cells_near_the_maximum_count(second, expected):
    """Those above 75 % of it after a softmax with temperature .03, so at most .0086 below it."""
    pixels = np.zeros((64, 256, 3), dtype=np.uint8)
    pixels[:] = np.arange(256, dtype=np.uint8)[None, :, None]
    saliency = np.array([[1.0, 0, 0, 0, 0, 0, 0, second]])
    crop = smart_crop(Image.fromarray(pixels), (64, 256), (64, 64), lambda pixels: saliency, None)
    assert crop[0, 0, 0] == expected


def test_maps_of_any_size_count_and_others_are_refused():
    image = random_image(60, 90)
    everywhere = smart_crop(image, (60, 90), (32, 32), lambda pixels: np.ones((1, 1)), None)
    assert everywhere.shape == (32, 32, 3)
    for bad in (np.full((3, 3), np.nan), np.ones(4), np.ones((0, 3))):
        with pytest.raises(BrokenSample, match="saliency map"):
            smart_crop(image, (60, 90), (32, 32), lambda pixels, bad=bad: bad, None)


def test_the_loader_crops_by_an_installed_one(tmp_path, monkeypatch):
    """Without a saliency the spot at the edge is not in the middle; with it the crop shows it."""
    point = EntryPoint("bright", f"{__name__}:brightness", GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [point] if group == GROUP else [])
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])
    (tmp_path / "a.tar").write_bytes(tar_bytes([("a.png", encoded(with_spot(32, 128, 8, 112), "PNG"))]))
    spec = SampleSpec(ImageSpec((32, 32)))
    plain, bright, unknown = (
        DataConfig((str(tmp_path),), num_workers=0, saliency=name) for name in ("", "bright", "brigt")
    )
    found = Loader(bright, spec, augment=False).batch_at([0, 1]).images
    assert Loader(plain, spec).batch_at([0, 1]).images.max() < 0 < found.max()
    assert (Loader(plain, spec, saliency=brightness, augment=False).batch_at([0, 1]).images == found).all()
    assert (Loader(bright, spec).batch_at(range(40)).images != found[:1]).any()
    with pytest.raises(
        InputError, match=r"saliency is 'brigt', .*there are bright, opencv; did you mean bright.* center"
    ):
        Loader(unknown, spec)
    with pytest.raises(InputError, match="saliency and random_crop exclude each other"):
        DataConfig((str(tmp_path),), saliency="bright", random_crop=True)
