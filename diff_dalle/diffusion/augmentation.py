"""Low-resolution inputs of an upsampler, and their degradation in training, which makes the upsampler robust to the
errors of the stage before it (conditioning augmentation, Ho et al. 2022, section 3)."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ..config import option
from ..errors import InputError

BLUR_SIGMAS = (0.4, 0.6)  # range of sigma, in pixels of the low-resolution image
BLUR_FRACTION = 0.5  # of the training images
_RADIUS = 2  # of the blur kernel in pixels: more than three times the largest sigma


@dataclass(frozen=True)
class AugmentationConfig:
    """Low-resolution images (upsamplers)"""

    gaussian_blur: bool = option(
        False,
        "Gaussian blur of low-resolution images, p = 0.5, sigma 0.4–0.6 of their pixels, passed as conditioning",
    )
    noise_augmentation: float = option(
        0.0,
        "maximum noise level of low-resolution images, 0–1; drawn per sample and passed as conditioning; 0 = no noise",
    )
    crop_size: int = option(0, "width and height in pixels of random training crops; 0 = full images")

    def __post_init__(self):
        if not 0 <= self.noise_augmentation <= 1:
            raise InputError(f"noise_augmentation is {self.noise_augmentation:g}, but must lie between 0 and 1")
        if self.crop_size < 0:
            raise InputError(f"crop_size is {self.crop_size}, but must not be negative")

    def check_levels(self, noise_level: float, blur_level: float) -> None:
        """InputError for levels outside the range of training."""
        if not 0 <= noise_level <= self.noise_augmentation:
            raise InputError(
                f"noise_level is {noise_level:g}, but must lie between 0 and {self.noise_augmentation:g}, the maximum "
                "that this upsampler was trained with (its noise_augmentation)"
            )
        least, most = BLUR_SIGMAS
        if blur_level and not (self.gaussian_blur and least <= blur_level <= most):
            valid = f"0, or from {least:g} to {most:g}" if self.gaussian_blur else "0"
            raise InputError(
                f"blur_level is {blur_level:g}, but must be {valid}, because this upsampler was trained with "
                f"gaussian_blur {self.gaussian_blur}"
            )


def area_downsample(images: Tensor, factor: int) -> Tensor:
    """Area filter: each pixel is the mean of factor × factor. [N, C, H, W] → [N, C, H / factor, W / factor]."""
    return F.avg_pool2d(images, factor)


def blur(images: Tensor, sigma: Tensor) -> Tensor:
    """Gaussian blur with replicated borders. images: [N, C, H, W]; sigma: [N] in pixels, at most 0.6, 0 = no blur."""
    height, width = images.shape[2:]
    offsets = torch.arange(-_RADIUS, _RADIUS + 1, device=images.device)
    weights = torch.exp(-offsets.square() / (2 * sigma.float().clamp(min=1e-3).square())[:, None])
    taps = (weights / weights.sum(1, keepdim=True)).to(images.dtype).T[:, :, None, None, None]  # [taps, N, 1, 1, 1]
    # Sums instead of a convolution, which autocast and TF32 would round, unblurred images included.
    padded = F.pad(images, [_RADIUS] * 4, mode="replicate")
    rows = functools.reduce(torch.add, (tap * padded[:, :, k : k + height] for k, tap in enumerate(taps)))
    return functools.reduce(torch.add, (tap * rows[..., k : k + width] for k, tap in enumerate(taps)))


def add_noise(images: Tensor, level: Tensor, noise: Tensor) -> Tensor:
    """cos(level · π/2) images + sin(level · π/2) noise: variance-preserving, as on a cosine schedule (Nichol &
    Dhariwal 2021) in continuous time. images, noise: [N, C, H, W]; level: [N] in [0, 1]."""
    angle = (level * (math.pi / 2)).to(images.dtype)[:, None, None, None]
    return angle.cos() * images + angle.sin() * noise


def augment(low_res: Tensor, sigma: Tensor, level: Tensor, noise: Tensor) -> Tensor:
    """``blur``, then ``add_noise``."""
    return add_noise(blur(low_res, sigma), level, noise)
