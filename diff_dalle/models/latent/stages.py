"""Stages B and C: C makes semantic latents of text, and B makes stage A's latents from these and pooled text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ...batch import Conditioning
from ...config import Fault, InputError, option, quantity, settings
from ..options import width_option
from .blocks import resized_to
from .conditions import MapCondition, checked_map
from .config import LatentTextConfig, LatentUnetConfig, redefined
from .unet import LatentUnet


@settings
class StageBConfig(LatentUnetConfig):
    """Stage B"""

    patch_size: int = redefined("patch_size", 2)
    widths: tuple[int, ...] = width_option(
        (320, 640, 1280, 1280),
        "channels of each level, each at half the resolution of the previous one",
    )
    heads: tuple[int, ...] = redefined("heads", (0, 0, 20, 20))
    levels: tuple[str, ...] = redefined("levels", ("CT", "CT", "CTA", "CTA"))
    down_blocks: tuple[int, ...] = redefined("down_blocks", (2, 6, 28, 6))
    up_blocks: tuple[int, ...] = redefined("up_blocks", (6, 28, 6, 2))
    down_repeats: tuple[int, ...] = redefined("down_repeats", (1, 1, 1, 1))
    up_repeats: tuple[int, ...] = redefined("up_repeats", (3, 3, 2, 2))
    dropout: tuple[float, ...] = redefined("dropout", (0.0, 0.0, 0.1, 0.1))
    cond_width: int = redefined("cond_width", 1280)
    micro_conditions: tuple[str, ...] = redefined("micro_conditions", ("sca",))
    semantic_channels: int = width_option(16, "channels of the semantic map")
    pixel_channels: int = width_option(
        3, "channels of a picture to upsample, black if not given; 0 = takes none", least=0
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


@settings
class StageCConfig(LatentUnetConfig):
    """Stage C"""

    channels: int = width_option(16, "channels of the semantic latents")
    switch_level: tuple[bool, ...] = option(
        (False,), "halve the resolution after each level but the last; one for all or for each"
    )
    text_width: int = width_option(
        1280,
        "width of the CLIP's text states; 0 = not conditioned on them",
        needs=("enc_attn_dim", "0"),
        least=0,
    )
    image_width: int = width_option(768, "width of the image embedding; 0 = not conditioned on it", least=0)

    def faults(self) -> Iterator[Fault]:
        yield from super().faults()
        if len(self.switch_level) not in (1, self.depth - 1):
            wanted = f"1, or one for each of the {quantity(self.depth - 1, 'transition')} between levels"
            found = quantity(len(self.switch_level), "value")
            yield Fault("switch_level", f"has {found}, but must have {wanted}")

    @property
    def transitions(self) -> tuple[str, ...]:
        switches = self.switch_level * (self.depth - 1 if len(self.switch_level) == 1 else 1)
        return tuple("resized" if switch else "same" for switch in switches)

    @property
    def states_width(self) -> int:
        return self.text.enc_attn_dim or self.text_width

    @property
    def embedding_width(self) -> int:
        return self.image_width


#: The released sizes, by their names there, and one for two CPU cores.
STAGE_C_SIZES = {
    "3.6B": StageCConfig(),
    "1B": StageCConfig(widths=(1536, 1536), heads=(24, 24), down_blocks=(4, 12), up_blocks=(12, 4), cond_width=1536),
    "tiny": StageCConfig(
        widths=(128, 128),
        heads=(4, 4),
        down_blocks=(1, 1),
        up_blocks=(1, 1),
        dropout=(0.0, 0.0),
        cond_width=128,
        vector_tokens=2,
        text=LatentTextConfig(enc_attn_dim=128, enc_depth=2, enc_heads=4, text_length=24),
        image_width=0,
    ),
}


class StageC(LatentUnet):
    """A denoiser of semantic latents, conditioned on text states, pooled text and an image embedding, which is 0 where
    none is given."""

    config: StageCConfig


def zero_inputs(config: LatentUnetConfig, images: int, height: int, width: int) -> tuple[Tensor, Tensor, Conditioning]:
    """x, t and cond, on torch's default device, for latents of this size: captions of full length where the network
    reads them itself, and every condition that costs anything. (A map costs what its resized version costs.) With keys,
    as in training: torch's own dropout would save a mask of numbers."""
    x, t = torch.zeros(images, config.channels, height, width), torch.zeros(images)
    cond, length = Conditioning(dropout_keys=torch.zeros(images, dtype=torch.int64)), config.text.text_length
    if config.text.enc_attn_dim:
        tokens = torch.zeros(images, length, dtype=torch.int64)
        cond = replace(cond, tokens=tokens, mask=torch.ones_like(tokens, dtype=torch.bool))
    else:
        if config.states_width:
            cond = replace(cond, text_states=torch.zeros(images, length, config.states_width))
        if config.vector_width:
            cond = replace(cond, text_pooled=torch.zeros(images, config.vector_width))
    if isinstance(config, StageBConfig):
        cond = replace(cond, semantic=torch.zeros(images, config.semantic_channels, 1, 1))
    return x, t, cond
