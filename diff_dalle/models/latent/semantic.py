"""The semantic encoder, whose latents stage C makes and stage B reads, with the previewer that decodes them."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...config import Fault, InputError, named, option, settings
from ...config.bounds import MAX_SIDE
from ..dinov2 import IMAGENET_MEAN, IMAGENET_STD
from ..norms import RunningNorm
from ..options import blocks_option, width_option
from ..precision import autocast_disabled
from .blocks import ChannelNorm, Context, ConvBlock, Transition, xavier

BACKBONES = ("conv", "efficientnet_v2_s")
STRIDES = (8, 16, 32)  # pixels per position
PATCH = 4  # pixels on each side that become a position of the first feature map of ``ConvBackbone``
EFFICIENTNET_CHANNELS = 1280


@settings
class SemanticConfig:
    """Semantic encoder and previewer"""

    backbone: str = option(
        "conv",
        "network before the projection to latents; efficientnet_v2_s = torchvision's, with frozen weights from a "
        "local file",
        choices=BACKBONES,
    )
    stride: int = option(32, "pixels per position of the latents: 8, 16 or 32; efficientnet_v2_s: 32", most=MAX_SIDE)
    semantic_channels: int = width_option(16, "channels of the latents")
    encoder_width: int = width_option(
        96,
        "channels of the encoder's first level, doubled at each further one",
        needs=("backbone", "conv"),
    )
    encoder_blocks: int = blocks_option(3, "blocks of each level of the encoder", needs=("backbone", "conv"))
    previewer_width: int = width_option(
        512,
        "channels of the previewer at the latents' resolution; a multiple of 4",
        least=4,
        multiple_of=4,
    )
    use_checkpoint: bool = option(
        False,
        "activation checkpointing: recompute the encoder's activations in the backward pass to save memory",
        free=True,
        needs=("backbone", "conv"),
    )

    def faults(self) -> Iterator[Fault]:
        if self.stride not in STRIDES:
            yield Fault.of(self, "stride", "must be 8, 16 or 32")
        if self.backbone != "conv" and self.stride != 32:
            yield Fault.of(self, "stride", f"must be 32 with {named('backbone')} {self.backbone}")


#: The released size, and one for two CPU cores and pictures of 64 pixels.
SEMANTIC_SIZES = {
    "released": SemanticConfig(backbone="efficientnet_v2_s"),
    "tiny": SemanticConfig(stride=8, encoder_width=32, encoder_blocks=2, previewer_width=128),
}


class ConvBackbone(nn.Module):
    """Patches, then levels of blocks C at half the resolution and twice the width each.

    Attribute: ``channels`` of the output.
    """

    def __init__(self, config: SemanticConfig):
        super().__init__()
        levels = STRIDES.index(config.stride) + 2
        widths = [config.encoder_width << i for i in range(levels)]
        self.channels, branches = widths[-1], levels * config.encoder_blocks
        self.in_conv = xavier(nn.Conv2d(3, widths[0], PATCH, stride=PATCH))
        self.transitions = nn.ModuleList(
            Transition(widths[i], widths[i + 1], "strided", up=False) for i in range(levels - 1)
        )
        self.blocks = nn.ModuleList(
            nn.ModuleList(
                ConvBlock(width, 0, 3, 0.0, branches, config.use_checkpoint) for _ in range(config.encoder_blocks)
            )
            for width in widths
        )
        self.norm = ChannelNorm(self.channels)

    def forward(self, images: Tensor) -> Tensor:
        """[N, 3, H, W] in [-1, 1] → [N, channels, H / stride, W / stride]."""
        nothing = Context(images.new_empty(0), None, None)
        h = self.in_conv(images)
        for i, blocks in enumerate(self.blocks):
            if i:
                h = self.transitions[i - 1](h)
            for block in blocks:  # type: ignore[attr-defined]  # a ModuleList
                h = block(h, nothing)
        return self.norm(h)


class EfficientNetBackbone(nn.Module):
    """The features of torchvision's EfficientNetV2-S (Tan & Le 2021), frozen and in evaluation mode. Its weights are
    those of a checkpoint or of a local file: see ``released.py``."""

    mean: Tensor
    std: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.channels = EFFICIENTNET_CHANNELS
        self.features = efficientnet().features.requires_grad_(False).eval()
        for name, values in (("mean", IMAGENET_MEAN), ("std", IMAGENET_STD)):
            self.register_buffer(name, torch.tensor(values).view(1, 3, 1, 1))

    def train(self, mode: bool = True) -> EfficientNetBackbone:
        """The features stay in evaluation mode."""
        super().train(mode)
        self.features.eval()
        return self

    def forward(self, images: Tensor) -> Tensor:
        """[N, 3, H, W] in [-1, 1] → [N, 1280, H / 32, W / 32]."""
        return self.features(((images + 1) / 2 - self.mean) / self.std)


def efficientnet() -> Any:
    """The network with random weights. InputError that says what to install."""
    try:
        models = importlib.import_module("torchvision.models")
    except ModuleNotFoundError:
        raise InputError(
            "the backbone efficientnet_v2_s requires the package torchvision: pip install 'diff_dalle[vision]'"
        ) from None
    except Exception as error:  # torchvision raises RuntimeError, of operators that torch does not have
        reason = str(error).partition("\n")[0]
        raise InputError(
            f"torchvision cannot be imported ({reason}), which the backbone efficientnet_v2_s requires: it must be "
            f"built for the installed torch {torch.__version__}; install both from one index"
        ) from error
    return models.efficientnet_v2_s(weights=None)


class SemanticAutoencoder(nn.Module):
    """Images [N, 3, H, W] in [-1, 1] → semantic latents [N, semantic_channels, H / stride, W / stride], of about mean 0
    and variance 1 in each channel → preview images [N, 3, 8 · H / stride, 8 · W / stride].

    ``latent_mean`` and ``latent_std`` [semantic_channels], measured at the end of training, are what the encoder's
    output is normalized by after its norm.
    """

    latent_mean: Tensor
    latent_std: Tensor

    def __init__(self, config: SemanticConfig):
        super().__init__()
        self.config, channels = config, config.semantic_channels
        self.backbone = ConvBackbone(config) if config.backbone == "conv" else EfficientNetBackbone()
        self.mapper = xavier(nn.Conv2d(self.backbone.channels, channels, 1, bias=False))
        self.norm = RunningNorm(channels, affine=False)
        self.previewer = Previewer(channels, config.previewer_width)
        self.register_buffer("latent_mean", torch.zeros(channels))
        self.register_buffer("latent_std", torch.ones(channels))

    def encode(self, images: Tensor, moments: list[Tensor] | None = None) -> Tensor:
        """Images → latents, float32. moments: see ``RunningNorm``. Raises InputError for an image whose sides the
        stride does not divide."""
        stride, (height, width) = self.config.stride, images.shape[2:]
        if height % stride or width % stride:
            raise InputError(
                f"the images have {width}×{height} pixels, but the semantic encoder takes multiples of {stride} "
                "(stride): resize them"
            )
        h = self.backbone(images.contiguous(memory_format=torch.channels_last))
        z = self.norm(self.mapper(h), moments).float()
        return (z - self.latent_mean[:, None, None]) / self.latent_std[:, None, None]

    def feature_map(self, images: Tensor) -> Tensor:
        """``encode``, by the name that other encoders of patches have."""
        return self.encode(images)

    def preview(self, latents: Tensor) -> Tensor:
        """Latents → images, float32, not clipped."""
        return self.previewer(latents * self.latent_std[:, None, None] + self.latent_mean[:, None, None])

    def forward(self, images: Tensor, moments: list[Tensor] | None = None) -> Tensor:
        """Encode and preview, for training."""
        return self.preview(self.encode(images, moments))

    def thaw(self) -> SemanticAutoencoder:
        """Make everything trainable except torchvision's features, and return the network."""
        self.requires_grad_(True)
        if isinstance(self.backbone, EfficientNetBackbone):
            self.backbone.features.requires_grad_(False)
        return self

    @torch.no_grad()
    def calibrate(self, mean: Tensor, std: Tensor) -> None:
        """Give every channel of the latents mean 0 and variance 1. mean, std: [semantic_channels], what they are now,
        measured over ``encode``'s. Previews stay what they are."""
        self.latent_mean += self.latent_std * mean
        self.latent_std *= std


