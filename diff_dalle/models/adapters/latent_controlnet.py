"""The ControlNet of a network of latents: a backbone, and a projection for each residual block that it steers."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from ...batch import Conditioning
from ...config import Fault, InputError, option, quantity, section, settings
from ...config.bounds import MAX_BLOCKS
from ..latent.config import LatentUnetConfig
from ..layers import zero_init
from .control_backbones import BACKBONES, SLOPE, BackboneConfig
from .controlnet import ControlNet


@settings
class LatentControlConfig:
    """ControlNet"""

    controlnet_blocks: tuple[int, ...] = option(
        (),
        "indices of the residual blocks that it steers: blocks C in forward order, repeats included, from 0",
        required=True,
        least=0,
        most=MAX_BLOCKS,
    )
    controlnet_bottleneck_mode: str = option(
        "effnet",
        "encoder of the control: effnet (EfficientNetV2-S) or semantic (our own), which start from the semantic "
        "encoder's weights and take pictures; simple or large, which take small maps",
        choices=BACKBONES,
    )
    backbone: BackboneConfig = section(BackboneConfig)

    def faults(self) -> Iterator[Fault]:
        if len(set(self.controlnet_blocks)) < len(self.controlnet_blocks):
            yield Fault.of(self, "controlnet_blocks", "must be different numbers from 0 on")

    def check_blocks(self, base: LatentUnetConfig) -> None:
        """InputError for no blocks, and for those that the base does not have."""
        if not self.controlnet_blocks:
            raise InputError(Fault("controlnet_blocks", "is empty, but must name at least one residual block"))
        count, given = len(base.residual_widths), max(self.controlnet_blocks)
        if given >= count:
            blocks = f"{quantity(count, 'residual block')}, numbered from 0 to {count - 1}"
            raise InputError(Fault("controlnet_blocks", f"has {given}, but the base has {blocks}: leave it out"))


class Projection(nn.Sequential):
    """Feature map → what is added to the input of a residual block, 0 at initialization."""

    def __init__(self, channels: int, width: int):
        super().__init__(
            nn.Conv2d(channels, channels, 1, bias=False),
            nn.LeakyReLU(SLOPE),
            zero_init(nn.Conv2d(channels, width, 1, bias=False)),
        )


class LatentControlNet(ControlNet):
    """What it adds depends on the control alone. Feature maps have their own resolution; the base resizes them.

    blocks: the residual blocks that it steers, in the order of the settings.
    """

    def __init__(self, config: LatentControlConfig, base: LatentUnetConfig, control_channels: int):
        super().__init__(control_channels)
        config.check_blocks(base)
        widths = base.residual_widths
        self.backbone = BACKBONES[config.controlnet_bottleneck_mode](config.backbone, control_channels)
        self.projections = nn.ModuleDict(
            {str(i): Projection(self.backbone.channels, widths[i]) for i in sorted(config.controlnet_blocks)}
        )
        self.blocks, self.length = config.controlnet_blocks, max(config.controlnet_blocks) + 1

    def start_from(self, base: nn.Module) -> None:
        """Nothing is shared with the base; ``backbone.start_from`` is about the semantic encoder."""

    def encoded(self, control: Tensor) -> Tensor:
        return self.backbone(control)

    def forward(self, hint: Tensor, x: Tensor, t: Tensor, cond: Conditioning) -> list[Tensor | None]:
        """One tensor for each block up to the last that it steers, None for the others."""
        found: list[Tensor | None] = [None] * self.length
        for number, projection in self.projections.items():
            found[int(number)] = projection(hint)
        return found
