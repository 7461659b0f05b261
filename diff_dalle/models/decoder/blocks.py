"""Blocks of the decoder's U-Nets: convolutions, and attention to condition tokens and over positions.

Feature maps are [N, C, H, W] in channels-last layout. All layers of attention map tokens [N, T, width] to tokens and
normalize input and output; most have a learned null key and value, to which a query can attend when nothing else fits.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..attention import attend, themselves
from ..layers import Linear, recompute, to_image, to_tokens
from ..norms import GroupNorm32, LayerNorm32


class StandardizedConv2d(nn.Conv2d):
    """A convolution whose weights are standardized for each output channel (Qiao et al. 2019), in fp32."""

    def forward(self, input: Tensor) -> Tensor:
        variance, mean = torch.var_mean(self.weight, (1, 2, 3), correction=0, keepdim=True)
        return self._conv_forward(input, (self.weight - mean) * (variance + 1e-5).rsqrt(), self.bias)


class ConvNorm(nn.Module):
    """3×3 convolution, group norm, an optional scale and shift, SiLU."""

    def __init__(self, channels: int, out_channels: int, groups: int, standardized: bool = False):
        super().__init__()
        conv = StandardizedConv2d if standardized else nn.Conv2d
        self.conv = conv(channels, out_channels, 3, padding=1)
        self.norm = GroupNorm32(out_channels, groups)
        self.full_precision = ("conv",) if standardized else ()  # see ``for_inference``

    def forward(self, x: Tensor, scale_shift: Tensor | None = None) -> Tensor:
        """scale_shift: [N, 2 · out_channels]."""
        return self.norm(self.conv(x), scale_shift, silu=True)


class ResidualBlock(nn.Module):
    """Two ``ConvNorm`` and a shortcut. The timestep vector scales and shifts the first; attention to condition tokens
    follows it.

    token_width: width of the condition tokens; 0 = no attention to them.
    skip_scale:  factor of the skip connection that is concatenated to the input.
    """

    is_block = True  # see ``units``

    def __init__(
        self,
        channels: int,
        out_channels: int,
        emb_width: int,
        groups: int,
        token_width: int = 0,
        cosine: bool = False,
        standardized: bool = False,
        use_checkpoint: bool = False,
        skip_scale: float = 1.0,
    ):
        super().__init__()
        self.use_checkpoint, self.skip_scale = use_checkpoint, skip_scale
        self.emb = nn.Linear(emb_width, 2 * out_channels)
        self.first = ConvNorm(channels, out_channels, groups, standardized)
        self.attention = TokenAttention(out_channels, token_width, cosine) if token_width else None
        self.second = ConvNorm(out_channels, out_channels, groups, standardized)
        self.shortcut = None if channels == out_channels else Linear(channels, out_channels)

    def forward(self, x: Tensor, emb: Tensor, tokens: Tensor | None = None, skip: Tensor | None = None) -> Tensor:
        """x: [N, C, H, W]; emb: [N, emb_width] after its SiLU; tokens: [N, S, token_width]; skip: [N, C', H, W] with
        C + C' = channels. Returns [N, out_channels, H, W]."""
        return recompute(self.use_checkpoint, self._forward, x, emb, tokens, skip)

    def _forward(self, x: Tensor, emb: Tensor, tokens: Tensor | None, skip: Tensor | None) -> Tensor:
        if skip is not None:  # here, so that checkpointing keeps no copy of the two
            x = torch.cat([x, skip if self.skip_scale == 1 else self.skip_scale * skip], dim=1)
        size = x.shape[2:]
        h = self.first(x, self.emb(emb))
        if self.attention is not None:
            h = h + to_image(self.attention(to_tokens(h), tokens), size)
        return self.second(h) + (x if self.shortcut is None else to_image(self.shortcut(to_tokens(x)), size))


class CrossEmbed(nn.Module):
    """Parallel convolutions of several kernel sizes (Wang et al. 2021), which share the output channels: half for the
    smallest kernel, a quarter for the next, and so on; the largest takes the rest.

    kernel_sizes: odd for stride 1, even for stride 2.
    """

    def __init__(self, channels: int, out_channels: int, kernel_sizes: tuple[int, ...], stride: int):
        super().__init__()
        sizes = sorted(kernel_sizes)
        widths = [out_channels >> i for i in range(1, len(sizes))]
        widths.append(out_channels - sum(widths))
        self.convs = nn.ModuleList(
            nn.Conv2d(channels, width, size, stride, (size - stride) // 2)
            for width, size in zip(widths, sizes, strict=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([conv(x) for conv in self.convs], dim=1)


class PixelShuffle(nn.Module):
    """Double the resolution: a position's linear map gives the 2×2 positions it becomes (Shi et al. 2016). The four
    maps start equal, which avoids checkerboard patterns (Aitken et al. 2017)."""

    def __init__(self, channels: int, out_channels: int):
        super().__init__()
        self.linear = Linear(channels, 4 * out_channels)
        with torch.no_grad():
            for parameter in (self.linear.weight, self.linear.bias):
                parameter.copy_(parameter[:out_channels].repeat(4, *[1] * (parameter.dim() - 1)))

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[2:]
        h = F.silu(self.linear(to_tokens(x))).unflatten(2, (2, 2, -1)).unflatten(1, (height, width))
        return to_image(h.transpose(2, 3).flatten(1, 4), (2 * height, 2 * width))


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

    is_block = True  # see ``units``

    def __init__(self, attention: nn.Module, use_checkpoint: bool):
        super().__init__()
        self.attention, self.use_checkpoint = attention, use_checkpoint

    def forward(self, x: Tensor, perturbed: Tensor | None = None) -> Tensor:
        return recompute(self.use_checkpoint, self._forward, x, perturbed)

    def _forward(self, x: Tensor, perturbed: Tensor | None) -> Tensor:
        return x + to_image(self.attention(to_tokens(x), perturbed), x.shape[2:])
