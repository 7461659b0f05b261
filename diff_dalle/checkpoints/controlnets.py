"""ControlNets: what their checkpoints say, and their networks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..batch import Conditioning
from ..config import option, section, settings
from ..config.bounds import MAX_SIDE
from ..images.control_filters.table import ControlConfig
from ..images.signal import PixelSignal
from ..models.adapters.controlnet import UnetControlConfig, UnetControlNet
from ..models.adapters.latent_controlnet import LatentControlConfig, LatentControlNet
from ..models.generator import GeneratorConfig
from ..models.latent.stages import StageCConfig
from .kind import NetworkKind, empty_images, empty_text

STRIDE = 8  # pixels per position of the feature maps in the probe


@settings
class BaseRecord:
    """The base"""

    identity: str = option("", "identity of the base's weights, recorded by training; empty = not known yet")
    image_size: int = option(
        0, "width and height of its training images in pixels, recorded by training", most=MAX_SIDE
    )


class _ControlNetKind(NetworkKind):
    """What ControlNets share.

    of: the kind of their base, whose settings ``model`` has.
    """

    of: ClassVar[str]
    does = "text-to-image"
    role = "controlnet"
    signal = PixelSignal(3)
    control: ControlConfig
    base: BaseRecord

    @abstractmethod
    def inputs(self, images: int, side: int) -> tuple[Tensor, Conditioning]:
        """What the network reads beside controls, which have ``side`` pixels: x_t and what the base is conditioned
        on."""

    def forward(self, network: Any, images: int, side: int, trainee: str) -> Tensor:
        """All residuals as one tensor."""
        control = network.encode(empty_images(images, network.control_channels, side))
        x, cond = self.inputs(images, side)
        found = network(control, x, torch.zeros(images), cond)
        return torch.cat([each.flatten() for each in found if each is not None])

    def summary(self, names: Sequence[str]) -> list[str]:
        control, base = self.control, self.base
        return [
            f"steers the base {base.identity or '(not recorded)'} by controls of {control.channels} channels, which "
            f"the filter {control.controlnet_filter or '(none)'} makes with the parameters "
            f"{control.controlnet_filter_params}"
        ]


@settings
class ControlNetSettings(_ControlNetKind):
    """A ControlNet of a generator."""

    name = "controlnet"
    network = UnetControlNet
    title = "ControlNet of a generator"
    of = "generator"
    image_size = "model.unet.image_size"
    checkpointing = "model.unet.use_checkpoint"

    controlnet: UnetControlConfig = section(UnetControlConfig)
    control: ControlConfig = section(ControlConfig)
    model: GeneratorConfig = section(GeneratorConfig)
    base: BaseRecord = section(BaseRecord)

    def build(self, vocab_size: int = 0, trainee: str = "") -> UnetControlNet:
        return UnetControlNet(self.controlnet, self.model, self.control.channels)

    def inputs(self, images: int, side: int) -> tuple[Tensor, Conditioning]:
        found: dict[str, Any] = {}
        if width := self.model.text.enc_attn_dim:
            found = empty_text(images, self.model.text.text_length, width)
            found["text_pooled"] = torch.zeros(images, width)
        if self.model.unet.num_classes:
            found["labels"] = torch.zeros(images, dtype=torch.int64)
        return empty_images(images, self.model.channels, side), Conditioning(**found)


@settings
class StageCControlNetSettings(_ControlNetKind):
    """A ControlNet of stage C."""

    name = "stage_c_controlnet"
    network = LatentControlNet
    title = "ControlNet of stage C"
    of = "stage_c"

    controlnet: LatentControlConfig = section(LatentControlConfig)
    control: ControlConfig = section(ControlConfig)
    model: StageCConfig = section(StageCConfig)
    base: BaseRecord = section(BaseRecord)

    def build(self, vocab_size: int = 0, trainee: str = "") -> LatentControlNet:
        return LatentControlNet(self.controlnet, self.model, self.control.channels)

    def sizes(self, trainee: str) -> tuple[int, int]:
        """Those of the base's images."""
        side = self.base.image_size or 256
        return side, side

    def inputs(self, images: int, side: int) -> tuple[Tensor, Conditioning]:
        return empty_images(images, self.model.channels, max(1, side // STRIDE)), Conditioning()

    def with_checkpoint(self, value: bool) -> StageCControlNetSettings:
        """Activation checkpointing of the base changes nothing here."""
        return self
