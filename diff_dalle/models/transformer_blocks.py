"""Blocks of the transformer: joint attention of image and text tokens, and SwiGLU, both modulated by the timestep.

Tokens are [N, T + S, C]: T of the image, then S of the text. Every block's modulation is a common part, from the
embedding of timestep and conditions, plus a table of its own (Chen et al. 2023, PixArt-α, adaLN-single).

The functions of tokens at the end each keep their input, in its own dtype, and compute the rest again in the backward
pass. Statistics are fp32. Under torch.compile the plain formulas run, which the compiler fuses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .attention import attend
from .dropout import Dropout
from .layers import recompute
from .precision import autocast_disabled

MULTIPLE = 32  # of which the channels of hidden layers are one: matrix products of odd sizes are slow
SIGNALS = 6  # scale, shift and gate of attention, and of the feed-forward layer
WAVELENGTH = 10000.0  # almost that of the slowest rotation, in 2π positions (Su et al. 2021, §3.2.2)


class Modulation(nn.Module):
    """The common modulation [N, signals, C] plus the block's own, as ``signals`` tensors [N, 1, C], in fp32."""

    in_fp32 = True  # see ``units.parts_of``

    def __init__(self, signals: int, width: int):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(signals, width))

    def forward(self, common: Tensor) -> tuple[Tensor, ...]:
        return (common + self.table)[:, :, None].unbind(1)


class TurnedNorm(nn.Module):
    """See ``turned_norm``."""

    in_fp32 = True  # see ``units.parts_of``

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        return turned_norm(x, self.weight, turn)


