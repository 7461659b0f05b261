"""Blocks of stages B and C (Pernias et al. 2023, Würstchen), named by letters in a level's string.

Feature maps are [N, C, H, W] in channels-last layout, which is viewed as tokens [N, H · W, C] without a copy. Every
block has the signature ``block(x, context)``; C, which can take a skip connection, ``block(x, context, skip)``.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..attention import attend, themselves
from ..dropout import Dropout
from ..layers import Linear, Module, recompute, to_image, to_tokens, zero_init
from ..norms import LayerNorm32
from ..precision import autocast_disabled

NORM_EPS = 1e-6  # of layer norms and of global response normalization, as in the released networks
TIME_SCALE = 10000.0  # noise conditions in [0, 1] are embedded like timesteps in [0, 10000]


class Context(NamedTuple):
    """What all blocks of a pass share.

    emb:    [N, 1 + micro-conditions, time_width] float32: the embeddings of the noise condition and of each
            micro-condition.
    tokens: [N, S, cond_width], the condition tokens after a SiLU; None = the network has none.
    keys:   [N] int64, dropout keys; None = torch's generator.
    pooled: [N, D] pooled text, where it modulates the blocks T; else None.
    perturbed: see ``Conditioning``.
    """

    emb: Tensor
    tokens: Tensor | None
    keys: Tensor | None
    pooled: Tensor | None = None
    perturbed: Tensor | None = None


def xavier(module: Module, gain: float = 1.0) -> Module:
    """Initialize a linear layer or convolution uniformly after Glorot & Bengio (2010), its bias with 0; return it."""
    nn.init.xavier_uniform_(module.weight, gain)  # type: ignore[arg-type]
    if module.bias is not None:
        nn.init.zeros_(module.bias)  # type: ignore[arg-type]
    return module


def noise_embedding(t: Tensor, width: int) -> Tensor:
    """Sinusoidal embedding of noise conditions: sines, then cosines, at width // 2 frequencies from 1 to 1/10000.

    t: [N] in [0, 1]. Returns [N, width] float32; an odd width is padded with a 0. (``timestep_embedding`` ends short of
    1/10000 and has the cosines first; released weights expect this one.)
    """
    half = width // 2
    exponents = torch.arange(half, dtype=torch.float32, device=t.device) / max(half - 1, 1)
    angles = TIME_SCALE * t.float()[:, None] * torch.exp(-math.log(10000.0) * exponents)
    return F.pad(torch.cat([angles.sin(), angles.cos()], 1), (0, width % 2))


class ChannelNorm(LayerNorm32):
    """Layer norm over the channels of [N, C, H, W], usually without weights."""

    def __init__(self, channels: int, eps: float = NORM_EPS, elementwise_affine: bool = False):
        super().__init__(channels, eps, elementwise_affine)

    def forward(self, input: Tensor) -> Tensor:
        return to_image(super().forward(to_tokens(input)), input.shape[2:])


class _Energy(torch.autograd.Function):
    """The norms of channels over the tokens, [N, T, C] → [N, 1, C] float32, which save nothing but x in its dtype.

    ``torch.linalg.vector_norm`` over a dimension that is not the last one takes ten times as long on CPUs.
    """

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        energy = x.float().square().sum(1, keepdim=True).sqrt()
        ctx.save_for_backward(x, energy)
        return energy

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        x, energy = ctx.saved_tensors
        return (x * torch.where(energy > 0, grad / energy, 0)).to(x.dtype)


class GlobalResponseNorm(nn.Module):
    """Global response normalization (Woo et al. 2023, ConvNeXt V2, §3.2) of tokens; the identity at initialization.

    Statistics are in fp32.
    """

    in_fp32 = True  # see ``units.parts_of``

    def __init__(self, channels: int):
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.zeros(channels)), nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        """[N, T, C] → [N, T, C]."""
        energy = _Energy.apply(x)  # [N, 1, C]
        share = energy / (energy.mean(-1, keepdim=True) + NORM_EPS)
        # gamma · x · share + beta + x in one pass over x.
        return torch.addcmul(self.beta.to(x.dtype), x, (1 + self.gamma * share).to(x.dtype))


class ResponseMlp(nn.Module):
    """Two linear layers around GELU, global response normalization and dropout.

    branches: number of residual branches that are summed; scales the last layer by 1/√branches.
    """

    def __init__(self, in_channels: int, channels: int, dropout: float, branches: int):
        super().__init__()
        self.linear_in = xavier(Linear(in_channels, 4 * channels))
        self.response_norm, self.dropout = GlobalResponseNorm(4 * channels), Dropout(dropout)
        self.linear_out = xavier(Linear(4 * channels, channels), gain=branches**-0.5)

    def forward(self, x: Tensor, keys: Tensor | None) -> Tensor:
        """[N, T, in_channels] → [N, T, channels]."""
        return self.linear_out(self.dropout(self.response_norm(F.gelu(self.linear_in(x))), keys))


class ConvBlock(nn.Module):
    """C: a depthwise convolution, layer norm and ``ResponseMlp``, with a shortcut (after ConvNeXt V2).

    skip_channels: channels of the skip connection that is concatenated after the norm; 0 = none.
    """

    is_block = True  # see ``units``

    def __init__(
        self, channels: int, skip_channels: int, kernel_size: int, dropout: float, branches: int, use_checkpoint: bool
    ):
        super().__init__()
        self.skip_channels, self.use_checkpoint = skip_channels, use_checkpoint
        padding = kernel_size // 2
        self.depthwise = xavier(nn.Conv2d(channels, channels, kernel_size, padding=padding, groups=channels))
        self.norm = ChannelNorm(channels)
        self.mlp = ResponseMlp(channels + skip_channels, channels, dropout, branches)

    def forward(self, x: Tensor, context: Context, skip: Tensor | None = None) -> Tensor:
        """x: [N, channels, H, W]; skip: [N, skip_channels, H, W]. Returns [N, channels, H, W]."""
        keys = context.keys
        return recompute(self.use_checkpoint, self._forward, x, skip, keys, random=keys is None)

    def _forward(self, x: Tensor, skip: Tensor | None, keys: Tensor | None) -> Tensor:
        h = self.norm(self.depthwise(x))
        if skip is not None:
            h = torch.cat([h, skip.to(h.dtype)], 1)
        return x + to_image(self.mlp(to_tokens(h), keys), x.shape[2:])


class FeedForward(nn.Module):
    """F: layer norm and ``ResponseMlp``, with a shortcut."""

    is_block = True  # see ``units``

    def __init__(self, channels: int, dropout: float, branches: int, use_checkpoint: bool):
        super().__init__()
        self.use_checkpoint = use_checkpoint
        self.norm = ChannelNorm(channels)
        self.mlp = ResponseMlp(channels, channels, dropout, branches)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """[N, channels, H, W] → [N, channels, H, W]."""
        keys = context.keys
        return recompute(self.use_checkpoint, self._forward, x, keys, random=keys is None)

    def _forward(self, x: Tensor, keys: Tensor | None) -> Tensor:
        return x + to_image(self.mlp(to_tokens(self.norm(x)), keys), x.shape[2:])


class JointAttention(nn.Module):
    """One multi-head attention from tokens to themselves and to further tokens. All its weights are in ``in_proj``
    (queries, keys, values) and ``out_proj``, where adapters look for them."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.in_proj, self.out_proj = xavier(Linear(width, 3 * width)), xavier(Linear(width, width))

    def forward(self, x: Tensor, further: Tensor | None, perturbed: Tensor | None = None) -> Tensor:
        """x: [N, T, width]; further: [N, S, width]; perturbed: [N] bool, True = each token attends to itself and to the
        further ones alone. Returns [N, T, width]."""
        # One product for all, queries of the further tokens included: those are few.
        keyed = x if further is None else torch.cat([x, further.to(x.dtype)], 1)
        q, k, v = self.in_proj(keyed).chunk(3, dim=-1)
        mask = None if perturbed is None else themselves(perturbed, x.shape[1], k.shape[1] - x.shape[1])
        return self.out_proj(attend(q[:, : x.shape[1]], k, v, self.heads, mask))


