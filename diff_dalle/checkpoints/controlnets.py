"""ControlNets: what their checkpoints say, and their networks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..batch import Conditioning
from ..config import option, section
from ..images.control_filters.table import ControlConfig
from ..images.signal import PixelSignal, Signal
from ..models.adapters.controlnet import ControlNet
from ..models.adapters.latent_controlnet import LatentControlConfig, LatentControlNet
from ..models.adapters.unet_controlnet import UnetControlConfig, UnetControlNet
from ..models.generator import GeneratorConfig
from ..models.latent.stage_c import StageCConfig
from .probe import Probe, empty_images

#: The kind of base that ControlNets of each kind are for.
BASES = {"controlnet": "generator", "stage_c_controlnet": "stage_c"}
STRIDE = 8  # pixels per position of the feature maps in the probe


@dataclass(frozen=True)
class BaseRecord:
    """The base"""

    identity: str = option("", "identity of the weights of the base, which training records; empty = not known yet")
    image_size: int = option(0, "width and height in pixels of its images in training, which training records")


@dataclass(frozen=True)
class ControlNetSettings:
    """The settings required to sample with a ControlNet of a generator. ``model`` is the base's."""

    controlnet: UnetControlConfig = section(UnetControlConfig)
    control: ControlConfig = section(ControlConfig)
    model: GeneratorConfig = section(GeneratorConfig)
    base: BaseRecord = section(BaseRecord)


@dataclass(frozen=True)
class StageCControlNetSettings:
    """The settings required to sample with a ControlNet of stage C. ``model`` is the base's."""

    controlnet: LatentControlConfig = section(LatentControlConfig)
    control: ControlConfig = section(ControlConfig)
    model: StageCConfig = section(StageCConfig)
    base: BaseRecord = section(BaseRecord)


def build_unet_controlnet(settings: ControlNetSettings, vocab_size: int, trainee: str) -> UnetControlNet:
    return UnetControlNet(settings.controlnet, settings.model, settings.control.channels)


def build_latent_controlnet(settings: StageCControlNetSettings, vocab_size: int, trainee: str) -> LatentControlNet:
    return LatentControlNet(settings.controlnet, settings.model, settings.control.channels)


def unet_probe(settings: ControlNetSettings, trainee: str) -> Probe:
    unet, text = settings.model.unet, settings.model.text

    def forward(network: Any, images: int, side: int) -> Tensor:
        cond = Conditioning(labels=torch.zeros(images, dtype=torch.int64) if unet.num_classes else None)
        if width := text.enc_attn_dim:
            states = torch.zeros(images, text.text_length, width)
            mask = torch.ones(states.shape[:2], dtype=torch.bool)
            cond = replace(cond, text_states=states, text_pooled=torch.zeros(images, width), mask=mask)
        x = empty_images(images, settings.model.channels, side)
        return _outputs(network, empty_images(images, network.control_channels, side), x, cond)

    def with_checkpoint(value: bool) -> ControlNetSettings:
        return replace(settings, model=replace(settings.model, unet=replace(unet, use_checkpoint=value)))

    return Probe(
        (unet.image_size, unet.image_size), forward, "model.use_checkpoint", unet.use_checkpoint, with_checkpoint
    )


def latent_probe(settings: StageCControlNetSettings, trainee: str) -> Probe:
    """With controls of the size of the base's images. Activation checkpointing of the base changes nothing here."""

    def forward(network: Any, images: int, side: int) -> Tensor:
        x = empty_images(images, settings.model.channels, max(1, side // STRIDE))
        return _outputs(network, empty_images(images, network.control_channels, side), x, Conditioning())

    side = settings.base.image_size or 256
    return Probe((side, side), forward, "model.use_checkpoint", settings.model.use_checkpoint, lambda value: settings)


def _outputs(network: ControlNet, control: Tensor, x: Tensor, cond: Conditioning) -> Tensor:
    """All residuals as one tensor."""
    found = network(network.encode(control), x, torch.zeros(len(x)), cond)
    return torch.cat([each.flatten() for each in found if each is not None])


def controlnet_signal(settings: Any) -> Signal:
    return PixelSignal(3)


def controlnet_summary(settings: Any, names: Sequence[str]) -> list[str]:
    control, base = settings.control, settings.base
    return [
        f"steers the base {base.identity or '(not recorded)'} by controls of {control.channels} channels, which the "
        f"filter {control.controlnet_filter or '(none)'} makes with the parameters {control.controlnet_filter_params}"
    ]
