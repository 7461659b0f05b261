"""Signals: conversion to and from pixels."""

import numpy as np
import torch
from PIL import Image

from diff_dalle.images.signal import PixelSignal, from_uint8

COLORS = np.random.default_rng(0).integers(0, 256, (2, 50, 41, 3), dtype=np.uint8)


def test_rgb_pixels_there_and_back():
    signal = PixelSignal()
    x = signal.from_pixels(COLORS)
    assert torch.equal(x, from_uint8(COLORS)) and x.shape == (2, 3, 50, 41)
    assert np.array_equal(signal.to_pixels(x), COLORS)


def test_grayscale_is_pillows_and_gray_stays_gray():
    signal = PixelSignal(1)
    x = signal.from_pixels(COLORS)
    luma = np.stack([np.asarray(Image.fromarray(image).convert("L")) for image in COLORS])
    assert x.shape == (2, 1, 50, 41) and np.array_equal(((x[:, 0] + 1) * 127.5).round().numpy(), luma)
    images = signal.to_pixels(x)
    assert images.shape == COLORS.shape and all(np.array_equal(images[..., c], luma) for c in range(3))
    assert signal.from_pixels(COLORS[:0]).shape == (0, 1, 50, 41)
    levels = np.arange(256, dtype=np.uint8).reshape(1, 16, 16, 1).repeat(3, axis=3)
    assert np.array_equal(signal.to_pixels(signal.from_pixels(levels)), levels)


def test_a_finished_signal_is_what_a_png_holds():
    x = 1.2 * torch.randn(2, 3, 5, 7, generator=torch.Generator().manual_seed(0))
    for signal in (PixelSignal(), PixelSignal(1)):
        part = x[:, : signal.channels]
        finished = signal.finish(part)
        assert torch.equal(finished, signal.from_pixels(signal.to_pixels(part)))
        assert torch.equal(signal.finish(finished), finished) and not torch.equal(finished, part.clamp(-1, 1))
