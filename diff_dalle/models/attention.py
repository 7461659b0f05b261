"""Self-attention over image positions or tokens, and cross-attention from them to text.

Tokens are [N, T, C]. An image in channels-last layout can be viewed as tokens without a copy.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..batch import Conditioning
from .layers import Linear, recompute, to_image, to_tokens, zero_init
from .norms import GroupNorm32
from .precision import autocast_disabled

# The backward pass of torch's CPU kernel in bfloat16 takes as long for few and narrow keys as for many: up to 6 times
# that of fp32 for 64 keys, 0.6 of it for 1,024 of 64 channels (on an Intel processor with AMX). The forward pass is no
# slower than in fp32.
FEW_KEYS = 2**13  # times the channels of a head


def trains_faster_in_fp32(q: Tensor, k: Tensor, heads: int) -> bool:
    """Whether attention in bfloat16 on a CPU is better computed in fp32, for its gradients. q, k: see ``attend``."""
    few = k.shape[1] * k.shape[2] <= FEW_KEYS * heads
    trains = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad)
    return few and trains and q.device.type == "cpu" and q.dtype == torch.bfloat16


def attend(q: Tensor, k: Tensor, v: Tensor, heads: int, mask: Tensor | None, scale: float | None = None) -> Tensor:
    """Multi-head scaled dot-product attention (Vaswani et al. 2017, eq. 1).

    q: [N, T, C]; k, v: [N, S, C]; mask: [N, S] bool, or [N, T, S] for each query, True = attend to this key (at least
    one), None = all.
    scale: factor of the dot products; None = 1/√(C / heads).
    Returns [N, T, C].
    """
    if trains_faster_in_fp32(q, k, heads):
        with autocast_disabled(q.device):
            return attend(q.float(), k.float(), v.float(), heads, mask, scale).to(q.dtype)
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    attn_mask = None if mask is None else mask[:, None, None, :] if mask.dim() == 2 else mask[:, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, scale=scale).transpose(1, 2).flatten(2)


def themselves(perturbed: Tensor, tokens: int, further: int) -> Tensor:
    """[N, T, T + S] bool, the mask of T tokens that attend to all T and to S further ones or, where ``perturbed`` [N]
    is True, to themselves and to the further ones alone (see ``Conditioning.perturbed``)."""
    own = torch.eye(tokens, dtype=torch.bool, device=perturbed.device)
    return F.pad(own | ~perturbed[:, None, None], (0, further), value=True)


class SelfAttention(nn.Module):
    """Self-attention; with a ``context_width`` the context's keys and values are appended to the tokens' own."""

    def __init__(self, width: int, heads: int, context_width: int = 0):
        super().__init__()
        self.heads = heads
        self.qkv = Linear(width, 3 * width)
        self.context_kv = Linear(context_width, 2 * width) if context_width else None
        self.proj = Linear(width, width)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        context: Tensor | None = None,
        perturbed: Tensor | None = None,
    ) -> Tensor:
        """x: [N, T, width]; context: [N, S, context_width]; mask: [N, T] or, with context, [N, T + S]; perturbed: [N]
        bool, True = each token attends to itself and to the context alone, None = nowhere."""
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        if self.context_kv is not None:
            context_k, context_v = self.context_kv(context).chunk(2, dim=-1)
            k, v = torch.cat([k, context_k], 1), torch.cat([v, context_v], 1)
        if perturbed is not None and self.context_kv is not None:
            own = themselves(perturbed, x.shape[1], k.shape[1] - x.shape[1])
            mask = own if mask is None else own & mask[:, None]
        out = attend(q, k, v, self.heads, mask)
        if perturbed is not None and self.context_kv is None:  # a single key has all the weight
            out = torch.where(perturbed[:, None, None], v, out)
        return self.proj(out)


class CrossAttention(nn.Module):
    """Encoder-decoder attention: queries from the tokens, keys and values from the context."""

    def __init__(self, width: int, heads: int, context_width: int):
        super().__init__()
        self.heads = heads
        self.q = Linear(width, width)
        self.kv = Linear(context_width, 2 * width)
        self.proj = Linear(width, width)

    def forward(self, x: Tensor, context: Tensor, mask: Tensor) -> Tensor:
        """x: [N, T, width]; context: [N, S, context_width]; mask: [N, S]."""
        k, v = self.kv(context).chunk(2, dim=-1)
        return self.proj(attend(self.q(x), k, v, self.heads, mask))


class AttentionBlock(nn.Module):
    """Residual attention over the positions of a feature map, with optional text conditioning.

    text_width:     channels of ``cond.text_states``; 0 = no text.
    text_attention: "cross" adds a cross-attention layer after self-attention (Vaswani et al. 2017, §3.2.3);
                    "joint" appends the text to the keys and values of self-attention (Nichol et al. 2022, GLIDE).
    """

    is_block = True  # see ``units``

    def __init__(self, channels: int, heads: int, text_width: int, text_attention: str, use_checkpoint: bool):
        super().__init__()
        cross = text_width > 0 and text_attention == "cross"
        self.joint, self.use_checkpoint = text_width > 0 and not cross, use_checkpoint
        self.norm = GroupNorm32(channels)
        self.attention = SelfAttention(channels, heads, text_width if self.joint else 0)
        zero_init(self.attention.proj)
        self.text_norm = GroupNorm32(channels) if cross else None
        self.text_attention = CrossAttention(channels, heads, text_width) if cross else None
        if self.text_attention is not None:
            zero_init(self.text_attention.proj)

    def forward(self, x: Tensor, emb: Tensor, cond: Conditioning) -> Tensor:
        return recompute(self.use_checkpoint, self._forward, x, cond.text_states, cond.states_mask, cond.perturbed)

    def _forward(self, x: Tensor, text: Tensor | None, mask: Tensor | None, perturbed: Tensor | None) -> Tensor:
        size = x.shape[2:]
        if self.joint:
            assert mask is not None  # checked by UNetEncoder.embed
            positions = size[0] * size[1]
            h = self.attention(to_tokens(self.norm(x)), F.pad(mask, (positions, 0), value=True), text, perturbed)
        else:
            h = self.attention(to_tokens(self.norm(x)), perturbed=perturbed)
        x = x + to_image(h, size)
        if self.text_attention is not None and self.text_norm is not None:
            x = x + to_image(self.text_attention(to_tokens(self.text_norm(x)), text, mask), size)
        return x
