"""What makes a generator an up-sampler: it also sees the image that is to be enlarged, and how that was degraded."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..batch import Conditioning
from ..config import option
from ..errors import InputError
from .layers import timestep_embedding

LEVEL_SCALE = 1000.0  # levels from 0 to 1 are embedded like timesteps from 0 to 1000


@dataclass(frozen=True)
class LowResConfig:
    """Up-sampling"""

    small_size: int = option(0, "side in pixels of the image that an up-sampler enlarges to image_size, of which it "
                                "must be a divisor; 0 = a base generator, which starts from nothing")  # fmt: skip

    def __post_init__(self):
        if self.small_size < 0:
            raise InputError(f"small_size is {self.small_size}, but must not be negative")

    def check_size(self, image_size: int) -> None:
        """InputError unless ``small_size`` can be enlarged to ``image_size``."""
        if self.small_size >= image_size:
            raise InputError(f"small_size is {self.small_size}, but must be smaller than image_size ({image_size})")
        if self.small_size and image_size % self.small_size:
            raise InputError(f"small_size is {self.small_size}, but must divide image_size ({image_size})")


class LevelEmbedding(nn.Module):
    """How strongly the low-resolution image was noised and blurred: cond → [N, emb_width], to be added to the
    timestep's embedding (Saharia et al. 2022, section 2.4)."""

    def __init__(self, channels: int, emb_width: int):
        super().__init__()
        self.channels = channels
        self.layers = nn.Sequential(nn.Linear(2 * channels, emb_width), nn.SiLU(), nn.Linear(emb_width, emb_width))

    def forward(self, cond: Conditioning) -> Tensor:
        levels = [cond.low_res_level, cond.low_res_blur]
        return self.layers(torch.cat([timestep_embedding(LEVEL_SCALE * level, self.channels) for level in levels], 1))


def with_low_res(x: Tensor, cond: Conditioning) -> Tensor:
    """x with the low-resolution image, resized bilinearly to its size, as further channels.

    x: [N, C, H, W]; cond.low_res: [N, C, h, w] of any size. Returns [N, 2C, H, W]. InputError when it is missing.
    """
    if cond.low_res is None or cond.low_res_level is None or cond.low_res_blur is None:
        raise InputError("an up-sampler needs the image to be enlarged, but cond lacks low_res, low_res_level or "
                         "low_res_blur")  # fmt: skip
    low_res = cond.low_res
    if low_res.shape[2:] != x.shape[2:]:
        low_res = F.interpolate(low_res, x.shape[2:], mode="bilinear", align_corners=False)
    return torch.cat([x, low_res.to(x.dtype)], 1)
