import math
import random

import numpy as np
import pytest
from PIL import Image
from shard_making import encoded, picture

from diff_dalle.data.decode import BrokenSample, decode_image
from diff_dalle.data.transforms import center_crop, random_crop

SIZES = [(64, 64), (65, 64), (127, 128), (200, 131), (130, 333), (48, 50), (20, 30), (259, 517)]


def shrunk_plainly(image: Image.Image, side: int) -> np.ndarray:
    """What the two functions of Guided-Diffusion do, restated: halve by boxes, then bicubic to the shorter side."""
    width, height = image.size
    while min(width, height) // 2 >= side and min(width, height) >= 2 * side:
        width, height = width // 2, height // 2
        image = image.resize((width, height), Image.BOX)
    factor = side / min(width, height)
    return np.array(image.resize((round(width * factor), round(height * factor)), Image.BICUBIC))


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("side", [16, 31, 64])
def test_the_centre_crop_equals_guided_diffusion_bit_for_bit(size, side):
    image = picture(*size)
    plain = shrunk_plainly(image, side)
    top, left = (plain.shape[0] - side) // 2, (plain.shape[1] - side) // 2
    np.testing.assert_array_equal(center_crop(image, size, (side, side)), plain[top:, left:][:side, :side])


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_random_crop_equals_guided_diffusion_for_the_same_choices(size):
    image, side, source = picture(*size), 24, random.Random(1)
    choices = set()
    for _ in range(30):
        u = [source.random() for _ in range(3)]
        larger = range(math.ceil(side / 1.0), math.ceil(side / 0.8) + 1)
        plain = shrunk_plainly(image, larger[int(u[0] * len(larger))])
        tops, lefts = range(plain.shape[0] - side + 1), range(plain.shape[1] - side + 1)
        top, left = tops[int(u[1] * len(tops))], lefts[int(u[2] * len(lefts))]
        choices.add((plain.shape, top, left))
        np.testing.assert_array_equal(random_crop(image, size, (side, side), u), plain[top:, left:][:side, :side])
    assert len(choices) > 10


@pytest.mark.parametrize("target", [(16, 32), (40, 24), (31, 31)])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_any_target_is_covered_without_distortion(size, target):
    """A horizontal and a vertical ramp keep their slope ratio: the picture is not stretched."""
    rows, columns = np.mgrid[: size[0], : size[1]]
    scale = max(target[0] / size[0], target[1] / size[1])
    ramp = np.stack([rows, columns, 0 * rows], -1) * min(1.0, 255 / max(size))
    image = Image.fromarray(ramp.astype(np.uint8))
    for crop in (center_crop(image, size, target), random_crop(image, size, target, (0.99, 0.99, 0.99))):
        assert crop.shape == (*target, 3) and crop.dtype == np.uint8
    crop = center_crop(image, size, target).astype(float)
    slope = min(1.0, 255 / max(size)) / scale
    down = (crop[-2, :, 0] - crop[1, :, 0]).mean() / (target[0] - 3)
    across = (crop[:, -2, 1] - crop[:, 1, 1]).mean() / (target[1] - 3)
    assert down == pytest.approx(slope, rel=0.12, abs=0.08) and across == pytest.approx(slope, rel=0.12, abs=0.08)


def photograph(height: int, width: int) -> Image.Image:
    """Noise with the spectrum of photographs, amplitude about 1/f (Field 1987), and with paler colours than lights."""
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.fftfreq(width)[None])
    frequency[0, 0] = 1
    noise = np.fft.fft2(np.random.default_rng(0).standard_normal((3, height, width))) / frequency**1.2
    light = np.fft.ifft2(noise + 3 * noise[:1]).real
    light = 128 + 50 * (light - light.mean()) / light.std()
    return Image.fromarray(light.clip(0, 255).astype(np.uint8).transpose(1, 2, 0))


@pytest.mark.parametrize("size", [(256, 256), (256, 379), (300, 451), (512, 767), (701, 512), (513, 513)], ids=str)
@pytest.mark.parametrize("crop", ["center", "random"])
def test_decoding_at_a_fraction_stays_within_40_db(size, crop):
    """Sizes that the fraction does not divide included: there a naive way falls to 28 dB."""
    data = encoded(photograph(*size), quality=90)
    results = []
    for cover in (None, (64, 64)):
        image, full = decode_image(data, 1 << 20, cover)
        assert (image.height < size[0]) == (cover is not None)
        if crop == "center":
            results.append(center_crop(image, full, (64, 64)).astype(float))
        else:
            results.append(random_crop(image, full, (64, 64), (0.0, 0.3, 0.9)).astype(float))
    assert 10 * np.log10(255**2 / np.mean((results[0] - results[1]) ** 2)) > 40


@pytest.mark.parametrize("size", [(1, 10_000), (10_000, 1), (64, 64 * 65)])
def test_strips_that_would_fill_the_memory_are_refused(size):
    with pytest.raises(BrokenSample, match="too narrow"):
        center_crop(Image.new("RGB", size[::-1]), size, (64, 64))
    assert center_crop(Image.new("RGB", (64, 1)), (1, 64), (16, 16)).shape == (16, 16, 3)
