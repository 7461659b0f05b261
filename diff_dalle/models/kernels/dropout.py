"""The Triton kernel of keyed dropout: its mask is hashed as the elements are read, and never stored."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

WORDS = 256  # of 64 bits a program hashes, for four elements each


@triton.jit
def _dropout(values, offsets, factors, out, count, multiplier, limit, scale, WORDS: tl.constexpr):
    sample = tl.program_id(1).to(tl.int64)
    word = tl.program_id(0) * WORDS + tl.arange(0, WORDS).to(tl.int64)
    hashed = tl.load(offsets + sample) + word * tl.load(factors + sample)
    hashed ^= hashed >> 32
    hashed *= multiplier
    hashed += hashed >> 32
    lane = tl.arange(0, 4)
    keep = (hashed[:, None] >> (16 * lane)[None, :]).to(tl.int16) >= limit
    element = word[:, None] * 4 + lane[None, :]
    place, inside = sample * count + element, element < count
    x = tl.load(values + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, tl.where(keep, x * scale, 0.0).to(out.dtype.element_ty), mask=inside)


class KeyedDropout(torch.autograd.Function):
    """values [N, …] without gaps; see ``dropout.keep_mask`` for the mask."""

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, offset: Tensor, factor: Tensor, multiplier: int, limit: int, scale: float
    ) -> Tensor:
        ctx.save_for_backward(offset, factor)
        ctx.constants = multiplier, limit, scale
        return _masked(values, offset, factor, *ctx.constants)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _masked(gradient, *ctx.saved_tensors, *ctx.constants), *[None] * 5


def _masked(values: Tensor, offset: Tensor, factor: Tensor, multiplier: int, limit: int, scale: float) -> Tensor:
    values = values.contiguous()
    out, count = torch.empty_like(values), values[0].numel()
    programs = triton.cdiv(count, 4 * WORDS), values.shape[0]
    _dropout[programs](
        values, offset.contiguous(), factor.contiguous(), out, count, multiplier, limit, scale, WORDS=WORDS
    )
    return out
