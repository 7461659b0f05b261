"""The decoder's U-Net from plain torch modules: the baseline for speed.

The same function as ``models.decoder.unet.DecoderUnet`` with the settings of the documented example, in NCHW layout,
with explicit softmaxes, keys and values copied for each head, and space-to-depth before 1×1 convolutions.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diff_dalle.batch import Conditioning
from diff_dalle.models.decoder.blocks import PixelShuffle
from diff_dalle.models.decoder.conditions import Conditions
from diff_dalle.models.decoder.config import DecoderUnetConfig, Stage
from diff_dalle.models.decoder.unet import DecoderUnet


def plain_norm(width: int) -> nn.LayerNorm:
    return nn.LayerNorm(width, bias=False)


class ExplicitAttention(nn.Module):
    """Attention of a feature map to condition tokens or, without them, to itself with one head of keys and values."""

    def __init__(self, width: int, heads: int, head_width: int, token_width: int = 0):
        super().__init__()
        self.heads, self.head_width = heads, head_width
        kv_width = 2 * head_width * (heads if token_width else 1)
        self.null_kv, self.norm = nn.Parameter(torch.randn(2, head_width)), plain_norm(width)
        self.q = nn.Linear(width, heads * head_width, bias=False)
        self.kv = nn.Linear(token_width or width, kv_width, bias=False)
        self.proj, self.out_norm = nn.Linear(heads * head_width, width, bias=False), plain_norm(width)

    def forward(self, x: Tensor, tokens: Tensor | None = None) -> Tensor:
        n, c, h, w = x.shape
        rows = self.norm(x.reshape(n, c, h * w).transpose(1, 2))
        kv = self.kv(rows if tokens is None else tokens).reshape(n, -1, 2, self._kv_heads, self.head_width)
        kv = kv.permute(2, 0, 3, 1, 4).expand(-1, -1, self.heads, -1, -1)  # [2, N, heads, S, head_width]
        nulls = self.null_kv[:, None, None, None].expand(2, n, self.heads, 1, -1)
        k, v = torch.cat([nulls, kv], dim=3)
        q = self.q(rows).reshape(n, h * w, self.heads, self.head_width).transpose(1, 2)
        weights = (self.head_width**-0.5 * q @ k.transpose(2, 3)).softmax(dim=-1)
        out = (weights @ v).transpose(1, 2).reshape(n, h * w, -1)
        return x + self.out_norm(self.proj(out)).transpose(1, 2).reshape(n, c, h, w)

    @property
    def _kv_heads(self) -> int:
        return self.kv.out_features // (2 * self.head_width)


class Half(nn.Module):
    def __init__(self, channels: int, out_channels: int, groups: int):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, out_channels, 3, padding=1), nn.GroupNorm(groups, out_channels)

    def forward(self, x: Tensor, scale_shift: tuple[Tensor, Tensor] | None = None) -> Tensor:
        x = self.norm(self.conv(x))
        if scale_shift is not None:
            scale, shift = scale_shift
            x = x * (scale + 1) + shift
        return F.silu(x)


class Block(nn.Module):
    def __init__(self, channels: int, out_channels: int, emb_width: int, groups: int, token_width: int = 0):
        super().__init__()
        self.emb, self.first = nn.Linear(emb_width, 2 * out_channels), Half(channels, out_channels, groups)
        self.attention = ExplicitAttention(out_channels, 8, 64, token_width) if token_width else None
        self.second = Half(out_channels, out_channels, groups)
        self.shortcut = nn.Identity() if channels == out_channels else nn.Conv2d(channels, out_channels, 1)

    def forward(self, x: Tensor, emb: Tensor, tokens: Tensor | None = None) -> Tensor:
        scale, shift = self.emb(emb)[:, :, None, None].chunk(2, dim=1)
        h = self.first(x, (scale, shift))
        if self.attention is not None:
            h = self.attention(h, tokens)
        return self.second(h) + self.shortcut(x)


class Down(nn.ModuleList):
    """Blocks, then the convolution of the resampling; ``skips`` gets a skip connection per block."""

    def forward(self, x: Tensor, emb: Tensor, tokens: Tensor, skips: list[Tensor], is_last: bool) -> Tensor:
        *blocks, resample = self
        for i, block in enumerate(blocks):
            x = block(x, emb, tokens)
            if i:
                skips.append(x)
        skips.append(x)
        return resample(x if is_last else F.pixel_unshuffle(x, 2))


class Up(nn.ModuleList):
    """Blocks, each of which takes a skip connection, then the convolution of the resampling, if any."""

    def forward(self, x: Tensor, emb: Tensor, tokens: Tensor, skips: list[Tensor]) -> Tensor:
        for layer in self:
            if isinstance(layer, Block):
                x = layer(torch.cat([x, skips.pop()], dim=1), emb, tokens)
            else:
                x = F.pixel_shuffle(F.silu(layer(x)), 2)
        return x


class BaselineDecoderUnet(nn.Module):
    """Has the parameters of ``DecoderUnet`` in the same order. Its conditions, a small part, are the same module."""

    def __init__(self, config: DecoderUnetConfig, learned_variance: bool = True):
        super().__init__()
        stages, width, tokens = config.stages, config.stem_width, config.token_width

        def block(channels: int, out_channels: int, stage: Stage, attends: bool = False) -> Block:
            return Block(channels, out_channels, config.emb_width, stage.groups, tokens if attends else 0)

        self.conditions = Conditions(config, image_embedding=True, low_res_level=False, attended=True)
        widths = (width // 2, width // 4, width - width // 2 - width // 4)
        self.stem = nn.ModuleList(
            nn.Conv2d(config.channels, each, size, padding=size // 2)
            for each, size in zip(widths, config.init_cross_embed_kernel_sizes, strict=True)
        )
        self.downs, last = nn.ModuleList(), stages[-1]
        for i, stage in enumerate(stages):
            blocks = [block(stage.width, stage.width, stage, attends=i > 0 and j > 0) for j in range(stage.blocks + 1)]
            factor = 1 if stage is last else 4
            self.downs.append(Down([*blocks, nn.Conv2d(factor * stage.width, stage.out_width, 1)]))
        self.middle_in = block(last.out_width, last.out_width, last, attends=True)
        self.middle_attention = ExplicitAttention(last.out_width, config.attn_heads, config.attn_dim_head)
        self.middle_out = block(last.out_width, last.out_width, last, attends=True)
        self.ups = nn.ModuleList()
        for i, stage in reversed(list(enumerate(stages))):
            joined = stage.out_width + stage.width
            layers: list[nn.Module] = [block(joined, stage.out_width, stage, i > 0) for _ in range(stage.blocks + 1)]
            if i:
                layers.append(nn.Conv2d(stage.out_width, 4 * stage.in_width, 1))
            self.ups.append(Up(layers))
        self.last_block = block(stages[0].out_width + width, config.dim, stages[0])
        self.out_conv = nn.Conv2d(config.dim, config.channels * (1 + learned_variance), 1)

    def forward(self, x: Tensor, t: Tensor, cond: Conditioning) -> Tensor:
        emb, tokens, middle_tokens = self.conditions(t, self.conditions.project(cond))
        x = stem = torch.cat([conv(x) for conv in self.stem], dim=1)
        skips: list[Tensor] = []
        for i, down in enumerate(self.downs):
            x = down(x, emb, tokens, skips, is_last=i == len(self.downs) - 1)
        x = self.middle_attention(self.middle_in(x, emb, middle_tokens))
        x = self.middle_out(x, emb, middle_tokens)
        for up in self.ups:
            x = up(x, emb, tokens, skips)
        return self.out_conv(self.last_block(torch.cat([x, stem], dim=1), emb))


def to_plain(network: DecoderUnet, tensors: list[Tensor]) -> list[Tensor]:
    """Convert tensors shaped like ``network``'s parameters (weights or gradients) to the baseline's layout, in which a
    pixel shuffle's channels are ordered by (channel, position) instead of (position, channel)."""
    shuffled = {
        id(parameter)
        for module in network.modules()
        if isinstance(module, PixelShuffle)
        for parameter in module.parameters()
    }
    with torch.device("meta"):
        baseline = BaselineDecoderUnet(network.config)
    converted = []
    for own, tensor, other in zip(network.parameters(), tensors, baseline.parameters(), strict=True):
        if id(own) in shuffled:
            tensor = tensor.unflatten(0, (4, -1)).transpose(0, 1)
        converted.append(tensor.reshape(other.shape))
    return converted
