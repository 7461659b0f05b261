"""Edges: those of OpenCV, pixel by pixel, and of pictures whose edges are known."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from diff_dalle.config import InputError
from diff_dalle.images.control_filters.canny import PIXELS, CannyFilter, CannyParams, canny_edges, grown
from diff_dalle.images.control_filters.contract import Materials
from diff_dalle.randomness import Draw


def picture(seed=0, size=(96, 80), channels=3) -> torch.Tensor:
    """8-bit levels int32 [1, C, H, W] with detail at all scales, as a photograph has."""
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros(1, channels, *size)
    for octave in range(6):
        small = torch.randn(1, channels, *(-(-length // 2**octave) for length in size), generator=generator)
        total += 1.5**octave * F.interpolate(small, size, mode="bicubic")
    low, high = total.min(), total.max()
    return (255 * (total - low) / (high - low)).round().int()


@pytest.mark.parametrize(("low", "high"), [(100, 200), (20, 60), (0, 0), (50, 50)])
@pytest.mark.parametrize("channels", [1, 3])
def test_the_same_edges_as_opencv(channels, low, high):
    cv2 = pytest.importorskip("cv2")
    for seed in range(4):
        levels = picture(seed, channels=channels)
        expected = cv2.Canny(levels[0].permute(1, 2, 0).numpy().astype(np.uint8), low, high)
        assert 50 < (expected > 0).sum() < expected.size
        np.testing.assert_array_equal(canny_edges(levels, low, high)[0, 0].numpy(), expected > 0)


@pytest.mark.parametrize(("pixels", "answers"), [(1, 60), (PIXELS, 5)])
def test_whether_an_edge_of_sixty_pixels_still_grows_is_asked_every_so_many_of_them(pixels, answers, monkeypatch):
    """And once more when it does not."""
    asked = []
    monkeypatch.setattr(torch, "equal", lambda *both: asked.append(both) or bool((both[0] == both[1]).all()))
    candidates = torch.zeros(1, 1, 5, 60, dtype=torch.bool)
    candidates[..., 2, :] = candidates[..., 0, 0] = True
    edges = torch.zeros_like(candidates)
    edges[..., 2, 0] = True
    found = grown(edges, candidates, pixels)
    assert found[0, 0, 2].all() and found.sum() == 60 and len(asked) == answers


def test_a_square_has_thin_closed_edges():
    """One pixel wide, and nowhere else."""
    levels = torch.zeros(1, 3, 20, 24, dtype=torch.int32)
    levels[:, :, 5:13, 6:18] = 200
    edges = canny_edges(levels, 100, 200)[0, 0]
    assert edges.sum() > 30 and edges[:4].sum() == edges[14:].sum() == edges[:, :5].sum() == edges[:, 19:].sum() == 0
    assert not edges[7:11, 8:16].any()
    assert edges[9].sum() == 2 and edges[:, 12].sum() == 2


def test_weak_edges_count_where_they_are_connected_to_strong_ones():
    """Along a border whose contrast falls from left to right."""
    levels = torch.zeros(1, 1, 20, 40, dtype=torch.int32)
    levels[0, 0, 10:] = torch.linspace(120, 0, 40).int()
    both, strong = (canny_edges(levels, low, 300)[0, 0] for low in (100, 300))
    assert strong.sum() > 10 and strong.sum() + 10 < both.sum() and both[:, :25].any(0).all() and not both[:, 35:].any()
    squares = torch.zeros(1, 1, 20, 40, dtype=torch.int32)
    squares[0, 0, 5:15, 5:15], squares[0, 0, 5:15, 25:35] = 150, 40
    edges = canny_edges(squares, 100, 300)[0, 0]
    assert edges[:, :20].any() and not edges[:, 20:].any() and canny_edges(squares, 100, 100)[0, 0, :, 20:].any()
    assert not canny_edges(levels, 20, 600).any()  # nothing is strong enough to begin with


def test_samples_of_a_batch_do_not_touch_each_other():
    levels = torch.cat([picture(seed) for seed in range(3)])
    whole = canny_edges(levels, 100, 200)
    for i in range(3):
        assert torch.equal(canny_edges(levels[i : i + 1], 100, 200), whole[i : i + 1])


def test_the_filter_finds_edges_at_its_own_resolution():
    """The shorter side is resized; the control has the picture's size."""
    pictures, draw = picture(0, (48, 64)).float() / 255, Draw(0, torch.arange(1))
    own = CannyFilter(CannyParams(resize=0), Materials())(pictures, draw)
    assert torch.equal(own, canny_edges((255 * pictures).round().int(), 100, 200).float())
    resized = CannyFilter(CannyParams(resize=24), Materials())(pictures, draw)
    assert resized.shape == own.shape == (1, 1, 48, 64) and resized.min() >= 0 and resized.max() <= 1
    small = F.interpolate(pictures, (24, 32), mode="bilinear", antialias=True)
    edges = canny_edges((255 * small).round().int(), 100, 200).float()
    torch.testing.assert_close(resized, F.interpolate(edges, (48, 64), mode="bilinear"))
    other = CannyFilter(CannyParams(resize=0, low=10, high=20), Materials())(pictures, draw)
    assert other.sum() > own.sum()
    assert CannyFilter(CannyParams(resize=0), Materials()).shown(own, pictures).shape == (1, 3, 48, 64)


@pytest.mark.parametrize("resize", [24, 0])
def test_the_published_form_is_squashed_to_a_square(resize):
    """As their filter: no antialiasing, levels rounded down, OpenCV's edges, and back to the picture's size."""
    cv2 = pytest.importorskip("cv2")
    pictures, draw = torch.cat([picture(seed, (48, 96)) for seed in range(2)]) / 255 * 0.998, Draw(0, torch.arange(2))
    small = F.interpolate(pictures, (24, 24), mode="bilinear") if resize else pictures
    levels = (255 * small).numpy().astype(np.uint8).transpose(0, 2, 3, 1)
    edges = torch.stack([torch.tensor(cv2.Canny(np.ascontiguousarray(each), 100, 200))[None] / 255 for each in levels])
    expected = F.interpolate(edges, (48, 96), mode="bilinear")
    found = CannyFilter(CannyParams(resize=resize, resize_form="square"), Materials())(pictures, draw)
    assert edges.any() and torch.allclose(found, expected, atol=1e-6)
    other = CannyFilter(CannyParams(resize=resize), Materials())(pictures, draw)
    assert not resize or not torch.allclose(other, expected, atol=0.1)


@pytest.mark.parametrize("bad", [{"resize_form": "round"}, {"resize": 4}, {"resize": -1}, {"low": 300}, {"low": -1}])
def test_impossible_parameters_are_refused(bad):
    with pytest.raises(InputError, match=next(iter(bad))):
        CannyParams(**bad)
