import math
import random
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from PIL import Image
from shard_making import encoded, random_image

from diff_dalle.config import InputError
from diff_dalle.images.decode import BrokenSample, decode_image
from diff_dalle.images.transforms import (
    Window,
    center_crop,
    center_crop_mask,
    covering_size,
    random_cover,
    random_crop,
    random_window,
)

SIZES = [(64, 64), (65, 64), (127, 128), (200, 131), (130, 333), (48, 50), (20, 30), (259, 517)]


def shrunk_plainly(image: Image.Image, target: tuple[int, int]) -> np.ndarray:
    """What is cropped. For a square, Guided-Diffusion's two functions, restated: halved with a box filter, then bicubic
    to the smallest size that covers the target."""
    while image.height >= 2 * target[0] and image.width >= 2 * target[1]:
        image = image.resize((image.width // 2, image.height // 2), Image.BOX)
    scale = max(target[0] / image.height, target[1] / image.width)
    covering = max(target[1], round(image.width * scale)), max(target[0], round(image.height * scale))
    return np.array(image.resize(covering, Image.BICUBIC))


@pytest.mark.parametrize("size", [*SIZES, (10, 10), (1, 30), (7, 7)], ids=str)
@pytest.mark.parametrize("target", [(16, 16), (31, 31), (64, 64), (16, 32), (40, 24)], ids=str)
def test_the_center_crop_equals_guided_diffusion_bit_for_bit(size, target):
    """And covers a target that is not square; small images are enlarged."""
    image = random_image(*size)
    plain = shrunk_plainly(image, target)
    top, left = (plain.shape[0] - target[0]) // 2, (plain.shape[1] - target[1]) // 2
    expected = plain[top : top + target[0], left : left + target[1]]
    np.testing.assert_array_equal(center_crop(image, size, target), expected)


@pytest.mark.parametrize(
    ("image", "size", "shorter"),
    [  # (height, width) of image and bucket, and what the shorter side of the image becomes
        ((600, 900), (608, 928), 619),
        ((900, 600), (608, 928), 928),
        ((1000, 500), (512, 1024), 1024),
        ((1500, 500), (512, 1024), 1024),  # 1536 in Stable Cascade's code, which is larger than covering takes
        ((100, 100), (96, 128), 128),
    ],
)
def test_images_are_scaled_to_cover_and_no_further(image, size, shorter):
    assert min(covering_size(image, size)) == shorter


def test_there_is_no_padding_and_no_enlargement_beyond_covering():
    """One side of the scaled image is that of its bucket, the other no shorter, to a pixel of the exact scale."""
    for image in np.random.default_rng(0).integers(100, 1000, (500, 2)).tolist():
        for size in ((96, 544), (192, 320), (256, 256), (352, 160)):
            covering = covering_size(tuple(image), size)
            assert min(a - b for a, b in zip(covering, size, strict=True)) == 0
            scale = max(size[0] / image[0], size[1] / image[1])
            halvings = max(0, math.floor(-math.log2(scale)))  # each may drop half a pixel
            assert np.abs(np.array(covering) - scale * np.array(image)).max() <= 1 + halvings + 0.01 * max(covering)


@pytest.mark.parametrize("grid", [2, 3, 8])
def test_windows_and_downsampling_commute(grid):
    pixels = np.random.default_rng(0).integers(0, 256, (48, 96, 3))

    def sums(image):
        return image.reshape(image.shape[0] // grid, grid, -1, grid, 3).sum((1, 3))

    for u in np.random.default_rng(1).random((50, 2)).tolist():
        small = random_window(sums(pixels), Window(24 // grid, 1), u)
        np.testing.assert_array_equal(sums(random_window(pixels, Window(24, grid), u)), small)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_random_crop_equals_guided_diffusion_for_the_same_choices(size):
    image, side, source = random_image(*size), 24, random.Random(1)
    choices = set()
    for _ in range(30):
        u = [source.random() for _ in range(3)]
        larger = range(math.ceil(side / 1.0), math.ceil(side / 0.8) + 1)
        plain = shrunk_plainly(image, 2 * (larger[int(u[0] * len(larger))],))
        tops, lefts = range(plain.shape[0] - side + 1), range(plain.shape[1] - side + 1)
        top, left = tops[int(u[1] * len(tops))], lefts[int(u[2] * len(lefts))]
        choices.add((plain.shape, top, left))
        np.testing.assert_array_equal(
            random_crop(image, size, (side, side), random_cover((side, side), u[0]), u[1:]),
            plain[top:, left:][:side, :side],
        )
    assert len(choices) > 10
    wide = random_crop(image, size, (16, 32), random_cover((16, 32), 0.99), 2 * (1 - 1e-9,))
    np.testing.assert_array_equal(wide, shrunk_plainly(image, (20, 40))[-16:, -32:])


def photograph(height: int, width: int) -> Image.Image:
    """Noise with the spectrum of photographs, amplitude about 1/f (Field 1987), and with pale colors."""
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.fftfreq(width)[None])
    frequency[0, 0] = 1
    noise = np.fft.fft2(np.random.default_rng(0).standard_normal((3, height, width))) / frequency**1.2
    light = np.fft.ifft2(noise + 3 * noise[:1]).real
    light = 128 + 50 * (light - light.mean()) / light.std()
    return Image.fromarray(light.clip(0, 255).astype(np.uint8).transpose(1, 2, 0))


@pytest.mark.parametrize("size", [(256, 256), (256, 379), (300, 451), (512, 767), (701, 512), (513, 513)], ids=str)
def test_decoding_at_a_fraction_stays_within_40_db(size):
    """Includes sizes that the fraction does not divide, where the naive method gives 28 dB."""
    data = encoded(photograph(*size), quality=90)
    results = []
    for cover in (None, (64, 64)):
        image, full = decode_image(data, 1 << 20, cover)
        assert (image.height < size[0]) == (cover is not None)
        crops = center_crop(image, full, (64, 64)), random_crop(image, full, (64, 64), (64, 64), (0.3, 0.9))
        results.append(np.stack(crops).astype(float))
    assert (10 * np.log10(255**2 / np.mean((results[0] - results[1]) ** 2, (1, 2, 3))) > 40).all()


@pytest.mark.parametrize("size", [(1, 10_000), (10_000, 1), (64, 64 * 65)])
def test_images_that_are_too_narrow_are_refused(size):
    with pytest.raises(BrokenSample, match="too narrow"):
        center_crop(Image.new("RGB", size[::-1]), size, (64, 64))
    assert center_crop(Image.new("RGB", (64, 1)), (1, 64), (16, 16)).shape == (16, 16, 3)


TARGETS = [(16, 16), (24, 40), (50, 31), (200, 300)]


@pytest.mark.parametrize(
    ("size", "target"), [(size, TARGETS[(i + j) % 4]) for i, size in enumerate(SIZES) for j in (0, 1)], ids=str
)
def test_masks_are_cropped_like_their_images_and_keep_every_part(size, target):
    """Against the definition, in fractions: which pixels of the mask overlap the area that a pixel shows."""
    mask = np.random.default_rng(0).random(size) < 0.02
    covering = shrunk_plainly(Image.new("L", size[::-1]), target).shape
    shown = np.zeros(target, dtype=bool)
    for row, column in np.argwhere(mask):
        reach = []
        for place, length, covers, wanted in zip((row, column), size, covering, target, strict=True):
            low, high = Fraction(int(place) * covers, length), Fraction(int(place + 1) * covers, length)
            start = (covers - wanted) // 2
            reach.append(slice(max(0, math.floor(low) - start), max(0, math.ceil(high) - start)))
        shown[tuple(reach)] = True
    np.testing.assert_array_equal(center_crop_mask(mask, target), shown)


def test_windows_lie_on_their_grid_and_reach_every_place_equally_often():
    pixels, window = np.arange(24 * 40 * 3).reshape(24, 40, 3), Window(16, 4)
    uniforms = np.random.default_rng(0).random((2000, 2)).tolist()
    found = Counter()
    for u in [*uniforms, (0.0, 0.0), (math.nextafter(1, 0), math.nextafter(1, 0))]:
        part = random_window(pixels, window, u)
        top, left = divmod(int(part[0, 0, 0]) // 3, 40)
        np.testing.assert_array_equal(part, pixels[top : top + 16, left : left + 16])
        found[top, left] += 1
    assert set(found) == {(top, left) for top in (0, 4, 8) for left in (0, 4, 8, 12, 16, 20, 24)}
    assert min(found.values()) > 60 and max(found.values()) < 140  # 95 expected, standard deviation 10
    np.testing.assert_array_equal(random_window(pixels[:16, :16], window, (0.9, 0.9)), pixels[:16, :16])


@pytest.mark.parametrize(("size", "grid"), [(10, 4), (0, 4), (-4, 4), (4, 0)])
def test_windows_off_their_grid_are_refused(size, grid):
    with pytest.raises(InputError, match=f"crop_size is {size}, but must be a positive multiple of {grid}"):
        Window(size, grid)


def test_windows_that_do_not_fit_are_refused():
    Window(16, 4).check_size((16, 20))
    with pytest.raises(InputError, match="crop_size is 16, but must be at most 12"):
        Window(16, 4).check_size((20, 12))
    with pytest.raises(InputError, match="the image size is 20,18, but must be a multiple of 4"):
        Window(16, 4).check_size((20, 18))
