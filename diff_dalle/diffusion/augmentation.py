"""Low-resolution images as an up-sampler sees them: how they are made, and what is done to them so that it forgives
what the generator before it gets wrong (conditioning augmentation, Ho et al. 2022, section 3)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ..config import option
from ..errors import InputError

BLUR_SIGMAS = (0.4, 0.6)  # pixels of the low-resolution image
BLUR_FRACTION = 0.5  # of the training images
_REACH = 2  # pixels to either side that a blur looks at: more than three of the widest sigma


@dataclass(frozen=True)
class AugmentationConfig:
    """Low-resolution images (up-samplers)"""

    gaussian_blur: bool = option(False, "blur half of the low-resolution images, by a sigma of 0.4 to 0.6 of their "
                                        "pixels that the network is told")  # fmt: skip
    noise_augmentation: float = option(0.0, "largest level of noise on low-resolution images, from 0 (none) to 1 "
                                            "(nothing else); each has its own, which the network is told")  # fmt: skip
    crop_size: int = option(0, "train on random parts of the images, of so many pixels a side; 0 = whole images")

    def __post_init__(self):
        if not 0 <= self.noise_augmentation <= 1:
            raise InputError(f"noise_augmentation is {self.noise_augmentation:g}, but must lie between 0 and 1")
        if self.crop_size < 0:
            raise InputError(f"crop_size is {self.crop_size}, but must not be negative")

    def check_levels(self, noise_level: float, blur_level: float) -> None:
        """InputError for levels that a network trained with these settings has not seen."""
        if not 0 <= noise_level <= self.noise_augmentation:
            raise InputError(f"noise_level is {noise_level:g}, but must lie between 0 and {self.noise_augmentation:g}, "
                             "the most that this up-sampler was trained with (its noise_augmentation)")  # fmt: skip
        least, most = BLUR_SIGMAS
        if blur_level and not (self.gaussian_blur and least <= blur_level <= most):
            known = f"0, or from {least:g} to {most:g}" if self.gaussian_blur else "0"
            raise InputError(f"blur_level is {blur_level:g}, but must be {known}, as this up-sampler was trained with "
                             f"gaussian_blur {self.gaussian_blur}")  # fmt: skip


def downsample(images: Tensor, factor: int) -> Tensor:
    """The area filter: each pixel the mean of factor × factor. [N, C, H, W] → [N, C, H / factor, W / factor]."""
    return F.avg_pool2d(images, factor)


def blur(images: Tensor, sigma: Tensor) -> Tensor:
    """Gaussian blur; beyond the border, the border's pixels repeat. images: [N, C, H, W]; sigma: [N] in pixels, at most
    0.6, 0 = none."""
    height, width = images.shape[2:]
    offsets = torch.arange(-_REACH, _REACH + 1, device=images.device)
    weights = torch.exp(-offsets.square() / (2 * sigma.float().clamp(min=1e-3).square())[:, None])
    taps = (weights / weights.sum(1, keepdim=True)).to(images.dtype).T[:, :, None, None, None]  # [taps, N, 1, 1, 1]
    # Sums, because autocast and TF32 would round a convolution's pixels, those of unblurred images too.
    padded = F.pad(images, [_REACH] * 4, mode="replicate")
    rows = sum(tap * padded[:, :, k : k + height] for k, tap in enumerate(taps))
    return sum(tap * rows[..., k : k + width] for k, tap in enumerate(taps))


def add_noise(images: Tensor, level: Tensor, noise: Tensor) -> Tensor:
    """cos(level · π/2) images + sin(level · π/2) noise: the variance stays as it is, as on a cosine schedule
    (Nichol & Dhariwal 2021) in continuous time. images, noise: [N, C, H, W]; level: [N] in [0, 1]."""
    angle = (level * (math.pi / 2)).to(images.dtype)[:, None, None, None]
    return angle.cos() * images + angle.sin() * noise


def augment(low_res: Tensor, sigma: Tensor, level: Tensor, noise: Tensor) -> Tensor:
    """First the blur, then the noise, as above."""
    return add_noise(blur(low_res, sigma), level, noise)
