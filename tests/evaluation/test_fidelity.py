"""Nearness of images against closed forms, Pillow, and SSIM as scikit-image computes it."""

import math

import numpy as np
import pytest
from PIL import Image

from diff_dalle.config import InputError
from diff_dalle.evaluation.fidelity import (
    PSNR_CAP,
    average_pool_uint8,
    bicubic_upsample,
    consistency,
    psnr_uint8,
    sharpness,
    ssim,
    upsampling_factor,
)
from diff_dalle.evaluation.intervals import mean_interval, ratio_interval


def noise(seed, *shape):
    """RandomState, whose numbers are the same in every version of numpy."""
    return np.random.RandomState(seed).randint(0, 256, shape).astype(np.uint8)


def blocks(seed, n, height, width):
    return noise(seed, n, height // 4, width // 4, 3).repeat(4, 1).repeat(4, 2)


@pytest.mark.parametrize("levels", [1, 5, 255])
def test_psnr_of_images_some_levels_apart_has_a_closed_form(levels):
    """Also when the difference is negative, and 255 levels, which must not wrap around, are 0 dB."""
    low, high = np.zeros((2, 3, 4, 3), np.uint8), np.full((2, 3, 4, 3), levels, np.uint8)
    for found in (psnr_uint8(low, high), psnr_uint8(high, low)):
        assert found.dtype == np.float64 and found == pytest.approx([20 * math.log10(255 / levels)] * 2)


def test_psnr_averages_the_error_over_pixels_and_channels_of_each_image_alone():
    a = noise(0, 3, 4, 5, 3) // 2
    b = a.copy()
    b[1, 2, 3, 1] += 60
    b[2, :, :, 0] += 3
    found = psnr_uint8(a, b)
    assert found[0] == math.inf
    assert found[1:] == pytest.approx([10 * math.log10(255**2 * 60 / 60**2), 10 * math.log10(255**2 * 3 / 3**2)])


def test_rounding_to_whole_levels_stays_just_below_the_cap():
    values = np.random.RandomState(0).uniform(0, 255, 100_000)
    assert 58.5 < 10 * math.log10(255**2 / np.square(values - values.round()).mean()) < PSNR_CAP


# Made by scikit-image 0.26: structural_similarity(a, b, gaussian_weights=True, sigma=1.5, use_sample_covariance=False,
# data_range=255, channel_axis=-1), which leaves out the border that the window does not fit into.
SSIM = {
    "one window": (noise(1, 1, 11, 11, 3), noise(2, 1, 11, 11, 3), 0.06021235003542891),
    "noisier": (noise(3, 1, 40, 28, 3), noise(3, 1, 40, 28, 3) // 2 + noise(4, 1, 40, 28, 3) // 2, 0.6531278402281908),
    "less contrast": (blocks(5, 1, 32, 80), blocks(5, 1, 32, 80) // 2 + 60, 0.7873228292058424),
    "inverted": (blocks(6, 1, 76, 16), 255 - blocks(6, 1, 76, 16), -0.7776156556839595),
    "dark": (noise(7, 1, 20, 20, 3) // 32, noise(8, 1, 20, 20, 3) // 32, 0.8592242180033659),
}


@pytest.mark.parametrize("name", SSIM)
def test_ssim_is_what_scikit_image_computes(name):
    a, b, expected = SSIM[name]
    assert ssim(a, b) == pytest.approx([expected], abs=1e-12)


def test_ssim_does_not_depend_on_the_order_or_on_other_images():
    a, b = noise(0, 3, 45, 14, 3), noise(1, 3, 45, 14, 3)
    a[2] = b[2]
    found = ssim(a, b)
    assert found == pytest.approx(ssim(b, a), abs=1e-12) and found[2] == pytest.approx(1.0, abs=1e-12)
    assert found == pytest.approx([*ssim(a[:1], b[:1]), *ssim(a[1:], b[1:])], abs=1e-12) and found[:2].max() < 0.5


def test_sharpness_of_a_slope_is_its_steepness():
    """3 levels a pixel across, 4 down, of gray: 5; of blue alone: what blue counts in luminance. A flat one: 0."""
    slope = 3 * np.arange(20)[None, :, None] + 4 * np.arange(12)[:, None, None] + np.zeros(3)
    images = np.stack([slope, slope * [0, 0, 1], np.full_like(slope, 77)]).astype(np.uint8)
    assert sharpness(images) == pytest.approx([5.0, 5.0 * 0.114, 0.0], abs=1e-12)


def test_a_smeared_edge_is_less_sharp():
    """A step of 200 levels over 1 pixel and over 4: the squares of its differences add up to a quarter."""
    step = np.repeat([0, 200], 8).astype(np.uint8)
    ramp = np.concatenate([np.zeros(6), [50, 100, 150], np.full(7, 200)]).astype(np.uint8)
    sharp, smeared = sharpness(np.tile(np.stack([step, ramp])[:, None, :, None], (1, 4, 1, 3)))
    assert sharp == pytest.approx(200 / math.sqrt(15)) and smeared == pytest.approx(sharp / 2)


@pytest.mark.parametrize("factor", [1, 2, 4, 8])
def test_downsampling_averages_squares_as_pillow_does(factor):
    """Pillow's ``reduce`` rounds halves up too (and is exact for powers of 2)."""
    images = noise(0, 3, 16, 24, 3)
    expected = [np.asarray(Image.fromarray(image).reduce(factor)) for image in images]
    found = average_pool_uint8(images, factor)
    assert found.dtype == np.uint8 and np.array_equal(found, expected)


def test_downsampling_by_three_rounds_the_mean_to_the_nearest_level():
    images = noise(0, 3, 12, 24, 3)
    exact = np.stack([images[:, y::3, x::3].astype(float) for y in range(3) for x in range(3)]).mean(0)
    assert np.array_equal(average_pool_uint8(images, 3), np.rint(exact))  # ninths: never a half


def test_what_averages_to_its_input_is_consistent():
    """Pixels repeated, also with a pattern that averages out; an image too bright by d levels is off by just that."""
    low = noise(0, 3, 5, 7, 3) // 2 + 50
    high = low.repeat(4, 1).repeat(4, 2)
    high[1, ::2] += 30
    high[1, 1::2] -= 30
    high[2] += 9
    found = consistency(high, low)
    assert found[:2].tolist() == [math.inf] * 2 and found[2] == pytest.approx(20 * math.log10(255 / 9))


def _cubic(x):
    """The kernel of Keys 1981 with a = -1/2."""
    x = np.abs(x)
    inner, outer = 1.5 * x**3 - 2.5 * x**2 + 1, -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2
    return np.where(x < 1, inner, np.where(x < 2, outer, 0.0))


def test_bicubic_upsampling_is_keys_kernel():
    """Pixels are areas; beyond the border there is nothing, so weights are made to add up to 1 again."""
    image = noise(0, 1, 6, 5, 3) // 2 + 64  # so that nothing is clipped

    def weights(large, small):
        matrix = _cubic((np.arange(large)[:, None] + 0.5) * small / large - 0.5 - np.arange(small))
        return matrix / matrix.sum(1, keepdims=True)

    expected = np.einsum("yh,xw,hwc->yxc", weights(24, 6), weights(15, 5), image[0].astype(float))
    found = bicubic_upsample(image, (24, 15))
    assert found.shape == (1, 24, 15, 3) and found.dtype == np.uint8
    assert np.abs(found[0] - expected).max() < 1.2  # Pillow rounds after each direction
    assert np.array_equal(bicubic_upsample(image, (6, 5)), image)


def test_the_interval_of_a_mean_holds_it_as_often_as_it_says():
    values = np.random.RandomState(0).gamma(2.0, 3.0, (4000, 60))
    held = [low < 6.0 < high for low, high in map(mean_interval, values)]
    assert 0.925 < np.mean(held) < 0.965
    low, high = mean_interval([1.0, 3.0])
    assert (low + high) / 2 == pytest.approx(2.0) and high - low == pytest.approx(2 * 1.959964)


def test_the_interval_of_a_ratio_holds_it_as_often_as_it_says():
    """Also where single ratios have no mean, and narrower where the two go together."""
    random = np.random.RandomState(0)
    others = random.gamma(2.0, 3.0, (4000, 60)) * (random.uniform(size=(4000, 60)) < 0.9)
    values = 0.7 * others + random.normal(0, 0.5, others.shape)
    intervals = np.array([ratio_interval(*pair) for pair in zip(values, others, strict=True)])
    assert 0.925 < np.mean((intervals[:, 0] < 0.7) & (intervals[:, 1] > 0.7)) < 0.965
    assert ratio_interval([1.0, 2.0, 6.0], [2.0, 4.0, 12.0]) == (0.5, 0.5)
    with pytest.raises(InputError, match="at least 2"):
        mean_interval([1.0])


@pytest.mark.parametrize("measure", [psnr_uint8, ssim])
def test_what_cannot_be_compared_is_refused(measure):
    good = noise(0, 2, 16, 16, 3)
    for bad, words in (
        (good[:1], "same size"),
        (good[:, :12], "same size"),
        (good[:0], "N > 0"),
        (good[0], "N, H, W, 3"),
        (good.astype(np.float32), "float32"),
        (good.transpose(0, 3, 1, 2), "N, H, W, 3"),
    ):
        with pytest.raises(InputError, match=words):
            measure(good, bad)


def test_sizes_that_do_not_fit_are_refused():
    images = noise(0, 2, 12, 16, 3)
    for action, words in (
        (lambda: ssim(images[:, :10], images[:, :10]), "16×10 are too small"),
        (lambda: sharpness(images[:, :1]), "16×1 are too small"),
        (lambda: average_pool_uint8(images, 8), "16×12 cannot be downsampled 8 times"),
        (lambda: average_pool_uint8(images, 0), "downsampled 0 times"),
        (lambda: consistency(images, images[:, :5]), "cannot be an upsampling of 16×5"),
        (lambda: consistency(images, images[:, :6]), "cannot be an upsampling of 16×6"),
        (lambda: consistency(images, images[:1]), "2 images for 1 low-resolution"),
    ):
        with pytest.raises(InputError, match=words):
            action()
    assert upsampling_factor(images, images[:, ::4, ::4]) == 4
