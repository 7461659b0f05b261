"""ControlNets: what their checkpoints say, and their networks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..batch import Conditioning
from ..config import option, section, settings
from ..images.control_filters.table import ControlConfig
from ..images.signal import PixelSignal, Signal
from ..models.adapters.controlnet import ControlNet
from ..models.adapters.latent_controlnet import LatentControlConfig, LatentControlNet
from ..models.adapters.unet_controlnet import UnetControlConfig, UnetControlNet
from ..models.generator import GeneratorConfig
from ..models.latent.stage_c import StageCConfig
from .kind import NetworkKind
from .probe import Probe, empty_images

STRIDE = 8  # pixels per position of the feature maps in the probe


@settings
class BaseRecord:
    """The base"""

    identity: str = option("", "identity of the weights of the base, which training records; empty = not known yet")
    image_size: int = option(0, "width and height in pixels of its images in training, which training records")


class _ControlNetKind(NetworkKind):
    """What ControlNets share.

    of: the kind of their base, whose settings ``model`` has.
    """

    of: ClassVar[str]
    does = "text-to-image"
    role = "controlnet"
    control: ControlConfig
    base: BaseRecord

    @property
    def signal(self) -> Signal:
        return PixelSignal(3)

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
    title = "ControlNet of a generator"
    of = "generator"

    controlnet: UnetControlConfig = section(UnetControlConfig)
    control: ControlConfig = section(ControlConfig)
    model: GeneratorConfig = section(GeneratorConfig)
    base: BaseRecord = section(BaseRecord)

    def build(self, vocab_size: int = 0, trainee: str = "") -> UnetControlNet:
        return UnetControlNet(self.controlnet, self.model, self.control.channels)

    def probe(self, trainee: str = "") -> Probe:
        unet, text = self.model.unet, self.model.text

        def forward(network: Any, images: int, side: int) -> Tensor:
            cond = Conditioning(labels=torch.zeros(images, dtype=torch.int64) if unet.num_classes else None)
            if width := text.enc_attn_dim:
                states = torch.zeros(images, text.text_length, width)
                mask = torch.ones(states.shape[:2], dtype=torch.bool)
                cond = replace(cond, text_states=states, text_pooled=torch.zeros(images, width), mask=mask)
            x = empty_images(images, self.model.channels, side)
            return _outputs(network, empty_images(images, network.control_channels, side), x, cond)

        def with_checkpoint(value: bool) -> ControlNetSettings:
            return replace(self, model=replace(self.model, unet=replace(unet, use_checkpoint=value)))

        sizes = (unet.image_size, unet.image_size)
        return Probe(sizes, forward, "model.use_checkpoint", unet.use_checkpoint, with_checkpoint)


@settings
class StageCControlNetSettings(_ControlNetKind):
    """A ControlNet of stage C."""

    name = "stage_c_controlnet"
    title = "ControlNet of stage C"
    of = "stage_c"

    controlnet: LatentControlConfig = section(LatentControlConfig)
    control: ControlConfig = section(ControlConfig)
    model: StageCConfig = section(StageCConfig)
    base: BaseRecord = section(BaseRecord)

    def build(self, vocab_size: int = 0, trainee: str = "") -> LatentControlNet:
        return LatentControlNet(self.controlnet, self.model, self.control.channels)

    def probe(self, trainee: str = "") -> Probe:
        """With controls of the size of the base's images. Activation checkpointing of the base changes nothing here."""

        def forward(network: Any, images: int, side: int) -> Tensor:
            x = empty_images(images, self.model.channels, max(1, side // STRIDE))
            return _outputs(network, empty_images(images, network.control_channels, side), x, Conditioning())

        side = self.base.image_size or 256
        return Probe((side, side), forward, "model.use_checkpoint", self.model.use_checkpoint, lambda value: self)


def _outputs(network: ControlNet, control: Tensor, x: Tensor, cond: Conditioning) -> Tensor:
    """All residuals as one tensor."""
    found = network(network.encode(control), x, torch.zeros(len(x)), cond)
    return torch.cat([each.flatten() for each in found if each is not None])
