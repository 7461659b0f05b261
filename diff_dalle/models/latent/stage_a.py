"""Stage A: an autoencoder whose latents have a quarter of the resolution (after the VQGAN of Rampas et al. 2022), and
its codebook (van den Oord et al. 2017), whose entries are revived when they are not used."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...config import Fault, InputError, named, option, settings
from ...config.bounds import MAX_ROWS
from ...randomness import permutation
from ..layers import Linear, recompute, to_image, to_tokens
from ..norms import RunningNorm
from ..options import blocks_option, width_option
from ..precision import autocast_disabled
from .blocks import ChannelNorm, xavier

MAX_LEVELS = 14  # of which 16,384 pixels are one position


@settings
class StageAConfig:
    """Stage A"""

    levels: int = option(2, "levels; the latents have 1 / 2^levels of the resolution", least=1, most=MAX_LEVELS)
    width: int = width_option(384, "channels of the deepest level; half as many in each level above")
    bottleneck_blocks: int = blocks_option(12, "residual blocks at the decoder's deepest level")
    latent_channels: int = width_option(4, "channels of the latents")
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

    is_block = True  # see ``units``

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

    full_precision = ("out_conv",)  # see ``for_inference``
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


DISTANCES = 2**24  # that are computed at a time: 64 MiB
USAGE_DECAY = 0.99  # of the running usage, per batch


class Quantized(NamedTuple):
    """vectors:    [N, D, h, w], the nearest entries; their gradient goes straight through to what was quantized.
    indices:       [N, h, w] int64, the entries.
    codebook_loss: [N], mean |entry - sg(z)|², which moves the entries.
    commitment:    [N], mean |z - sg(entry)|², which moves the encoder."""

    vectors: Tensor
    indices: Tensor
    codebook_loss: Tensor
    commitment: Tensor


class Quantizer(nn.Module):
    """A codebook. ``usage`` [size]: how often each entry was chosen lately, 1 = as often as on average."""

    usage: Tensor

    def __init__(self, size: int, channels: int):
        super().__init__()
        self.codebook = nn.Embedding(size, channels)
        nn.init.uniform_(self.codebook.weight, -1 / size, 1 / size)
        self.register_buffer("usage", torch.ones(size))

    @torch.no_grad()
    def nearest(self, z: Tensor) -> Tensor:
        """z: [N, D, h, w] → indices of the nearest entries [N, h, w]."""
        vectors, entries = z.permute(0, 2, 3, 1).flatten(0, 2).float(), self.codebook.weight.float()
        with autocast_disabled(z.device):
            lengths, rows = entries.square().sum(1), max(DISTANCES // len(entries), 1)
            # |z|² is the same for all entries.
            found = [torch.addmm(lengths, part, entries.T, alpha=-2).argmin(1) for part in vectors.split(rows)]
        return torch.cat(found).view(len(z), *z.shape[2:])

    def entries(self, indices: Tensor) -> Tensor:
        """[N, h, w] → [N, D, h, w]."""
        return self.codebook(indices).permute(0, 3, 1, 2)

    def forward(self, z: Tensor) -> Quantized:
        """z: [N, D, h, w]."""
        z = z.float()
        indices = self.nearest(z)
        entries = self.entries(indices)
        codebook_loss, commitment = (
            (a - b.detach()).square().flatten(1).mean(1) for a, b in ((entries, z), (z, entries))
        )
        return Quantized(z + (entries - z).detach(), indices, codebook_loss, commitment)

    def counts(self, indices: Tensor) -> Tensor:
        """How often each sample chose each entry: [N, h, w] → [N, size] float32."""
        flat = indices.flatten(1)
        return torch.zeros(len(flat), len(self.usage), device=flat.device).scatter_add_(
            1, flat, torch.ones_like(flat, dtype=torch.float32)
        )

    @torch.no_grad()
    def observe(self, counts: Tensor) -> None:
        """Update ``usage`` by the counts [N, size] of a whole batch."""
        total = counts.sum(0)
        self.usage.lerp_(total * len(total) / total.sum(), 1 - USAGE_DECAY)

    @torch.no_grad()
    def revive(self, candidates: Tensor, least: float, seed: int, step: int) -> None:
        """Replace the least used entries by vectors that the encoder gives, each by another.

        candidates: [M, D], of the whole batch in order of position. At most M entries are replaced.
        least:      entries with a lower usage are replaced; their usage begins anew at 1.
        seed, step: of the run: which candidates are taken is a pure function of them.

        The same on all processes for the same arguments.
        """
        count, entries = min(int((self.usage < least).sum()), len(candidates)), self.codebook.weight
        taken = permutation(seed, f"codebook revival {step}", len(candidates))[:count].astype(np.int64)
        dead = self.usage.argsort(stable=True)[:count]
        entries[dead] = candidates[torch.from_numpy(taken).to(candidates.device)].to(entries.dtype)
        self.usage[dead] = 1.0


def one_vector(z: Tensor, where: Tensor) -> Tensor:
    """One vector of each sample, a candidate for revival: z [N, D, h, w], where [N] in [0, 1), such as
    ``draw.uniform``'s → [N, D] without gradient."""
    vectors = z.detach().flatten(2)
    position = (where * vectors.shape[2]).long().clamp(max=vectors.shape[2] - 1)
    return vectors.gather(2, position[:, None, None].expand(-1, vectors.shape[1], 1)).squeeze(2)
