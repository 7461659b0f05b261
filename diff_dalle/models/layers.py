"""Building blocks of the networks: linear layers, timestep embedding, residual blocks, resampling.

Every layer of the U-Net has the signature ``layer(x, emb, cond)``: x [N, C, H, W] in channels-last layout; emb [N, E],
the embedding of timestep, class and text after its final SiLU; cond, the Conditioning. Weights are fp32. Under autocast
the norms still compute in fp32 and return their input's dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ..batch import Conditioning
from .dropout import Dropout
from .norms import GroupNorm32, output_again
from .precision import autocast_disabled

Module = TypeVar("Module", bound=nn.Module)


class Linear(nn.Linear):
    """A linear layer on tokens [N, T, C].

    On CPU it runs as a 1×1 convolution: oneDNN's convolution kernels took half the time of the matrix product of
    ``F.linear`` on an AMD processor.
    """

    def forward(self, input: Tensor) -> Tensor:
        if input.device.type != "cpu":
            return super().forward(input)
        row = input.transpose(1, 2).unsqueeze(2)  # [N, C, 1, T]: a channels-last image of height 1
        return F.conv2d(row, self.weight[:, :, None, None], self.bias).squeeze(2).transpose(1, 2)


def to_tokens(x: Tensor) -> Tensor:
    """[N, C, H, W] → [N, H · W, C], without a copy for channels-last input."""
    return x.permute(0, 2, 3, 1).flatten(1, 2)


def to_image(tokens: Tensor, size: Sequence[int]) -> Tensor:
    """[N, H · W, C] → [N, C, H, W] in channels-last layout, without a copy; size: (H, W)."""
    return tokens.unflatten(1, size).permute(0, 3, 1, 2)


def to_channels_last(module: Module) -> Module:
    """Store the convolution weights channels last, like the activations. Returns the module.

    The caller that runs a network does this, not the network itself: sharded parameters must stay contiguous.
    """
    return module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing in torch's stubs


def zero_init(module: Module) -> Module:
    """Set all parameters to 0 and return the module: as the last layer of a residual branch, so that the
    block starts as the identity."""
    for parameter in module.parameters():
        nn.init.zeros_(parameter)
    return module


def recompute(on: bool, function: Callable[..., Tensor], *args: Tensor | None, random: bool = False) -> Tensor:
    """``function(*args)``; where ``on``, with activation checkpointing in training.

    random: the function draws from torch's generator, as dropout without keys does, whose state is then saved and
            restored for the recomputation.
    """
    if on and torch.is_grad_enabled():
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=random)
    return function(*args)


def timestep_embedding(t: Tensor, width: int, max_period: float = 10000.0) -> Tensor:
    """Sinusoidal embedding: cosines, then sines, of t at width // 2 frequencies from 1 to almost 1 / max_period.

    After Vaswani et al. (2017, §3.5). t: [N], integer or fractional steps. Returns [N, width] float32; an odd width is
    padded with a 0.
    """
    half = width // 2
    frequencies = torch.exp(-math.log(max_period) / half * torch.arange(half, dtype=torch.float32, device=t.device))
    angles = t.float()[:, None] * frequencies
    return F.pad(torch.cat([angles.cos(), angles.sin()], 1), (0, width % 2))


class Downsample(nn.Module):
    """Halve the resolution by a 3×3 convolution of stride 2 (learned) or 2×2 average pooling."""

    def __init__(self, channels: int, learned: bool):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2, padding=1) if learned else None

    def forward(self, x: Tensor, emb: Tensor | None = None, cond: Conditioning | None = None) -> Tensor:
        return F.avg_pool2d(x, 2) if self.conv is None else self.conv(x)


class Upsample(nn.Module):
    """Double the resolution by nearest-neighbor interpolation, followed by a 3×3 convolution if learned."""

    def __init__(self, channels: int, learned: bool):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1) if learned else None

    def forward(self, x: Tensor, emb: Tensor | None = None, cond: Conditioning | None = None) -> Tensor:
        with autocast_disabled(x.device):  # which would copy it to fp32
            x = F.interpolate(x, scale_factor=2.0, mode="nearest")
        return x if self.conv is None else self.conv(x)


class ResBlock(nn.Module):
    """The residual block of Dhariwal & Nichol (2021, §3): norm, SiLU, convolution, twice.

    The embedding scales and shifts the output of the second norm (``use_scale_shift_norm``) or is added to its input.
    ``resample``, a layer without weights, changes the resolution of both branch and shortcut.

    Of the branch's four feature maps, the backward pass keeps the inputs of the norms and computes those of the
    convolutions from them again, which takes 1 % of a step and saves a third of the activations.
    """

    is_block = True  # see ``units``
    full_precision = ("emb",)  # see ``for_inference``: casts would take longer than they save

    def __init__(
        self,
        channels: int,
        out_channels: int,
        emb_width: int,
        dropout: float,
        use_scale_shift_norm: bool,
        use_checkpoint: bool,
        resample: nn.Module | None = None,
    ):
        super().__init__()
        self.use_scale_shift_norm, self.use_checkpoint = use_scale_shift_norm, use_checkpoint
        self.keeps_conv_inputs = use_checkpoint  # when they are computed again, it is with all the rest
        self.resample = resample
        self.in_norm = GroupNorm32(channels)
        self.in_conv = nn.Conv2d(channels, out_channels, 3, padding=1)
        self.emb = nn.Linear(emb_width, (2 if use_scale_shift_norm else 1) * out_channels)
        self.out_norm = GroupNorm32(out_channels)
        self.dropout = Dropout(dropout)
        self.out_conv = zero_init(nn.Conv2d(out_channels, out_channels, 3, padding=1))
        self.skip = None if channels == out_channels else Linear(channels, out_channels)

    def forward(self, x: Tensor, emb: Tensor, cond: Conditioning, skip: Tensor | None = None) -> Tensor:
        """skip: the skip connection, which is concatenated to x; both together have the block's channels."""
        keys = cond.dropout_keys
        return recompute(self.use_checkpoint, self._forward, x, emb, keys, skip, random=keys is None)

    def _forward(self, x: Tensor, emb: Tensor, keys: Tensor | None, skip: Tensor | None) -> Tensor:
        if skip is not None:  # here, so that checkpointing keeps no copy of the two
            x = torch.cat([x, skip], 1)
        if self.resample is None:
            h = self._transient(self.in_norm(x, silu=True)).into(self.in_conv)
        else:
            h = self._transient(self.in_norm(x, silu=True)).through(self.resample).into(self.in_conv)
            x = self.resample(x)
        with autocast_disabled(emb.device):
            signal = self.emb(emb)
        if self.use_scale_shift_norm:
            h = self.out_norm(h, signal, silu=True)
        else:
            h = self.out_norm(h + signal.to(h.dtype)[:, :, None, None], silu=True)
        size, dropout = h.shape[2:], self.dropout.drawn(to_tokens(h), keys)
        h = self._transient(h).through(lambda h: to_image(dropout(to_tokens(h)), size)).into(self.out_conv)
        return h + (x if self.skip is None else to_image(self.skip(to_tokens(x)), size))

    def _transient(self, h: Tensor) -> Transient:
        """A norm's output."""
        return Transient(h, None if self.keeps_conv_inputs else output_again(h))