class Previewer(nn.Module):
    """Semantic latents [N, channels, h, w] → images [N, 3, 8 · h, 8 · w] in [-1, 1], not clipped.

    width: channels at the latents' resolution; each doubling halves them, down to a quarter.
    """

    full_precision = ("out_conv",)  # see ``for_inference``

    def __init__(self, channels: int, width: int):
        super().__init__()
        widths = (width, width // 2, width // 4, width // 4)
        convs: list[nn.Module] = [nn.Conv2d(channels, width, 1), nn.Conv2d(width, width, 3, padding=1)]
        for wide, narrow in itertools.pairwise(widths):
            convs += [nn.ConvTranspose2d(wide, narrow, 2, stride=2), nn.Conv2d(narrow, narrow, 3, padding=1)]
        self.convs = nn.ModuleList(convs)
        self.norms = nn.ModuleList(RunningNorm(each) for each in widths for _ in range(2))
        self.out_conv = nn.Conv2d(widths[-1], 3, 1)
        if not self.out_conv.weight.is_meta:  # without values, torch would import its compiler
            self._set_statistics(channels)

    @torch.no_grad()
    def _set_statistics(self, channels: int) -> None:
        """Those of normal latents, layer after layer.

        They stay. If they followed the training, those of each layer would be out of date as soon as those below it
        moved: in our trials the loss then jumped by factors of ten.
        """
        h = torch.randn(8, channels, 8, 8)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            moments: list[Tensor] = []
            h = F.gelu(conv(h))
            norm(h, moments)
            norm.update(moments[0])  # type: ignore[operator]  # a RunningNorm
            h = norm(h)

    def forward(self, latents: Tensor) -> Tensor:
        h = latents.contiguous(memory_format=torch.channels_last)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            h = norm(F.gelu(conv(h)))
        with autocast_disabled(h.device):
            return 2 * self.out_conv(h.float()) - 1  # released weights give [0, 1]
