"""Latents of mean 0 and standard deviation 1: what an autoencoder's task measures after every step, and follows."""

from __future__ import annotations

import torch
from torch import Tensor

LEAST_RATE = 0.01  # of a step, after the first ones, which count evenly


def sample_moments(latents: Tensor) -> Tensor:
    """Mean and mean square of each sample and channel: [N, C, positions] → [N, 2C] float32, without gradient."""
    latents = latents.detach().float()
    return torch.cat([latents.mean(2), latents.square().mean(2)], 1)


def std_of(moments: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each channel over the samples of a batch, [N, 2C] → [C] twice; 0 and 1 where they
    are not finite, or there is no deviation."""
    mean, square = moments.mean(0).chunk(2)
    std = (square - mean.square()).clamp(min=0).sqrt()
    usable = mean.isfinite() & std.isfinite() & (std > 0)
    return torch.where(usable, mean, 0.0), torch.where(usable, std, 1.0)


def calibration_rate(updates: int) -> float:
    """How far the ``updates``-th step moves what is calibrated; the first one all the way."""
    return max(1 / updates, LEAST_RATE)
