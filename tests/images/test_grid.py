import numpy as np
import pytest

from diff_dalle.images.grid import CELL, MARGIN, image_grid


def test_every_image_is_in_the_grid_unchanged():
    images = np.random.default_rng(0).integers(0, 256, (5, 6, 8, 3), dtype=np.uint8)
    grid = np.asarray(image_grid(images, columns=2, cell=26))  # 3 × 8 ≤ 26 < 4 × 8
    for i, image in enumerate(images):
        top, left = MARGIN + i // 2 * (18 + MARGIN), MARGIN + i % 2 * (24 + MARGIN)
        np.testing.assert_array_equal(grid[top : top + 18, left : left + 24][::3, ::3], image)


@pytest.mark.parametrize(("size", "scale"), [((32, 20), 3), ((20, 49), 1), ((96, 2), 1), ((300, 8), 1), ((1, 1), CELL)])
def test_small_images_are_upsampled_to_one_size(size, scale):
    grid = np.asarray(image_grid(np.zeros((1, *size, 3), np.uint8)))
    assert grid.shape == (scale * size[0] + 2 * MARGIN, scale * size[1] + 2 * MARGIN, 3)


def test_captions_are_written_below_and_wrapped():
    images = np.full((2, 32, 32, 3), 255, dtype=np.uint8)
    bare, short, long = (
        np.asarray(image_grid(images, captions, columns=2))
        for captions in (None, ["a cat", "ä"], ["a cat " * 12, "w" * 500])
    )
    assert bare.min() == 255 and short.min() < 128
    narrow = image_grid(images, ["a cat", "ä"], columns=2, cell=32)
    assert narrow.width == short.shape[1] == bare.shape[1] and narrow.height < short.shape[0]
    assert short.shape[0] < long.shape[0] < 200 and short.shape[1] == long.shape[1]
    assert (long[:, :MARGIN] == 255).all() and (long[:, -MARGIN:] == 255).all()
