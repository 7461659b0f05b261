"""Degradation of low-resolution images, against direct sums in float64."""

import math

import numpy as np
import pytest
import torch
from network_making import pixels, seeded
from refusing import refused
from torch.testing import assert_close

from diff_dalle.diffusion.augmentation import (
    BLUR_SIGMAS,
    AugmentationConfig,
    Degradation,
    add_noise,
    area_downsample,
    area_resize,
    blur,
)
from diff_dalle.diffusion.schedules import linear
from diff_dalle.randomness import Draw

EVERYTHING = AugmentationConfig(gaussian_blur=True, noise_augmentation=0.3)


def augment(images, sigma, level, noise):
    return Degradation().apply(images, sigma, level, noise)["low_res"]


def images_of(n=5, height=7, width=10, seed=0):
    return pixels(n, 3, height, width, seed=seed)


def normal(*shape, seed=0):
    return seeded(*shape, seed=seed)


def blurred_plainly(image: np.ndarray, sigma: float, reach: int = 5) -> np.ndarray:
    """[C, H, W]: every pixel as a two-dimensional weighted sum of its neighbors, with a large radius."""
    height, width = image.shape[1:]
    out, total = np.zeros_like(image), 0.0
    for dy in range(-reach, reach + 1):
        for dx in range(-reach, reach + 1):
            weight = math.exp(-(dy * dy + dx * dx) / (2 * sigma * sigma))
            rows = np.clip(np.arange(height) + dy, 0, height - 1)
            columns = np.clip(np.arange(width) + dx, 0, width - 1)
            out += weight * image[:, rows][:, :, columns]
            total += weight
    return out / total


# ---------------------------------------------------------------------------------------------------------------- blur


@pytest.mark.parametrize("size", [(7, 10), (1, 1), (1, 4), (3, 2)])
def test_each_sample_is_blurred_by_its_own_sigma(size):
    """Images smaller than the filter too."""
    images, sigmas = images_of(5, *size), (0.4, 0.6, 0.25, 0.5, 0.55)
    out = blur(images, torch.tensor(sigmas))
    for image, got, sigma in zip(images.double().numpy(), out, sigmas, strict=True):
        np.testing.assert_allclose(got, blurred_plainly(image, sigma), rtol=0, atol=5e-5)
    gray = images[..., :1, :1].expand_as(images)
    assert_close(blur(gray, torch.tensor(sigmas)), gray, rtol=0, atol=1e-6)


def test_images_without_blur_are_unchanged_in_a_batch_with_blurred_ones():
    images = images_of()
    out = blur(images, torch.tensor([0.0, 0.6, 0.0, 0.4, 0.0]))
    changed = [not torch.equal(one, other) for one, other in zip(images, out, strict=True)]
    assert changed == [False, True, False, True, False]


def test_blur_does_not_depend_on_the_batch():
    images, sigma = images_of(64), torch.linspace(0.4, 0.6, 64)
    whole = blur(images, sigma)
    for part in (slice(7, 8), slice(5, 20), slice(0, 64, 9)):
        assert torch.equal(blur(images[part], sigma[part]), whole[part])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_does_not_round_the_pixels(dtype):
    """Tasks run under autocast, where low-resolution images must not lose bits."""
    images, noise = images_of(), normal(5, 3, 7, 10)
    sigma, level = torch.tensor([0.0, 0.4, 0.0, 0.5, 0.6]), torch.tensor([0.0, 0.0, 0.2, 0.3, 1.0])
    expected = augment(images, sigma, level, noise)
    with torch.autocast("cpu", dtype=dtype):
        out = augment(images, sigma, level, noise)
    assert out.dtype == torch.float32 and torch.equal(out, expected)
    assert torch.equal(out[0], images[0])


# --------------------------------------------------------------------------------------------------------------- noise


def test_level_0_is_the_image_and_level_1_the_noise():
    images, noise = images_of(2), normal(2, 3, 7, 10)
    out = add_noise(images, torch.tensor([0.0, 1.0]), noise)
    assert torch.equal(out[0], images[0])
    assert_close(out[1], noise[1], rtol=0, atol=1e-6)


def test_levels_in_between_mix_by_cosine_and_sine():
    images, noise = images_of(3), normal(3, 3, 7, 10)
    out = add_noise(images, torch.tensor([1 / 3, 1 / 2, 2 / 3]), noise)
    for i, (signal, share) in enumerate(((3**0.5 / 2, 0.5), (0.5**0.5, 0.5**0.5), (0.5, 3**0.5 / 2))):
        assert_close(out[i], signal * images[i] + share * noise[i], rtol=0, atol=1e-6)


def test_noise_preserves_unit_variance():
    level = torch.linspace(0, 1, 5)
    out = add_noise(normal(5, 3, 100, 100, seed=1), level, normal(5, 3, 100, 100, seed=2))
    assert_close(out.flatten(1).var(1), torch.ones(5), rtol=0, atol=0.04)


def test_the_noise_itself_is_not_blurred():
    images, noise, sigma, level = images_of(1), normal(1, 3, 7, 10), torch.tensor([0.5]), torch.tensor([0.5])
    expected = 0.5**0.5 * (torch.tensor(blurred_plainly(images[0].double().numpy(), 0.5)).float() + noise[0])
    assert_close(augment(images, sigma, level, noise)[0], expected, rtol=0, atol=5e-5)


