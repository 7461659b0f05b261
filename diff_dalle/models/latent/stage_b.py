"""Stage B: a latent U-Net that makes stage A's latents from a semantic map and pooled text."""

from __future__ import annotations

import torch
from torch import Tensor

from ...batch import Conditioning
from ...config import InputError, option, settings
from ...config.bounds import MAX_WIDTH
from .blocks import resized_to
from .conditions import MapCondition, checked_map
from .config import LatentUnetConfig, redefined
from .unet import LatentUnet


@settings
class StageBConfig(LatentUnetConfig):
    """Stage B"""

    patch_size: int = redefined("patch_size", 2)
    widths: tuple[int, ...] = option(
        (320, 640, 1280, 1280),
        "channels of each level, each at half the resolution of the previous one",
        least=1,
        most=MAX_WIDTH,
    )
    heads: tuple[int, ...] = redefined("heads", (0, 0, 20, 20))
    levels: tuple[str, ...] = redefined("levels", ("CT", "CT", "CTA", "CTA"))
    down_blocks: tuple[int, ...] = redefined("down_blocks", (2, 6, 28, 6))
    up_blocks: tuple[int, ...] = redefined("up_blocks", (6, 28, 6, 2))
    down_repeats: tuple[int, ...] = redefined("down_repeats", (1, 1, 1, 1))
    up_repeats: tuple[int, ...] = redefined("up_repeats", (3, 3, 2, 2))
    dropout: tuple[float, ...] = redefined("dropout", (0.0, 0.0, 0.1, 0.1))
    micro_conditions: tuple[str, ...] = redefined("micro_conditions", ("sca",))
    semantic_channels: int = option(16, "channels of the semantic map", least=1, most=MAX_WIDTH)
    pixel_channels: int = option(
        3, "channels of a picture to upsample, black if not given; 0 = takes none", least=0, most=MAX_WIDTH
    )


#: The released sizes, by their names there ("3B" has 1,563 million parameters), and one for two CPU cores.
STAGE_B_SIZES = {
    "3B": StageBConfig(),
    "700M": StageBConfig(
        widths=(320, 576, 1152, 1152),
        heads=(0, 9, 18, 18),
        down_blocks=(2, 4, 14, 4),
        up_blocks=(4, 14, 4, 2),
        up_repeats=(2, 2, 2, 2),
    ),
    "tiny": StageBConfig(
        widths=(64, 128),
        heads=(0, 4),
        levels=("CT", "CTA"),
        patch_size=1,
        down_blocks=(1, 1),
        up_blocks=(1, 1),
        down_repeats=(1, 1),
        up_repeats=(1, 1),
        dropout=(0.0, 0.0),
        cond_width=128,
        pooled_width=0,
        pixel_channels=0,
    ),
}


class StageB(LatentUnet):
    """A denoiser of stage A's latents, conditioned on ``cond.semantic`` (0 where it is dropped), pooled text, and
    ``cond.low_res``, a picture in [-1, 1] of any size.

    A missing semantic map is an InputError, a missing picture is black.
    """

    config: StageBConfig

    def __init__(self, config: StageBConfig, vocab_size: int = 0):
        super().__init__(config, vocab_size)
        width, use_checkpoint = config.widths[0], config.use_checkpoint
        self.semantic_mapper = MapCondition(config.semantic_channels, width, use_checkpoint)
        self.pixel_mapper = (
            MapCondition(config.pixel_channels, width, use_checkpoint) if config.pixel_channels else None
        )

    def add_maps(self, h: Tensor, cond: Conditioning) -> Tensor:
        if cond.semantic is None:
            raise InputError("stage B expects a semantic map, but cond has no semantic: zeros stand for none")
        semantic = checked_map(cond.semantic, self.config.semantic_channels, "the semantic map", "semantic_channels")
        h = h + self.semantic_mapper(resized_to(semantic, h.shape[2:]))
        if self.pixel_mapper is None:
            return h
        pixels = self._pixels(cond.low_res, h)
        return h + resized_to(self.pixel_mapper(pixels), h.shape[2:])

    def _pixels(self, low_res: Tensor | None, h: Tensor) -> Tensor:
        channels = self.config.pixel_channels
        if low_res is None:  # one position, because it is black everywhere
            return torch.zeros(len(h), channels, 1, 1, device=h.device)
        return (checked_map(low_res, channels, "low_res", "pixel_channels") + 1) / 2  # released weights see [0, 1]
