"""Super-resolution conditioning (Saharia et al. 2022): the low-resolution image, its noise level and its blur."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..batch import Conditioning
from ..config import option
from ..errors import InputError
from .layers import timestep_embedding

LEVEL_SCALE = 1000.0  # levels in [0, 1] are embedded like timesteps in [0, 1000]


@dataclass(frozen=True)
class LowResConfig:
    """Upsampling"""

    small_size: int = option(
        0, "input resolution of an upsampler in pixels, a divisor of image_size; 0 = base generator"
    )
    low_res_skip: bool = option(
        False,
        "upsamplers: predict the residual to the bilinearly upsampled input, which converges much faster; "
        "requires prediction x_start",
    )
    low_res_levels: bool = option(
        True,
        "upsamplers: tell the network the noise level and blur of its input; False = as in Guided-Diffusion and GLIDE",
    )

    def __post_init__(self):
        if self.small_size < 0:
            raise InputError(f"small_size is {self.small_size}, but must be at least 0")
        if self.low_res_skip and not self.small_size:
            raise InputError(
                "low_res_skip is for upsamplers, but this is a base generator: set --small_size, or "
                "--low_res_skip False"
            )

        if not self.low_res_levels and not self.small_size:
            raise InputError(
                "low_res_levels is for upsamplers, but this is a base generator: set --small_size, or leave it out"
            )

    def check_size(self, image_size: int) -> None:
        """InputError unless ``small_size`` is 0 or a proper divisor of ``image_size``."""
        if self.small_size >= image_size:
            raise InputError(f"small_size is {self.small_size}, but must be smaller than image_size ({image_size})")
        if self.small_size and image_size % self.small_size:
            raise InputError(f"small_size is {self.small_size}, but must divide image_size ({image_size})")


class LevelEmbedding(nn.Module):
    """Embeds the noise level and blur of the low-resolution image: cond → [N, emb_width], which is added to the
    timestep embedding (Saharia et al. 2022, §2.4)."""

    def __init__(self, channels: int, emb_width: int):
        super().__init__()
        self.channels = channels
        self.layers = nn.Sequential(nn.Linear(2 * channels, emb_width), nn.SiLU(), nn.Linear(emb_width, emb_width))

    def forward(self, cond: Conditioning) -> Tensor:
        assert cond.low_res_level is not None and cond.low_res_blur is not None  # checked by upsample_low_res
        levels = (cond.low_res_level, cond.low_res_blur)
        return self.layers(torch.cat([timestep_embedding(LEVEL_SCALE * level, self.channels) for level in levels], 1))


def upsample_low_res(cond: Conditioning, size: Sequence[int]) -> Tensor:
    """``cond.low_res`` bilinearly resized to ``size`` (height, width): [N, C, *size].

    Raises InputError when ``cond`` lacks low_res, low_res_level or low_res_blur.
    """
    if cond.low_res is None or cond.low_res_level is None or cond.low_res_blur is None:
        raise InputError(
            "an upsampler requires a low-resolution image, but cond lacks low_res, low_res_level or low_res_blur"
        )
    return resized(cond.low_res, size)


def resized(images: Tensor, size: Sequence[int]) -> Tensor:
    """Images [N, C, h, w] bilinearly resized to ``size`` (height, width)."""
    if images.shape[2:] == tuple(size):
        return images
    return F.interpolate(images, tuple(size), mode="bilinear", align_corners=False)