class AttentionBlock(nn.Module):
    """A: joint attention over positions and condition tokens, with a shortcut. All condition tokens are attended to.

    cond_width: width of the condition tokens; 0 = attention over positions alone.
    """

    is_block = True  # see ``units``

    def __init__(self, channels: int, heads: int, cond_width: int, use_checkpoint: bool):
        super().__init__()
        self.use_checkpoint = use_checkpoint
        self.norm = ChannelNorm(channels)
        self.attn = JointAttention(channels, heads)
        self.kv_mapper = xavier(Linear(cond_width, channels)) if cond_width else None

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """[N, channels, H, W] → [N, channels, H, W]."""
        return recompute(self.use_checkpoint, self._forward, x, context.tokens, context.perturbed)

    def _forward(self, x: Tensor, tokens: Tensor | None, perturbed: Tensor | None) -> Tensor:
        further = None if self.kv_mapper is None else self.kv_mapper(tokens)
        return x + to_image(self.attn(to_tokens(self.norm(x)), further, perturbed), x.shape[2:])


class TimestepBlock(nn.Module):
    """T: the noise condition and the micro-conditions scale and shift every channel; the identity at initialization.

    conditions:   the number of both together.
    pooled_width: of the pooled text, which does too; 0 = it does not.
    """

    full_precision = ("mappers", "text")  # see ``for_inference``

    def __init__(self, channels: int, time_width: int, conditions: int, pooled_width: int = 0):
        super().__init__()
        self.mappers = nn.ModuleList(zero_init(nn.Linear(time_width, 2 * channels)) for _ in range(conditions))
        self.text = zero_init(nn.Linear(pooled_width, 2 * channels)) if pooled_width else None

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """[N, channels, H, W] → [N, channels, H, W]."""
        with autocast_disabled(x.device):
            embs = context.emb.unbind(1)
            signal = sum(mapper(emb) for mapper, emb in zip(self.mappers, embs, strict=True))
            if self.text is not None:
                signal = signal + self.text(context.pooled.float())  # type: ignore[union-attr]
            scale, shift = signal[:, :, None, None].chunk(2, dim=1)
            return torch.addcmul(shift.to(x.dtype), x, (1 + scale).to(x.dtype))


