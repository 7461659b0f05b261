"""Super-resolution conditioning (Saharia et al. 2022): the low-resolution image, its noise level and its blur."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..batch import Conditioning
from ..config import Fault, InputError, named, option, settings
from ..config.bounds import MAX_SIDE
from .layers import timestep_embedding

LEVEL_SCALE = 1000.0  # levels in [0, 1] are embedded like timesteps in [0, 1000]


@settings
class LowResConfig:
    """Upsampling"""

    small_size: int = option(
        0,
        "input resolution of an upsampler in pixels, a divisor of image_size; 0 = base generator",
        least=0,
        most=MAX_SIDE,
    )
    low_res_skip: bool = option(
        False,
        "upsamplers: predict the residual to the bilinearly upsampled input, which converges much faster; "
        "requires prediction x_start",
    )
    low_res_levels: bool = option(
        True,
        "upsamplers: condition on the noise level and blur of the input; False = as in Guided-Diffusion and GLIDE",
    )

    def faults(self) -> Iterator[Fault]:
        for name, usual in (("low_res_skip", False), ("low_res_levels", True)):
            if getattr(self, name) != usual and not self.small_size:
                remedy = f"set {named('small_size')}, or {named(name)} {usual}"
                yield Fault(name, f"is for upsamplers, but this is a base generator: {remedy}")


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
