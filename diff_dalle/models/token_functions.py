"""Functions of tokens that save little for the backward pass: modulated RMS norm, turned queries and keys, SwiGLU.

Each keeps its input, in its own dtype, and computes the rest again. Statistics are fp32. Under torch.compile the plain
formulas run, which the compiler fuses.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

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
    return (x.float().square().mean(-1, keepdim=True) + EPS).rsqrt()


def _modulated(x: Tensor, rstd: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return torch.addcmul(shift, x.float() * rstd, 1 + scale)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)  # for all heads
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


def _norm_gradient(x: Tensor, rstd: Tensor, gradient: Tensor) -> Tensor:
    """At the input of an RMS norm; x: its output; gradient: at that."""
    return rstd * torch.addcmul(gradient, x, (gradient * x).mean(-1, keepdim=True), value=-1)


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
        normed, gradient = x.float() * rstd, gradient.float()
        to_scale = (gradient * normed).sum(1, keepdim=True)
        to_x = _norm_gradient(normed, rstd, gradient * (1 + scale)).to(x.dtype)
        return to_x, to_scale, gradient.sum(1, keepdim=True)


class _TurnedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, turn: Tensor) -> Tensor:
        rstd = _rstd(x)
        ctx.save_for_backward(x, rstd, weight, turn)
        return _turned(x.float() * rstd * weight, turn[0], turn[1]).to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, rstd, weight, turn = ctx.saved_tensors
        gradient, normed = _turned(gradient.float(), turn[0], -turn[1]), x.float() * rstd
        to_weight = (gradient * normed).flatten(0, -2).sum(0)
        return _norm_gradient(normed, rstd, gradient * weight).to(x.dtype), to_weight, None


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
        to_gate = torch.ops.aten.silu_backward(gradient * value, gate)
        return torch.cat([to_gate, gradient * F.silu(gate)], -1)
