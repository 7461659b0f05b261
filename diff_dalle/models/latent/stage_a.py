"""Stage A: an autoencoder whose latents have a quarter of the resolution (after the VQGAN of Rampas et al. 2022)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...config import Fault, InputError, named, option, settings
from ...config.bounds import MAX_BLOCKS, MAX_ROWS, MAX_WIDTH
from ..layers import Linear, recompute, to_image, to_tokens
from ..precision import autocast_disabled
from .blocks import ChannelNorm, xavier
from .quantizer import Quantizer
from .running_norm import RunningNorm

MAX_LEVELS = 14  # of which 16,384 pixels are one position


@settings
class StageAConfig:
    """Stage A"""

    levels: int = option(2, "levels; the latents have 1 / 2^levels of the resolution", least=1, most=MAX_LEVELS)
    width: int = option(384, "channels of the deepest level; half as many in each level above", least=1, most=MAX_WIDTH)
    bottleneck_blocks: int = option(12, "residual blocks at the decoder's deepest level", least=1, most=MAX_BLOCKS)
    latent_channels: int = option(4, "channels of the latents", least=1, most=MAX_WIDTH)
    codebook_size: int = option(8192, "entries of the codebook", least=1, most=MAX_ROWS)
    scale_factor: float = option(
        0.43,
        "initial divisor of the latents; the end of training sets it for unit variance",
        above=0,
    )
    use_checkpoint: bool = option(
        False, "activation checkpointing: recompute activations in the backward pass to save memory", free=True
    )

    def faults(self) -> Iterator[Fault]:
        multiple = 2 ** min(self.levels - 1, MAX_LEVELS)
        if self.width % multiple:
            yield Fault.of(self, "width", f"must be a multiple of {multiple} ({named('levels')})")

    @property
    def stride(self) -> int:
        """Pixels per position of the latents, on each side."""
        return 2**self.levels

    @property
    def widths(self) -> tuple[int, ...]:
        """Channels of each level, from the highest resolution to the lowest."""
        return tuple(self.width >> (self.levels - 1 - i) for i in range(self.levels))


#: The released size, and one for two CPU cores.
STAGE_A_SIZES = {
    "released": StageAConfig(),
    "tiny": StageAConfig(width=64, bottleneck_blocks=2, codebook_size=512),
}


class GatedBlock(nn.Module):
    """A depthwise convolution and an MLP, each between scalar gates that are 0 at initialization, so that the block
    starts as the identity."""

    def __init__(self, channels: int, use_checkpoint: bool):
        super().__init__()
        self.use_checkpoint, self.norm = use_checkpoint, ChannelNorm(channels)
        self.depthwise = xavier(nn.Conv2d(channels, channels, 3, padding=1, groups=channels, padding_mode="replicate"))
        self.linear_in, self.linear_out = xavier(Linear(channels, 4 * channels)), xavier(Linear(4 * channels, channels))
        self.gates = nn.Parameter(torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        """[N, channels, H, W] → the same shape."""
        return recompute(self.use_checkpoint, self._forward, x)

    def _forward(self, x: Tensor) -> Tensor:
        scale, shift, gate, mlp_scale, mlp_shift, mlp_gate = self.gates.unbind()
        h = self.depthwise(self.norm(x) * (1 + scale) + shift)
        x = x + gate * h.contiguous(memory_format=torch.channels_last)
        h = to_tokens(self.norm(x) * (1 + mlp_scale) + mlp_shift)
        return x + mlp_gate * to_image(self.linear_out(F.gelu(self.linear_in(h))), x.shape[2:])


class Reconstruction(NamedTuple):
    """images:     [N, 3, H, W] float32, not clipped.
    z:             [N, latent_channels, h, w] float32, the encoder's output.
    indices:       [N, h, w], the nearest entries of the codebook.
    codebook_loss, commitment: [N], see ``Quantized``."""

    images: Tensor
    z: Tensor
    indices: Tensor
    codebook_loss: Tensor
    commitment: Tensor


class StageA(nn.Module):
    """Images [N, 3, H, W] in [-1, 1] ↔ latents [N, latent_channels, H / stride, W / stride] of about variance 1.

    The latents are continuous. The codebook regularizes them in training, where a share of the samples is quantized.
    """

    full_precision = ("out_conv",)  # see ``cast_weights``
    scale_factor: Tensor

    def __init__(self, config: StageAConfig):
        super().__init__()
        self.config = config
        widths, on = config.widths, config.use_checkpoint
        self.in_conv = nn.Conv2d(12, widths[0], 1)
        self.down_blocks, self.up_blocks = nn.ModuleList(), nn.ModuleList()
        for i, width in enumerate(widths):
            if i:
                self.down_blocks.append(nn.Conv2d(widths[i - 1], width, 4, stride=2, padding=1))
            self.down_blocks.append(GatedBlock(width, on))
        self.to_latents = nn.Conv2d(widths[-1], config.latent_channels, 1, bias=False)
        self.norm = RunningNorm(config.latent_channels)
        self.quantizer = Quantizer(config.codebook_size, config.latent_channels)
        self.from_latents = nn.Conv2d(config.latent_channels, widths[-1], 1)
        for i in reversed(range(config.levels)):
            blocks = config.bottleneck_blocks if i == config.levels - 1 else 1
            self.up_blocks.extend(GatedBlock(widths[i], on) for _ in range(blocks))
            if i:
                self.up_blocks.append(nn.ConvTranspose2d(widths[i], widths[i - 1], 4, stride=2, padding=1))
        self.out_conv = nn.Conv2d(widths[0], 12, 1)
        self.register_buffer("scale_factor", torch.tensor(config.scale_factor))

    def encode(self, images: Tensor, quantize: bool = False) -> Tensor:
        """Images → latents; with ``quantize`` the nearest entries of the codebook. Raises InputError for an image whose
        sides the stride does not divide."""
        z = self._encode(images)
        if quantize:
            z = self.quantizer.entries(self.quantizer.nearest(z))
        return z / self.scale_factor

    def decode(self, latents: Tensor) -> Tensor:
        """Latents → images, float32, not clipped."""
        return self._decode(latents * self.scale_factor)

    def forward(
        self, images: Tensor, quantized: Tensor | None = None, moments: list[Tensor] | None = None
    ) -> Reconstruction:
        """Encode and decode, for training.

        quantized: [N] bool, the samples that are decoded from their quantized latents; None = no sample.
        moments:   see ``RunningNorm``.
        """
        z = self._encode(images, moments)
        found = self.quantizer(z)
        decoded = z if quantized is None else torch.where(quantized[:, None, None, None], found.vectors, z)
        return Reconstruction(self._decode(decoded), z, found.indices, found.codebook_loss, found.commitment)

    @torch.no_grad()
    def calibrate(self, std: float | Tensor) -> None:
        """Give the latents standard deviation 1. std: what it is now, measured over ``encode``'s."""
        self.scale_factor *= std

    def _encode(self, images: Tensor, moments: list[Tensor] | None = None) -> Tensor:
        stride, (height, width) = self.config.stride, images.shape[2:]
        if height % stride or width % stride:
            raise InputError(
                f"the images have {width}×{height} pixels, but stage A takes multiples of {stride} ({named('levels')} "
                f"is {self.config.levels}): change {named('image_size')}"
            )
        h = F.pixel_unshuffle((images + 1) / 2, 2).contiguous(memory_format=torch.channels_last)
        h = self.in_conv(h)
        for layer in self.down_blocks:
            h = layer(h)
        return self.norm(self.to_latents(h), moments).float()

    def _decode(self, z: Tensor) -> Tensor:
        h = self.from_latents(z.contiguous(memory_format=torch.channels_last))
        for layer in self.up_blocks:
            h = layer(h)
        with autocast_disabled(h.device):
            return 2 * F.pixel_shuffle(self.out_conv(h.float()), 2) - 1
