"""Attention in the decoder's U-Nets: to condition tokens, and over the positions of a feature map.

All layers map tokens [N, T, width] to tokens, normalize input and output, and have a learned null key and value, to
which a query can attend when nothing else fits.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..attention import attend, themselves
from ..layers import Linear, recompute, to_image, to_tokens
from ..norms import LayerNorm32

TOKEN_HEADS, TOKEN_HEAD_WIDTH = 8, 64  # of attention to condition tokens, at every width
COSINE_SCALE = 16.0  # of cosine similarities, in place of 1/√(channels per head)


def _unit(x: Tensor, head_width: int) -> Tensor:
    """Scale each head of [N, T, heads · head_width] to length 1, in fp32."""
    return F.normalize(x.unflatten(-1, (-1, head_width)).float(), dim=-1).flatten(2).to(x.dtype)


class NullAttention(nn.Module):
    """Multi-head attention with a null key and value.

    kv_heads: heads of keys and values: as many as of the queries, or 1, shared by all queries (Shazeer 2019).
    cosine:   cosine similarity instead of scaled dot products.
    """

    scale: float | None = None  # of scaled dot products; None = 1/√(channels per head)

    def __init__(self, width: int, context_width: int, heads: int, head_width: int, kv_heads: int, cosine: bool):
        super().__init__()
        self.heads, self.kv_heads, self.head_width, self.cosine = heads, kv_heads, head_width, cosine
        self.norm = LayerNorm32(width, bias=False)
        self.null_kv = nn.Parameter(torch.randn(2, head_width))
        self.q = Linear(width, heads * head_width, bias=False)
        self.kv = Linear(context_width, 2 * kv_heads * head_width, bias=False)
        self.proj, self.out_norm = Linear(heads * head_width, width, bias=False), LayerNorm32(width, bias=False)

    def keys_and_values(self, context: Tensor) -> tuple[Tensor, Tensor]:
        """Of [N, S, context_width], after the null ones: two of [N, 1 + S, kv_heads · head_width]."""
        k, v = self.kv(context).chunk(2, dim=-1)
        nulls = self.null_kv.to(k.dtype).repeat(1, self.kv_heads).unbind()
        k, v = (
            torch.cat([null.expand(len(each), 1, -1), each], dim=1) for null, each in zip(nulls, (k, v), strict=True)
        )
        return k, v

    def attend_to(self, x: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """x: [N, T, width], normalized; mask: [N, T, 1 + S] bool, True = attend to this key, None = all. Returns
        [N, T, width]."""
        q = self.q(x)
        if self.cosine:
            q, k = _unit(q, self.head_width), _unit(k, self.head_width)
        # Where all heads share keys and values, a head is as good as one more query: no copy of either for each head.
        queries = q.reshape(len(q), -1, self.kv_heads * self.head_width)
        if mask is not None:
            mask = mask.repeat_interleave(self.heads // self.kv_heads, 1)
        out = attend(queries, k, v, self.kv_heads, mask, COSINE_SCALE if self.cosine else self.scale)
        return self.out_norm(self.proj(out.reshape(q.shape)))


class TokenAttention(NullAttention):
    """Attention from tokens to condition tokens."""

    def __init__(self, width: int, context_width: int, cosine: bool):
        super().__init__(width, context_width, TOKEN_HEADS, TOKEN_HEAD_WIDTH, TOKEN_HEADS, cosine)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        """x: [N, T, width]; context: [N, S, context_width]. Returns [N, T, width]."""
        x, (k, v) = self.norm(x), self.keys_and_values(context)
        if self.cosine or k.shape[1] >= self.head_width:
            return self.attend_to(x, k, v)
        # With fewer keys than channels per head the products (x · q-weights) · keys are cheaper from the right: no
        # queries, and 8 · S numbers to keep for each token instead of 2 · 8 · 64. The values likewise.
        k, v = (each.unflatten(-1, (self.heads, -1)) for each in (k, v))
        to_logits = torch.einsum("nshd,hdc->nchs", k, self.q.weight.unflatten(0, (self.heads, -1))).flatten(2)
        to_output = torch.einsum("nshd,chd->nhsc", v, self.proj.weight.unflatten(1, (self.heads, -1))).flatten(1, 2)
        logits = (x @ to_logits).unflatten(-1, (self.heads, -1)) * self.head_width**-0.5
        return self.out_norm(logits.float().softmax(-1).to(x.dtype).flatten(2) @ to_output)


class MultiQueryAttention(NullAttention):
    """Self-attention with one head of keys and values. twice: its logits are scaled twice."""

    def __init__(self, width: int, heads: int, head_width: int, cosine: bool, twice: bool = False):
        super().__init__(width, width, heads, head_width, 1, cosine)
        self.scale = 1 / head_width if twice else None

    def forward(self, x: Tensor, perturbed: Tensor | None = None) -> Tensor:
        """x: [N, T, width]; perturbed: see ``OverPositions``. Returns [N, T, width]."""
        x = self.norm(x)
        # The null key is the first one.
        mask = None if perturbed is None else themselves(perturbed, x.shape[1], 1).roll(1, -1)
        return self.attend_to(x, *self.keys_and_values(x), mask)


class LinearAttention(nn.Module):
    """Attention of linear cost (Shen et al. 2021): queries are normalized over channels, keys over positions, so that
    keys and values can be multiplied first. divided: the result is divided by the number of positions, and by
    √(channels per head)."""

    def __init__(self, width: int, heads: int, head_width: int, divided: bool = False):
        super().__init__()
        self.heads, self.divided = heads, divided
        self.norm = LayerNorm32(width, bias=False)
        self.qkv = Linear(width, 3 * heads * head_width, bias=False)
        self.proj, self.out_norm = Linear(heads * head_width, width, bias=False), LayerNorm32(width, bias=False)

    def forward(self, x: Tensor, perturbed: Tensor | None = None) -> Tensor:
        """x: [N, T, width]; perturbed: see ``OverPositions``. Returns [N, T, width]."""
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)  # [N, T, heads, head_width]
        weights, share = q.float().softmax(-1).to(q.dtype), k.float().softmax(1).to(k.dtype)
        v = F.normalize(v.float(), dim=-1).to(v.dtype)
        summary = torch.einsum("nthc,nthd->nhcd", share, v)
        out = torch.einsum("nthc,nhcd->nthd", weights, summary).flatten(2)
        if perturbed is not None:
            out = torch.where(perturbed[:, None, None], v.flatten(2), out)
        if self.divided:
            out = out / (x.shape[1] * q.shape[-1] ** 0.5)
        return self.out_norm(self.proj(F.gelu(out)))


class NoAttention(nn.Module):
    """In place of ``OverPositions``, the identity."""

    def forward(self, x: Tensor, perturbed: Tensor | None = None) -> Tensor:
        return x


class OverPositions(nn.Module):
    """Residual attention over the positions of a feature map [N, C, H, W]; of the samples where ``perturbed`` [N] is
    True, each position attends to itself alone of all positions."""

    def __init__(self, attention: nn.Module, use_checkpoint: bool):
        super().__init__()
        self.attention, self.use_checkpoint = attention, use_checkpoint

    def forward(self, x: Tensor, perturbed: Tensor | None = None) -> Tensor:
        return recompute(self.use_checkpoint, self._forward, x, perturbed)

    def _forward(self, x: Tensor, perturbed: Tensor | None) -> Tensor:
        return x + to_image(self.attention(to_tokens(x), perturbed), x.shape[2:])
