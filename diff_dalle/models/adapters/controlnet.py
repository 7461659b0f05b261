"""ControlNets (Zhang et al. 2023): networks that steer a frozen denoiser by a control, such as a picture's edges.

That of a pixel generator is a trainable copy of its U-Net's encoder, or of the first half of its transformer's blocks
(Chen et al. 2024, PixArt-δ).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...batch import CONTROL_HINT, Conditioning
from ...config import Fault, InputError, quantity, settings
from ..generator import Generator, GeneratorConfig
from ..layers import zero_init
from ..options import width_option
from ..transformer import TransformerTrunk
from ..unet import UNetEncoder


class ControlNet(nn.Module, ABC):
    """Makes what is added to the feature maps of a base network: 0 at initialization.

    control_channels: channels of the control.
    """

    def __init__(self, control_channels: int):
        super().__init__()
        if control_channels < 1:
            raise InputError(Fault("control_channels", "must be at least 1", control_channels))
        self.control_channels = control_channels

    def encode(self, control: Tensor) -> Tensor:
        """The control [N, control_channels, H, W] in [0, 1] → the hint [N, …], which depends neither on x nor on t:
        sampling makes it once. InputError for another number of channels."""
        if control.dim() != 4 or control.shape[1] != self.control_channels:
            raise InputError(
                f"the control has the shape {tuple(control.shape)}, but the ControlNet takes "
                f"{quantity(self.control_channels, 'channel')}: give controls of the filter that it was trained with"
            )
        return self.encoded(control)

    @abstractmethod
    def encoded(self, control: Tensor) -> Tensor:
        """``encode`` without the check."""

    @abstractmethod
    def forward(self, hint: Tensor, x: Tensor, t: Tensor, cond: Conditioning) -> list[Tensor | None]:
        """The ``control`` argument of the base for the same x, t and cond, whose text is encoded."""

    @abstractmethod
    def start_from(self, base: nn.Module) -> None:
        """Copy what the initial weights are to share with the base's."""


class Controlled(nn.Module):
    """A denoiser steered by a ControlNet, called as the denoiser is. Samples without ``cond.control`` are the base's
    own; with an untrained ControlNet all of them are, bit for bit.

    base:  called as ``base(x, t, cond, control=…)``. It is not changed: who trains the ControlNet freezes it.
    scale: factor of what the ControlNet adds.
    """

    def __init__(self, base: nn.Module, controlnet: ControlNet, scale: float = 1.0):
        super().__init__()
        self.base, self.controlnet, self.scale = base, controlnet, scale

    @property
    def config(self) -> Any:
        """The base's."""
        return self.base.config

    def encode_text(self, cond: Conditioning) -> Conditioning:
        """``cond`` with its text encoded by the base, and with the hint in place of the control: what sampling computes
        once."""
        cond = cast("Callable[[Conditioning], Conditioning]", self.base.encode_text)(cond)
        if cond.control is None:
            return cond
        hint = self.controlnet.encode(cond.control)
        return replace(cond, control=None, extra={**cond.extra, CONTROL_HINT: hint})

    def forward(self, x: Tensor, t: Tensor, cond: Conditioning | None = None) -> Tensor:
        cond = self.encode_text(cond or Conditioning())
        hint = cond.extra.get(CONTROL_HINT)
        if hint is None:
            return self.base(x, t, cond)
        control = self.controlnet(hint, x, t, cond)
        if self.scale != 1:
            control = [None if each is None else self.scale * each for each in control]
        return self.base(x, t, cond, control=control)


@settings
class UnetControlConfig:
    """ControlNet"""

    hint_channels: int = width_option(64, "channels of the control's convolutions")


class UnetControlNet(ControlNet):
    """The encoder and middle block of the base, whose feature maps, after 1×1 convolutions with weights 0, are added to
    the skip connections and to the middle block's output of the base; or the first half of its transformer's blocks,
    whose image tokens are added to those of the base after the same block.

    The hint, convolutions of the control with a last one of weights 0, is added after the encoder's first layer.
    """

    entries = ("encode",)  # see ``units``

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
