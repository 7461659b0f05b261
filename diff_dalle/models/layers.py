"""The parts that the networks are made of: norms, the timestep's embedding, residual blocks, changes of resolution.

Every layer of the U-Net is called as ``layer(x, emb, cond)``: x [N, C, H, W] stored channels last, emb [N, E] the
embedding of timestep, class and text after its last SiLU, cond the Conditioning. Weights are fp32; under autocast the
norms still compute in fp32 and hand on the precision that they were given.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ..batch import Conditioning
from .dropout import Dropout

GROUPS = 32  # of every group norm, as in Guided-Diffusion; fewer where the channels do not divide by it


class GroupNorm32(nn.GroupNorm):
    """Group norm in fp32 (Wu & He 2018)."""

    def __init__(self, channels: int):
        super().__init__(math.gcd(GROUPS, channels), channels)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float()).to(x.dtype)


class LayerNorm32(nn.LayerNorm):
    """Layer norm in fp32 (Ba et al. 2016)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float()).to(x.dtype)


class Linear(nn.Linear):
    """The same map of every token of [N, T, C].

    On a CPU it is computed as a 1×1 convolution: for those oneDNN has kernels of its own, which took half the time of
    ``F.linear``'s matrix product on an AMD processor.
    """

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu":
            return super().forward(x)
        row = x.transpose(1, 2).unsqueeze(2)  # [N, C, 1, T]: an image of one row, stored channels last
        return F.conv2d(row, self.weight[:, :, None, None], self.bias).squeeze(2).transpose(1, 2)


def to_tokens(x: Tensor) -> Tensor:
    """[N, C, H, W] → [N, H · W, C]: no copy where channels are stored last."""
    return x.permute(0, 2, 3, 1).flatten(1, 2)


def to_image(tokens: Tensor, size: Sequence[int]) -> Tensor:
    """[N, H · W, C] → [N, C, H, W] stored channels last, without a copy; size: (H, W)."""
    return tokens.unflatten(1, size).permute(0, 3, 1, 2)


def to_channels_last(module: nn.Module) -> nn.Module:
    """The module with its convolutions' weights stored channels last, as its activations are.

    Done by whoever runs the network, not by the network: sharded parameters must stay contiguous.
    """
    return module.to(memory_format=torch.channels_last)


def zero_init(module: nn.Module) -> nn.Module:
    """The module with all parameters 0: the last layer of a branch, so that the branch starts as nothing."""
    for parameter in module.parameters():
        nn.init.zeros_(parameter)
    return module


def full_precision(device: torch.device):
    """The context in which autocast is off."""
    if not torch.amp.is_autocast_available(device.type):  # the meta device
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


def recompute(function, x: Tensor, *args, keys: Tensor | None) -> Tensor:
    """``function(x, *args)``, whose inner activations are computed again in the backward pass instead of kept.

    Keyed dropout repeats itself; only without keys must the generator's state be kept for the second time.
    """
    return checkpoint(function, x, *args, use_reentrant=False, preserve_rng_state=keys is None)


def timestep_embedding(t: Tensor, width: int, max_period: float = 10000.0) -> Tensor:
    """Cosines, then sines, of t at width // 2 frequencies from 1 down to nearly 1 / max_period.

    After Vaswani et al. (2017, §3.5). t: [N], whole or fractional steps. Returns [N, width] float32; an odd width ends
    in a 0.
    """
    half = width // 2
    frequencies = torch.exp(-math.log(max_period) / half * torch.arange(half, dtype=torch.float32, device=t.device))
    angles = t.float()[:, None] * frequencies
    return F.pad(torch.cat([angles.cos(), angles.sin()], 1), (0, width % 2))


class Downsample(nn.Module):
    """Halve height and width, by a 3×3 convolution of stride 2 or by the mean of 2×2 pixels."""

    def __init__(self, channels: int, learned: bool):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2, padding=1) if learned else None

    def forward(self, x: Tensor, emb: Tensor | None = None, cond: Conditioning | None = None) -> Tensor:
        return F.avg_pool2d(x, 2) if self.conv is None else self.conv(x)


class Upsample(nn.Module):
    """Double height and width by repeating pixels, then perhaps a 3×3 convolution."""

    def __init__(self, channels: int, learned: bool):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1) if learned else None

    def forward(self, x: Tensor, emb: Tensor | None = None, cond: Conditioning | None = None) -> Tensor:
        x = F.interpolate(x, scale_factor=2.0, mode="nearest")
        return x if self.conv is None else self.conv(x)


class ResBlock(nn.Module):
    """The residual block of Dhariwal & Nichol (2021, §3): norm, SiLU, convolution, twice.

    The embedding enters after the second norm as scale and shift of each channel (``use_scale_shift_norm``), else it is
    added before it. ``resample`` (without weights) changes the resolution of branch and shortcut alike.
    """

    def __init__(self, channels: int, out_channels: int, emb_width: int, dropout: float, use_scale_shift_norm: bool,
                 use_checkpoint: bool, resample: nn.Module | None = None):  # fmt: skip
        super().__init__()
        self.use_scale_shift_norm, self.use_checkpoint = use_scale_shift_norm, use_checkpoint
        self.resample = resample
        self.in_norm = GroupNorm32(channels)
        self.in_conv = nn.Conv2d(channels, out_channels, 3, padding=1)
        self.emb = nn.Linear(emb_width, (2 if use_scale_shift_norm else 1) * out_channels)
        self.out_norm = GroupNorm32(out_channels)
        self.dropout = Dropout(dropout)
        self.out_conv = zero_init(nn.Conv2d(out_channels, out_channels, 3, padding=1))
        self.skip = None if channels == out_channels else Linear(channels, out_channels)

    def forward(self, x: Tensor, emb: Tensor, cond: Conditioning) -> Tensor:
        if self.use_checkpoint and torch.is_grad_enabled():
            return recompute(self._forward, x, emb, cond.dropout_keys, keys=cond.dropout_keys)
        return self._forward(x, emb, cond.dropout_keys)

    def _forward(self, x: Tensor, emb: Tensor, keys: Tensor | None) -> Tensor:
        h = F.silu(self.in_norm(x))
        if self.resample is not None:
            h, x = self.resample(h), self.resample(x)
        h = self.in_conv(h)
        signal = self.emb(emb).to(h.dtype)[:, :, None, None]
        if self.use_scale_shift_norm:
            scale, shift = signal.chunk(2, dim=1)
            h = torch.addcmul(shift, self.out_norm(h), 1 + scale)
        else:
            h = self.out_norm(h + signal)
        size = h.shape[2:]
        h = self.out_conv(to_image(self.dropout(to_tokens(F.silu(h)), keys), size))
        return h + (x if self.skip is None else to_image(self.skip(to_tokens(x)), size))
