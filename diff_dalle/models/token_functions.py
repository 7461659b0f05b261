"""Functions of tokens that save little for the backward pass: modulated RMS norm, turned queries and keys, SwiGLU.

Each keeps its input, in its own dtype, and computes the rest again. Statistics are fp32. Under torch.compile the plain
formulas run, which the compiler fuses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .precision import autocast_disabled

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
