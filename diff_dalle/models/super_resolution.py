"""What makes a generator an up-sampler: it also sees the image that is to be enlarged, and how that was degraded."""

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

LEVEL_SCALE = 1000.0  # levels from 0 to 1 are embedded like timesteps from 0 to 1000


@dataclass(frozen=True)
class LowResConfig:
    """Up-sampling"""

    small_size: int = option(0, "side in pixels of the image that an up-sampler enlarges to image_size, of which it "
                                "must be a divisor; 0 = a base generator, which starts from nothing")  # fmt: skip
    low_res_skip: bool = option(False, "let an up-sampler predict what the enlarged image lacks, instead of all of it: "
                                       "learns much sooner; for prediction x_start")  # fmt: skip

    def __post_init__(self):
        if self.small_size < 0:
            raise InputError(f"small_size is {self.small_size}, but must not be negative")
        if self.low_res_skip and not self.small_size:
            raise InputError("low_res_skip is for up-samplers, but this is a base generator: give --small_size, or "
                             "leave it out")  # fmt: skip

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


def enlarged(cond: Conditioning, size: Sequence[int]) -> Tensor:
    """The low-resolution image, resized bilinearly to ``size`` (height, width), of any size before: [N, C, *size].

    InputError when it, or what was done to it, is missing.
    """
    if cond.low_res is None or cond.low_res_level is None or cond.low_res_blur is None:
        raise InputError("an up-sampler needs the image to be enlarged, but cond lacks low_res, low_res_level or "
                         "low_res_blur")  # fmt: skip
    if cond.low_res.shape[2:] == tuple(size):
        return cond.low_res
    return F.interpolate(cond.low_res, tuple(size), mode="bilinear", align_corners=False)