class Transition(nn.Module):
    """Layer norm, then the change of width and resolution between two levels.

    kind: "strided": a convolution of stride 2, or on the way up its transpose; "resized": a 1×1 convolution and
          bilinear resizing by 2; "same": a 1×1 convolution.
    """

    def __init__(self, channels: int, out_channels: int, kind: str, up: bool):
        super().__init__()
        self.factor = 1.0 if kind != "resized" else 2.0 if up else 0.5
        self.norm = ChannelNorm(channels)
        if kind != "strided":
            self.conv: nn.Module = xavier(nn.Conv2d(channels, out_channels, 1))
        elif up:  # with torch's own initial values, as in the released networks
            self.conv = nn.ConvTranspose2d(channels, out_channels, 2, stride=2)
        else:
            self.conv = xavier(nn.Conv2d(channels, out_channels, 2, stride=2))

    def forward(self, x: Tensor) -> Tensor:
        # Convolution and resizing commute: the convolution is where the resolution is lower.
        x = self.norm(x)
        if self.factor < 1:
            x = self._resized(x)
        x = self.conv(x)
        return self._resized(x) if self.factor > 1 else x

    def _resized(self, x: Tensor) -> Tensor:
        return F.interpolate(x, scale_factor=self.factor, mode="bilinear", align_corners=True)


def resized_to(x: Tensor, size: torch.Size | tuple[int, int]) -> Tensor:
    """[N, C, h, w] bilinearly resized to ``size`` (H, W), corners aligned."""
    return x if x.shape[2:] == size else F.interpolate(x, tuple(size), mode="bilinear", align_corners=True)
