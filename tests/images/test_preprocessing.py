"""Named transforms: torchvision's meaning, restated, and numbers that follow from purpose and position alone."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from PIL import Image
from shard_making import encoded, random_image

from diff_dalle.config import InputError, from_dict
from diff_dalle.images.decode import BrokenSample, decode_image
from diff_dalle.images.preprocessing import (
    ARGUMENTS,
    TransformConfig,
    decoding_cover,
    least_side,
    output_size,
    transform,
)
from diff_dalle.images.transforms import center_crop


def of(name: str, **settings) -> TransformConfig:
    return from_dict(TransformConfig, {"name": name, **settings})


def drawn(number: int):
    """Random numbers by purpose, and the purposes that were asked for."""
    asked = []

    def draw(purpose: str) -> float:
        asked.append(purpose)
        return float(np.random.default_rng([number, *purpose.encode()]).random())

    return draw, asked


def applied(image: Image.Image, *configs: TransformConfig, draws=None) -> Image.Image:
    return transform(image, (image.height, image.width), configs, draws)[0]


def ramp(height: int, width: int) -> Image.Image:
    """Red = row, green = column."""
    rows, columns = np.mgrid[:height, :width]
    return Image.fromarray(np.stack([rows, columns, 0 * rows], -1).astype(np.uint8))


def test_a_random_resized_crop_has_the_area_and_ratio_it_is_asked_for():
    config, areas, ratios = of("RandomResizedCrop", size=50, scale=[0.1, 0.5], ratio=[0.5, 2]), [], []
    for number in range(200):
        pixels = np.asarray(applied(ramp(200, 240), config, draws=drawn(number)[0])).astype(float)
        height, width = ((pixels[-1, -1] - pixels[0, 0])[:2] * 50 / 49).tolist()  # the slope of the ramp, inside
        assert pixels.shape == (50, 50, 3)
        areas.append(height * width / (200 * 240))
        ratios.append(width / height)
    assert 0.08 < min(areas) < 0.15 and 0.42 < max(areas) < 0.53
    assert 0.45 < min(ratios) < 0.65 and 1.6 < max(ratios) < 2.2
    assert abs(np.mean(areas) - 0.3) < 0.03 and abs(np.mean(np.log(ratios))) < 0.12


def test_a_crop_that_never_fits_is_the_largest_in_the_middle():
    for draws in (None, drawn(0)[0]):
        pixels = np.asarray(applied(ramp(40, 200), of("RandomResizedCrop", size=[40, 40], ratio=[1, 1]), draws=draws))
        if draws is None:
            assert pixels[0, 0, 0] == 0 and pixels[0, 0, 1] == 80 and pixels[-1, -1, 1] == 119
    config = of("RandomResizedCrop", size=40, scale=[1, 1], ratio=[1, 1])
    pixels = np.asarray(applied(ramp(40, 200), config, draws=drawn(0)[0]))
    assert pixels[0, 0, 1] == 80 and pixels[-1, -1, 1] == 119


@pytest.mark.parametrize(
    ("settings", "size", "expected"),
    [
        ({"size": 20}, (40, 100), (20, 50)), ({"size": 20}, (100, 40), (50, 20)),
        ({"size": [30, 10]}, (40, 100), (30, 10)),
        ({"size": 20, "max_size": 30}, (40, 100), (12, 30)), ({"size": 20, "max_size": 30}, (100, 40), (30, 12)),
        ({"size": 20, "max_size": 60}, (40, 100), (20, 50)), ({"size": 33}, (50, 50), (33, 33)),
    ],
)  # fmt: skip
def test_resize_keeps_the_aspect_unless_both_sides_are_given(settings, size, expected):
    found = applied(random_image(*size), of("Resize", **settings))
    assert (found.height, found.width) == expected


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "nearest"])
def test_resize_equals_pillow(interpolation):
    image = random_image(90, 70)
    plain = image.resize((35, 45), Image.Resampling[interpolation.upper()])
    assert np.array_equal(applied(image, of("Resize", size=[45, 35], interpolation=interpolation)), plain)


def test_crops_take_every_place_with_equal_chance_and_the_middle_without():
    image, config = ramp(30, 30), of("RandomCrop", size=[29, 28])
    corners = [np.asarray(applied(image, config, draws=drawn(n)[0]))[0, 0, :2].tolist() for n in range(120)]
    assert {tuple(each) for each in corners} == set(itertools.product(range(2), range(3)))
    assert np.asarray(applied(image, config))[0, 0, :2].tolist() == [0, 1]
    assert np.asarray(applied(image, of("CenterCrop", size=20), draws=drawn(0)[0]))[0, 0, :2].tolist() == [5, 5]


def test_a_picture_smaller_than_a_crop_is_enlarged():
    found = applied(random_image(20, 30), of("CenterCrop", size=[40, 30]))
    assert (found.height, found.width) == (40, 30)


@pytest.mark.parametrize(("name", "axis"), [("RandomHorizontalFlip", 1), ("RandomVerticalFlip", 0)])
def test_flips_have_their_probability_and_are_off_without_draws(name, axis):
    image = random_image(8, 8)
    flipped = np.flip(np.asarray(image), axis)
    found = [np.array_equal(applied(image, of(name, p=0.3), draws=drawn(n)[0]), flipped) for n in range(300)]
    assert abs(np.mean(found) - 0.3) < 0.09
    assert np.array_equal(applied(image, of(name, p=1.0)), image)
    assert np.array_equal(applied(image, of(name, p=1.0), draws=drawn(0)[0]), flipped)


def test_every_transform_has_draws_of_its_own():
    draw, asked = drawn(0)
    image = random_image(30, 30)
    applied(image, *[of("RandomCrop", size=20), of("RandomHorizontalFlip"), of("RandomCrop", size=10)], draws=draw)
    assert len(set(asked)) == len(asked) == 5


def test_sizes_are_known_before_any_picture():
    crop, resize, flip = of("RandomResizedCrop", size=[12, 16]), of("Resize", size=20), of("RandomHorizontalFlip")
    assert output_size([crop, flip]) == (12, 16) and output_size([crop, resize]) is None is output_size([flip])
    assert output_size([resize, of("CenterCrop", size=8), of("ToTensor")]) == (8, 8)
    assert least_side([crop, flip]) == 12 and least_side([resize]) == 20 and least_side([flip]) is None


@pytest.mark.parametrize("configs", [
    [of("RandomResizedCrop", size=32, scale=[0.5, 1])], [of("Resize", size=40), of("RandomCrop", size=32)],
    [of("RandomHorizontalFlip")], [of("Resize", size=[32, 32])], [of("CenterCrop", size=300), of("Resize", size=32)],
])  # fmt: skip
def test_decoding_at_a_fraction_changes_little(configs):
    data, size = encoded(random_image(517, 389), quality=95), (32, 32)
    results = []
    for cover in (None, decoding_cover(configs, size)):
        decoded, full = decode_image(data, 10**9, cover)
        results.append(center_crop(*transform(decoded, full, configs, drawn(1)[0]), size).astype(float))
    assert decoded.height < 517 or configs[0].name == "CenterCrop"
    assert 10 * math.log10(255**2 / max(np.mean((results[0] - results[1]) ** 2), 1e-9)) > 38


def test_a_picture_that_is_too_narrow_is_broken():
    with pytest.raises(BrokenSample, match="too narrow: 20000 × 1"):
        applied(Image.new("RGB", (20000, 1)), of("Resize", size=64))
    with pytest.raises(BrokenSample, match="too narrow"):
        applied(Image.new("RGB", (20000, 1)), of("CenterCrop", size=64))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "RandomResizeCrop"}, "did you mean RandomResizedCrop?"),
        ({"name": "Resize"}, "size is (), but Resize needs one or two numbers"),
        ({"name": "Resize", "size": [1, 2, 3]}, "size is 1,2,3, but Resize needs"),
        ({"name": "CenterCrop", "size": 0}, "size is 0, but CenterCrop needs"),
        ({"name": "CenterCrop", "size": 3, "scale": [0.5, 1]}, "scale is no argument of CenterCrop, which takes size"),
        ({"name": "ToTensor", "size": 3}, "size is no argument of ToTensor, which takes no arguments"),
        ({"name": "RandomResizedCrop", "size": 3, "scale": [0.5]}, "scale is 0.5, but must be two numbers"),
        ({"name": "RandomResizedCrop", "size": 3, "scale": [0.5, 1.5]}, "but a crop has at most the whole area, 1"),
        ({"name": "RandomResizedCrop", "size": 3, "ratio": [2, 1]}, "ratio is 2,1, but must be two numbers"),
        ({"name": "RandomHorizontalFlip", "p": 2}, "p is 2, but must be at least 0 and at most 1"),
        ({"name": "Resize", "size": 9, "max_size": 3}, "max_size is 3, but needs"),
        ({"name": "Resize", "size": 9, "interpolation": "cubic"}, "did you mean bicubic?"),
        ({"name": "Resize", "size": 9, "antialias": False}, "always resized with antialiasing"),
        ({"name": "RandomCrop", "size": 9, "padding": 3}, "padding is not supported"),
    ],
)
def test_bad_arguments_are_named(settings, message):
    with pytest.raises(InputError) as error:
        from_dict(TransformConfig, settings)
    assert message in str(error.value)


def test_every_argument_is_a_setting():
    names = {name for taken in ARGUMENTS.values() for name in taken}
    assert names | {"name"} == {field.name for field in dataclasses.fields(TransformConfig)}
