"""Low-resolution inputs of an upsampler, and their degradation in training, which makes the upsampler robust to the
errors of the stage before it (conditioning augmentation, Ho et al. 2022, section 3)."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..config import Fault, InputError, option, settings
from ..config.bounds import MAX_SIDE
from ..randomness import Draw

BLUR_SIGMAS = (0.4, 0.6)  # range of sigma, in pixels of the low-resolution image
BLUR_FRACTION = 0.5  # of the training images
BLUR_RADIUS = 2  # of the blur kernel in pixels: more than three times the largest sigma


@settings
class AugmentationConfig:
    """Low-resolution images (upsamplers)"""

    gaussian_blur: bool = option(
        False,
        "Gaussian blur of low-resolution images, p = 0.5, sigma 0.4–0.6 of their pixels, passed as conditioning",
    )
    noise_augmentation: float = option(
        0.0,
        "maximum noise level of low-resolution images, 0–1; drawn per sample and passed as conditioning; 0 = no noise",
        least=0,
        most=1,
    )
    crop_size: int = option(
        0, "width and height in pixels of random training crops; 0 = full images", least=0, most=MAX_SIDE
    )

    @property
    def degradation(self) -> Degradation:
        """The same as a ``Degradation``."""
        return Degradation(BLUR_FRACTION if self.gaussian_blur else 0.0, max_level=self.noise_augmentation)


@dataclass(frozen=True)
class Degradation:
    """How low-resolution images are degraded.

    blur_prob:   probability of the blur of an image.
    sigmas:      range of the blur's standard deviation, in pixels of the low-resolution image.
    radii:       range of the radius of the blur's kernel in pixels.
    max_level:   upper end of the noise levels, 0–1, which start at 0; 0 = no noise.
    noise_curve: an entry of NOISE_CURVES.
    """

    blur_prob: float = 0.0
    sigmas: tuple[float, float] = BLUR_SIGMAS
    radii: tuple[int, int] = (BLUR_RADIUS, BLUR_RADIUS)
    max_level: float = 0.0
    noise_curve: str = "cosine"

    def check_levels(self, noise_level: float, blur_level: float) -> None:
        """InputError for levels outside the range of training."""
        if not 0 <= noise_level <= self.max_level:
            rule = f"must lie between 0 and {self.max_level:g}, the maximum that this upsampler was trained with"
            raise InputError(Fault("noise_level", rule, noise_level))
        least, most = self.sigmas
        if blur_level and not (self.blur_prob and least <= blur_level <= most):
            valid = f"0, or from {least:g} to {most:g}" if self.blur_prob else "0"
            trained = f"this upsampler was trained {'with' if self.blur_prob else 'without'} blur"
            raise InputError(Fault("blur_level", f"must be {valid}, because {trained}", blur_level))

    def draw(self, low_res: Tensor, draw: Draw) -> dict[str, Any]:
        """Images [N, C, h, w] as the fields of ``Conditioning`` that say how they are degraded in training."""
        sigma = level = torch.zeros(len(low_res), device=low_res.device)
        radius = None
        if self.blur_prob:
            least, most = self.sigmas
            blurred = draw.uniform("low-resolution blur") < self.blur_prob
            sigma = torch.where(blurred, least + (most - least) * draw.uniform("low-resolution sigma"), 0.0).float()
            least, most = self.radii
            if least != most:
                drawn = least + ((most - least + 1) * draw.uniform("low-resolution radius")).long()
                radius = drawn.clamp(max=most)  # float32 numbers may round up to 1
        if self.max_level:
            level = (self.max_level * draw.uniform("low-resolution level")).float()
        noise = draw.normal("low-resolution noise", low_res.shape[1:])
        return self.apply(low_res, sigma, level, noise, radius)

    def apply(
        self, low_res: Tensor, sigma: Tensor, level: Tensor, noise: Tensor, radius: Tensor | None = None
    ) -> dict[str, Any]:
        """Images blurred by ``sigma`` [N], then noised to ``level`` [N], as those fields."""
        blurred = blur(low_res, sigma, self.radii[1], radius)
        noised = add_noise(blurred, level, noise, self.noise_curve)
        return {"low_res": noised, "low_res_level": level, "low_res_blur": sigma}


def area_downsample(images: Tensor, factor: int) -> Tensor:
    """Area filter: each pixel is the mean of factor × factor. [N, C, H, W] → [N, C, H / factor, W / factor]."""
    return F.avg_pool2d(images, factor)


def area_resize(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Area filter to any smaller size: each pixel is the mean of what it covers. [N, C, H, W] → [N, C, *size]."""
    height, width = images.shape[2:]
    if (height, width) == size:
        return images
    if height % size[0] == 0 and width % size[1] == 0:
        return F.avg_pool2d(images, (height // size[0], width // size[1]))
    # In float64, which autocast and TF32 leave alone; MPS has none.
    exact = images if images.device.type == "mps" else images.double()
    rows, columns = (_overlaps(*lengths).to(exact) for lengths in ((height, size[0]), (width, size[1])))
    return torch.einsum("hr,ncrk,wk->nchw", rows, exact, columns).to(images.dtype)


@functools.lru_cache(maxsize=32)
def _overlaps(length: int, new: int) -> Tensor:
    """[new, length] float64: the share of each old pixel in each new one; each row sums to 1."""
    ends = torch.arange(new + 1, dtype=torch.float64)[:, None] * length / new
    old = torch.arange(length, dtype=torch.float64)
    covered = (torch.minimum(ends[1:], old + 1) - torch.maximum(ends[:-1], old)).clamp(min=0)
    return covered * (new / length)


def blur(images: Tensor, sigma: Tensor, largest: int = BLUR_RADIUS, radius: Tensor | None = None) -> Tensor:
    """Gaussian blur with replicated borders.

    images:  [N, C, H, W].
    sigma:   [N] in pixels, 0 = no blur.
    largest: radius of the largest kernel, 2 · radius + 1 pixels wide and high.
    radius:  [N] the images' own; None = ``largest``.
    """
    height, width = images.shape[2:]
    offsets = torch.arange(-largest, largest + 1, device=images.device)
    weights = torch.exp(-offsets.square() / (2 * sigma.float().clamp(min=1e-3).square())[:, None])
    if radius is not None:
        weights = weights * (offsets.abs() <= radius[:, None])
    taps = (weights / weights.sum(1, keepdim=True)).to(images.dtype).T[:, :, None, None, None]  # [taps, N, 1, 1, 1]
    # Sums instead of a convolution, which autocast and TF32 would round, unblurred images included.
    padded = F.pad(images, [largest] * 4, mode="replicate")
    rows = functools.reduce(torch.add, (tap * padded[:, :, k : k + height] for k, tap in enumerate(taps)))
    return functools.reduce(torch.add, (tap * rows[..., k : k + width] for k, tap in enumerate(taps)))


def _cosine_angle(level: Tensor) -> Tensor:
    """A cosine schedule (Nichol & Dhariwal 2021) in continuous time."""
    return level * (math.pi / 2)


def _linear_angle(level: Tensor) -> Tensor:
    """A linear schedule (Ho et al. 2020) in continuous time (Song et al. 2021a, equation 33): ᾱ = cos² of this."""
    return torch.acos(torch.exp(-0.5 * (0.1 * level + 9.95 * level.square())))


#: Level [N] in [0, 1] → the angle whose cosine and sine are the shares of image and noise.
NOISE_CURVES = {"cosine": _cosine_angle, "linear": _linear_angle}


def add_noise(images: Tensor, level: Tensor, noise: Tensor, curve: str = "cosine") -> Tensor:
    """cos(angle) images + sin(angle) noise, which preserves the variance; ``curve``: level → angle (NOISE_CURVES).
    images, noise: [N, C, H, W]; level: [N] in [0, 1]."""
    angle = NOISE_CURVES[curve](level).to(images.dtype)[:, None, None, None]
    return angle.cos() * images + angle.sin() * noise
