"""The ControlNet of a network of latents: a backbone, and a projection for each residual block that it steers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...batch import Conditioning
from ...config import Fault, InputError, option, quantity, section, settings
from ..latent.blocks import ChannelNorm
from ..latent.config import LatentUnetConfig
from ..latent.semantic import (
    EFFICIENTNET_CHANNELS,
    ConvBackbone,
    EfficientNetBackbone,
    SemanticAutoencoder,
    SemanticConfig,
    efficientnet,
)
from ..layers import zero_init
from ..options import blocks_option, width_option
from .controlnet import ControlNet

SLOPE = 0.2  # of all leaky ReLUs
COLORS = 3  # channels that the encoders of pictures were trained on


@settings
class BackboneConfig:
    """ControlNet backbone"""

    large_width: int = width_option(
        1024,
        "large: channels of its residual blocks; 16 times as many before them, 5/4 as many after",
        least=4,
        multiple_of=4,
    )
    large_blocks: int = blocks_option(8, "large: residual blocks", least=0)
    stem_padding: bool = option(
        True,
        "effnet: pad the first convolution of a control of other than 3 channels too; False = as published ControlNets",
    )
    semantic: SemanticConfig | None = option(None, "semantic: encoder it starts from, recorded by training")


class Backbone(nn.Module):
    """[N, control_channels, H, W] in [0, 1] → [N, channels, h, w].

    Attribute: ``channels``. encoder: the make of semantic encoder whose weights it starts from; "" = none.
    """

    channels: int
    layers: nn.Module
    encoder = ""

    def forward(self, control: Tensor) -> Tensor:
        return self.layers(control)

    def start_from(self, semantic: SemanticAutoencoder) -> None:
        """Copy a semantic encoder's weights, where this has the same network."""


class Simple(Backbone):
    """Two convolutions, at the resolution of the control."""

    def __init__(self, config: BackboneConfig, control_channels: int):
        super().__init__()
        self.channels, wide = control_channels, 4 * control_channels
        self.layers = nn.Sequential(
            nn.Conv2d(control_channels, wide, 3, padding=1),
            nn.LeakyReLU(SLOPE),
            nn.Conv2d(wide, control_channels, 3, padding=1),
        )


class Residual(nn.Sequential):
    """A residual block whose norms and activations come before its convolutions (He et al. 2016), as in the released
    networks."""

    is_block = True  # see ``units``

    def __init__(self, width: int):
        norms = [ChannelNorm(width, 1e-5, elementwise_affine=True) for _ in range(2)]
        convs = [nn.Conv2d(width, width, 3, padding=1) for _ in range(2)]
        super().__init__(norms[0], nn.GELU(), convs[0], norms[1], nn.GELU(), convs[1])

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class Large(Backbone):
    """A wide layer and residual blocks, at the resolution of the control: for latents."""

    def __init__(self, config: BackboneConfig, control_channels: int):
        super().__init__()
        width = config.large_width
        self.channels = 5 * width // 4
        self.layers = nn.Sequential(
            nn.Conv2d(control_channels, 16 * width, 1),
            nn.LeakyReLU(SLOPE),
            nn.Conv2d(16 * width, width, 1),
            *(Residual(width) for _ in range(config.large_blocks)),
            nn.Conv2d(width, self.channels, 1),
        )


class _Encoder(Backbone):
    """The features of an encoder of pictures, whose first layer takes the control's channels."""

    def __init__(self, encoder: nn.Module, channels: int, control_channels: int, padded: bool = True):
        super().__init__()
        self.channels, self.control_channels, self.network = channels, control_channels, encoder
        self.first = next(name for name, module in encoder.named_modules() if isinstance(module, nn.Conv2d))
        parent, _, name = self.first.rpartition(".")
        conv = encoder.get_submodule(self.first)
        assert isinstance(conv, nn.Conv2d)
        if control_channels != COLORS:
            adapted = nn.Conv2d(
                control_channels,
                conv.out_channels,
                conv.kernel_size,  # type: ignore[arg-type]
                conv.stride,  # type: ignore[arg-type]
                conv.padding if padded else 0,  # type: ignore[arg-type]
                bias=conv.bias is not None,
            )
            setattr(encoder.get_submodule(parent), name, adapted)

    def _load(self, state: Mapping[str, Tensor]) -> None:
        """Copy the weights of an encoder of colors: of its first layer, the planes of the first channels; further ones
        start at 0."""
        name, state = f"{self.first}.weight", dict(state)
        planes = state[name][:, : self.control_channels]
        missing = self.control_channels - planes.shape[1]
        state[name] = F.pad(planes, (0, 0, 0, 0, 0, missing))
        self.network.load_state_dict(state)


class Semantic(_Encoder):
    """Our own semantic encoder."""

    encoder = "conv"

    def __init__(self, config: BackboneConfig, control_channels: int):
        network = ConvBackbone(config.semantic or SemanticConfig())
        super().__init__(network, network.channels, control_channels)

    def start_from(self, semantic: SemanticAutoencoder) -> None:
        self._load(semantic.backbone.state_dict())

    def forward(self, control: Tensor) -> Tensor:
        return self.network(2 * control - 1)  # it was trained on pictures in [-1, 1]


class EfficientNet(_Encoder):
    """EfficientNetV2-S (Tan & Le 2021), trained in evaluation mode: the statistics of its norms stay as they are."""

    encoder = "efficientnet_v2_s"

    def __init__(self, config: BackboneConfig, control_channels: int):
        super().__init__(efficientnet().features.eval(), EFFICIENTNET_CHANNELS, control_channels, config.stem_padding)

    def train(self, mode: bool = True) -> EfficientNet:
        super().train(mode)
        self.network.eval()
        return self

    def start_from(self, semantic: SemanticAutoencoder) -> None:
        assert isinstance(semantic.backbone, EfficientNetBackbone)
        self._load(semantic.backbone.features.state_dict())

    def forward(self, control: Tensor) -> Tensor:
        return self.network(control.contiguous(memory_format=torch.channels_last))


#: By the names that files give them.
BACKBONES: dict[str, type[Backbone]] = {
    "effnet": EfficientNet,
    "simple": Simple,
    "large": Large,
    "semantic": Semantic,
}


@settings
class LatentControlConfig:
    """ControlNet"""

    controlnet_blocks: tuple[int, ...] = blocks_option(
        (),
        "indices of the residual blocks that it steers: blocks C in forward order, repeats included, from 0",
        required=True,
        least=0,
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

    entries = ("encode",)  # see ``units``

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