Again = Callable[[], Tensor]


@dataclass(frozen=True)
class Transient:
    """A tensor that is cheap to compute again from what is kept anyway.

    value: the tensor.
    again: computes it in the backward pass, to the same bits; None = it is kept wherever it is needed.
    """

    value: Tensor
    again: Again | None

    def into(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """``function(value)``, whose backward pass has ``value`` computed again. Whatever else it needs is kept, also
        copies of ``value``, as autocast makes them."""
        if self.again is None:
            return function(self.value)
        with torch.autograd.graph.saved_tensors_hooks(_forget(self.value, self.again), _remember):
            return function(self.value)

    def through(self, function: Callable[[Tensor], Tensor]) -> Transient:
        """``function(value)``, computed again likewise. function: the same one whenever it is called."""
        again = self.again
        return Transient(self.into(function), None if again is None else lambda: _applied(function, again))


def _forget(value: Tensor, again: Again) -> Callable[[Tensor], Tensor | Again]:
    """What autograd keeps of a tensor: itself, or for ``value`` how to compute it. Holds no reference to ``value``."""
    forgotten = _memory(value)
    return lambda tensor: again if _memory(tensor) == forgotten else tensor


def _remember(kept: Any) -> Tensor:
    return kept if isinstance(kept, Tensor) else kept()


def _memory(tensor: Tensor) -> tuple:
    """Which memory a tensor reads, and how, while it is alive."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride()


@torch.no_grad()
def _applied(function: Callable[[Tensor], Tensor], again: Again) -> Tensor:
    return function(again())
