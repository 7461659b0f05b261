"""The ControlNet of a pixel generator: a trainable copy of its U-Net's encoder (Zhang et al. 2023), or of the first
half of its transformer's blocks (Chen et al. 2024, PixArt-δ)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...batch import Conditioning
from ...config import InputError, option, settings
from ...config.bounds import MAX_WIDTH
from ..generator import Generator, GeneratorConfig
from ..layers import zero_init
from ..transformer import TransformerTrunk
from ..unet import UNetEncoder
from .controlnet import ControlNet


@settings
class UnetControlConfig:
    """ControlNet"""

    hint_channels: int = option(64, "channels of the control's convolutions", least=1, most=MAX_WIDTH)


class UnetControlNet(ControlNet):
    """The encoder and middle block of the base, whose feature maps, after 1×1 convolutions with weights 0, are added to
    the skip connections and to the middle block's output of the base; or the first half of its transformer's blocks,
    whose image tokens are added to those of the base after the same block.

    The hint, convolutions of the control with a last one of weights 0, is added after the encoder's first layer.
    """

    def __init__(self, config: UnetControlConfig, base: GeneratorConfig, control_channels: int):
        super().__init__(control_channels)
        if base.is_upsampler:
            raise InputError(
                "the base is an upsampler (small_size), which its low-resolution image controls: give a base generator"
            )
        if base.inpaint:
            raise InputError(
                "the base is an inpainting network (inpaint), which the known part of the image controls: give a base "
                "generator without it"
            )
        self.patch_size, width = base.unet.patch_size, config.hint_channels
        inputs = base.unet, base.channels, base.text.enc_attn_dim
        self.encoder: UNetEncoder | TransformerTrunk = (
            TransformerTrunk(*inputs, depth=base.unet.steered) if base.unet.is_transformer else UNetEncoder(*inputs)
        )
        channels = [*self.encoder.skip_channels, self.encoder.channels]
        self.hint = nn.Sequential(
            nn.Conv2d(control_channels * self.patch_size**2, width, 3, padding=1),
            nn.SiLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.SiLU(),
            zero_init(nn.Conv2d(width, channels[0], 3, padding=1)),
        )
        self.zero_convs = nn.ModuleList(zero_init(nn.Conv2d(each, each, 1)) for each in channels)

    def start_from(self, base: nn.Module) -> None:
        assert isinstance(base, Generator)
        theirs, own = base.denoiser.encoder.state_dict(), self.encoder.state_dict()
        self.encoder.load_state_dict({name: theirs[name] for name in own})

    def encoded(self, control: Tensor) -> Tensor:
        height, width = control.shape[2:]
        if height % self.patch_size or width % self.patch_size:
            raise InputError(
                f"the control has {width}×{height} pixels, but must have those of the images, multiples of "
                f"{self.patch_size} (patch_size)"
            )
        patches = F.pixel_unshuffle(control, self.patch_size)
        return self.hint(patches.contiguous(memory_format=torch.channels_last))

    def forward(self, hint: Tensor, x: Tensor, t: Tensor, cond: Conditioning) -> list[Tensor | None]:
        """One tensor for each skip connection, and one for the middle block; or one for each block. InputError for a
        control of another size than x."""
        size = tuple(self.patch_size * length for length in hint.shape[2:])
        if size != x.shape[2:]:
            raise InputError(
                f"the control has {size[1]}×{size[0]} pixels, but the images have {x.shape[3]}×{x.shape[2]}: give one "
                "of the same size"
            )
        middle, skips, _ = self.encoder(x, t, cond, hint)
        maps = [*skips, middle]
        return [conv(each) for conv, each in zip(self.zero_convs, maps, strict=True)]