# ------------------------------------------------------------------------------------------------------------ settings


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"noise_augmentation": 1.5}, "noise_augmentation is 1.5, but must be at least 0 and at most 1"),
        ({"noise_augmentation": -0.1}, "noise_augmentation is -0.1"),
        ({"noise_augmentation": math.nan}, "noise_augmentation is nan"),
        ({"crop_size": -8}, "crop_size is -8, but must be at least 0"),
    ],
)
def test_impossible_settings_are_refused(setting, words):
    with refused(words):
        AugmentationConfig(**setting)


@pytest.mark.parametrize("config", [AugmentationConfig(), EVERYTHING])
def test_levels_up_to_those_of_training_are_accepted(config):
    for share, sigma in ((0.0, 0.0), (0.5, BLUR_SIGMAS[0]), (1.0, BLUR_SIGMAS[1])):
        config.degradation.check_levels(share * config.noise_augmentation, sigma if config.gaussian_blur else 0.0)


@pytest.mark.parametrize(
    ("config", "levels", "words"),
    [
        (EVERYTHING, (0.31, 0.0), r"noise_level is 0\.31, but must lie between 0 and 0\.3, the maximum"),
        (EVERYTHING, (-0.01, 0.0), r"noise_level is -0\.01"),
        (EVERYTHING, (0.0, 0.61), r"blur_level is 0\.61, but must be 0, or from 0\.4 to 0\.6, because.*with blur"),
        (EVERYTHING, (0.0, 0.3), r"blur_level is 0\.3"),
        (EVERYTHING, (0.0, math.nan), "blur_level is nan"),
        (AugmentationConfig(gaussian_blur=True), (0.1, 0.5), r"noise_level is 0\.1, but must lie between 0 and 0,"),
        (
            AugmentationConfig(noise_augmentation=1.0),
            (0.1, 0.5),
            r"blur_level is 0\.5, but must be 0,.*without blur",
        ),
    ],
)
def test_levels_outside_the_range_of_training_are_refused(config, levels, words):
    with refused(words):
        config.degradation.check_levels(*levels)


# ------------------------------------------------------------------------------------------------ settings of a decoder


def test_an_area_filter_averages_what_a_pixel_covers():
    """Any ratio, along each axis: the mean is kept, and each pixel of a coarse picture returns."""
    images = images_of(2, 7, 10)
    assert torch.equal(area_resize(images, (7, 10)), images)
    blocks = images_of(2, 8, 12)
    assert_close(area_resize(blocks, (4, 4)), blocks.unflatten(3, (4, 3)).unflatten(2, (4, 2)).mean((3, 5)))
    assert_close(area_downsample(blocks, 4), area_resize(blocks, (2, 3)))
    found = area_resize(images, (2, 4))
    assert found.shape == (2, 3, 2, 4)
    assert_close(found.mean((2, 3)), images.mean((2, 3)))
    first = images[:, :, :4, :3].clone()
    first[:, :, 3] *= 0.5
    first[..., 2] *= 0.5
    assert_close(found[:, :, 0, 0], first.sum((2, 3)) / (3.5 * 2.5))
    coarse = images_of(1, 3, 5, seed=1)
    fine = coarse.repeat_interleave(4, 2).repeat_interleave(4, 3)
    assert_close(area_resize(area_resize(fine, (9, 15)), (3, 5)), coarse)


def test_the_linear_noise_curve_is_the_linear_schedule():
    """Level u is step 1000 u of Ho et al.'s schedule."""
    alphas_cumprod = np.cumprod(1 - linear(1000))
    for step in (9, 99, 199, 499, 899):
        level = torch.tensor([(step + 1) / 1000])
        image, noise = torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, 1)
        signal = add_noise(image, level, 0 * noise, "linear").item()
        assert signal**2 == pytest.approx(alphas_cumprod[step], rel=0.06)
        assert add_noise(0 * image, level, noise, "linear").item() ** 2 == pytest.approx(1 - signal**2, rel=1e-4)
    assert add_noise(image, torch.zeros(1), noise, "linear").item() == 1


def test_kernels_have_their_own_radius():
    """A radius limits the kernel; radii are drawn evenly from a range."""
    images, sigma = images_of(3, 9, 9), torch.full((3,), 1.5)
    mixed = blur(images, sigma, 4, torch.tensor([1, 2, 4]))
    for i, radius in enumerate((1, 2, 4)):
        assert_close(mixed[i], blur(images[i : i + 1], sigma[:1], radius)[0])
    assert (blur(images, sigma, 1) - blur(images, sigma, 4)).abs().max() > 0.05
    many = images_of(1, 9, 9).expand(900, -1, -1, -1)
    found = Degradation(1.0, (1.5, 1.5), (1, 3)).draw(many, Draw(0, torch.arange(900)))["low_res"]
    counts = [
        (found - blur(many, sigma[:1].expand(900), radius)).flatten(1).abs().max(1).values < 1e-5
        for radius in (1, 2, 3)
    ]
    assert all(0.28 < count.float().mean() < 0.39 for count in counts) and torch.stack(counts).sum() == 900


def test_the_blur_has_its_probability_and_range():
    images = images_of(1, 4, 4).expand(2000, -1, -1, -1)
    found = Degradation(0.25, (0.2, 0.9)).draw(images, Draw(0, torch.arange(2000)))
    sigma = found["low_res_blur"]
    assert (sigma > 0).float().mean() == pytest.approx(0.25, abs=0.03)
    assert 0.2 <= sigma[sigma > 0].min() < 0.21 and 0.89 < sigma.max() <= 0.9
    assert not found["low_res_level"].any()