class Stream(nn.Module):
    """The weights of a block for tokens of one modality, or for all of them.

    The hidden layer has 8/3 of the width, rounded up, so that SwiGLU has the weights of a feed-forward layer
    of four times the width (Shazeer 2020).
    """

    def __init__(self, width: int, heads: int, drop: float):
        super().__init__()
        self.heads, hidden = heads, -(-8 * width // (3 * MULTIPLE)) * MULTIPLE
        self.modulation = Modulation(SIGNALS, width)
        self.attention_qkv, self.attention_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.q_norm, self.k_norm = TurnedNorm(width // heads), TurnedNorm(width // heads)
        self.mlp_in, self.mlp_out = nn.Linear(width, 2 * hidden), nn.Linear(hidden, width)
        self.attention_dropout, self.mlp_dropout = Dropout(drop), Dropout(drop)

    def qkv(self, x: Tensor, scale: Tensor, shift: Tensor, turn: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values: [N, T, C] each."""
        q, k, v = self.attention_qkv(modulated_norm(x, scale, shift)).chunk(3, -1)
        norms = (self.q_norm, q), (self.k_norm, k)
        return *(norm(each.unflatten(-1, (self.heads, -1)), turn).flatten(2) for norm, each in norms), v

    def finish(self, x: Tensor, attended: Tensor, signals: Sequence[Tensor], keys: Tensor | None) -> Tensor:
        """x with both branches added."""
        gate, scale, shift, mlp_gate = signals
        x = _gated(x, gate, self.attention_dropout(self.attention_proj(attended), keys))
        h = self.mlp_out(swiglu(self.mlp_in(modulated_norm(x, scale, shift))))
        return _gated(x, mlp_gate, self.mlp_dropout(h, keys))


def _gated(x: Tensor, gate: Tensor, branch: Tensor) -> Tensor:
    return torch.addcmul(x, gate.to(x.dtype), branch.to(x.dtype))


class TransformerBlock(nn.Module):
    """A block whose image and text tokens have weights of their own (separate; Esser et al. 2024, MM-DiT) or share
    them. The identity at initialization."""

    is_block = True  # see ``units``
    joins_text = True  # its output is not of the image alone; see ``tasks.alignment``

    def __init__(self, width: int, heads: int, drop: float, separate: bool, use_checkpoint: bool):
        super().__init__()
        self.heads, self.use_checkpoint, self.is_separate = heads, use_checkpoint, separate
        self.streams: Iterable[Stream] = nn.ModuleList(Stream(width, heads, drop) for _ in range(1 + separate))  # type: ignore[assignment]

    def forward(
        self, x: Tensor, images: int, common: Tensor, turn: Tensor, mask: Tensor | None, keys: Tensor | None
    ) -> Tensor:
        """x: [N, T + S, C]; images: T; common: [N, SIGNALS, C]; turn: see ``turned_norm``; mask: see ``attend``; keys:
        of dropout."""
        function = partial(self._forward, images)
        return recompute(self.use_checkpoint, function, x, common, turn, mask, keys, random=keys is None)

    def _forward(
        self, images: int, x: Tensor, common: Tensor, turn: Tensor, mask: Tensor | None, keys: Tensor | None
    ) -> Tensor:
        sizes = [images, x.shape[1] - images] if self.is_separate else [x.shape[1]]
        pieces, found, signals = x.split(sizes, 1), [], []
        for stream, piece, turned in zip(self.streams, pieces, turn.split(sizes, -2), strict=True):
            scale, shift, *others = stream.modulation(common)
            found.append(stream.qkv(piece, scale, shift, turned))
            signals.append(others)
        q, k, v = map(_joined, zip(*found, strict=True))
        attended = attend(q, k, v, self.heads, mask).split(sizes, 1)
        streams = zip(self.streams, pieces, attended, signals, strict=True)
        return _joined([stream.finish(piece, own, given, keys) for stream, piece, own, given in streams])


def _joined(pieces: Sequence[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces), 1)


def turns(positions: Tensor, width: int) -> Tensor:
    """The rotations of tokens in the plane: a quarter of a head's channels each for rows and columns, in pairs.

    positions: [T, 2]; width: channels of a head, a multiple of 4. Returns [2, T, width / 2], cosines and sines.
    """
    count = width // 4
    frequencies = WAVELENGTH ** -(torch.arange(count, dtype=torch.float32, device=positions.device) / count)
    angles = (positions[:, :, None] * frequencies).flatten(1)
    return torch.stack([angles.cos(), angles.sin()])


EPS = 1e-6  # of the norms


def modulated_norm(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """The RMS norm (Zhang & Sennrich 2019) of tokens, times 1 + scale, plus shift.

    x: [N, T, C]; scale, shift: [N, 1, C] float32. Returns [N, T, C] in the dtype of x.
    """
    if torch.compiler.is_compiling():
        return _modulated(x, _rstd(x), scale, shift).to(x.dtype)
    return _ModulatedNorm.apply(x, scale, shift)


def turned_norm(x: Tensor, weight: Tensor, turn: Tensor) -> Tensor:
    """Queries or keys after an RMS norm (Dehghani et al. 2023, QK norm) and a rotation by their positions (Su et al.
    2021, RoPE).

    x: [N, T, H, D]; weight: [D]; turn: [2, T, D / 2] or [2, N, T, D / 2] float32, cosines and sines of the angles by
    which each pair (i, i + D / 2) is turned. Returns [N, T, H, D] in the dtype of x.
    """
    if torch.compiler.is_compiling():
        return _turned(x.float() * _rstd(x) * weight, turn[0], turn[1]).to(x.dtype)
    return _TurnedNorm.apply(x, weight, turn)


def swiglu(x: Tensor) -> Tensor:
    """SiLU of the first half of the channels times the second half (Shazeer 2020): [N, T, 2C] → [N, T, C]."""
    if torch.compiler.is_compiling():
        gate, value = x.chunk(2, -1)
        return F.silu(gate) * value
    return _SwiGLU.apply(x)


def _rstd(x: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    return (norm.square() / x.shape[-1] + EPS).rsqrt()


def _modulated(x: Tensor, rstd: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return torch.addcmul(shift, x.float() * rstd, 1 + scale)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)  # for all heads
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


def _halves(x: Tensor, to_first: Sequence[Tensor], to_second: Sequence[Tensor]) -> Tensor:
    """A linear combination of both halves of the channels for each half of the output, float32."""
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    first, second = x.chunk(2, -1)
    for half, factors in zip(out.chunk(2, -1), (to_first, to_second), strict=True):
        torch.mul(first, factors[0], out=half).addcmul_(second, factors[1])
    return out


def _norm_gradient(normed: Tensor, rstd: Tensor, gradient: Tensor, products: Tensor, factor: Tensor) -> Tensor:
    """At the input of an RMS norm whose output ``normed`` is multiplied by ``factor``, [C] or [N, 1, C].

    gradient: at ``normed``; overwritten. products: the gradient at the product, times ``normed``.
    """
    factor = factor if factor.dim() == 1 else factor.transpose(1, 2)
    with autocast_disabled(normed.device):
        projection = products @ (factor / normed.shape[-1])
    return gradient.addcmul_(normed, projection.view_as(rstd), value=-1).mul_(rstd)


class _ModulatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        rstd = _rstd(x)
        ctx.save_for_backward(x, rstd, scale)
        return _modulated(x, rstd, scale, shift).to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        x, rstd, scale = ctx.saved_tensors
        gradient, normed, factor = gradient.float(), x.float() * rstd, 1 + scale
        products = gradient * normed
        to_x = _norm_gradient(normed, rstd, gradient * factor, products, factor)
        return to_x.to(x.dtype), products.sum(1, keepdim=True), gradient.sum(1, keepdim=True)


class _TurnedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, turn: Tensor) -> Tensor:
        rstd, (cos, sin), (first, second) = _rstd(x), turn.unsqueeze(-2), weight.chunk(2)
        ctx.save_for_backward(x, rstd, weight, turn)
        out = _halves(x, (first * cos, -second * sin), (first * sin, second * cos))
        return out.mul_(rstd).to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, rstd, weight, turn = ctx.saved_tensors
        cos, sin = turn.unsqueeze(-2)  # for all heads
        gradient, normed = _halves(gradient, (cos, sin), (-sin, cos)), x.float() * rstd
        products = gradient * normed
        to_x = _norm_gradient(normed, rstd, gradient * weight, products, weight)
        return to_x.to(x.dtype), products.flatten(0, -2).sum(0), None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, value = x.chunk(2, -1)
        return F.silu(gate).mul_(value)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate, value = x.chunk(2, -1)
        to_x = torch.empty_like(x)
        to_gate, to_value = to_x.chunk(2, -1)
        torch.ops.aten.silu_backward.grad_input(gradient * value, gate, grad_input=to_gate)
        torch.mul(gradient, F.silu(gate), out=to_value)
        return to_x
