"""Stages B and C from plain torch modules: the baseline for speed.

The same functions as ``models.latent`` with the tiny sizes, in NCHW layout: every norm and every MLP permutes the
feature map and back, ``nn.MultiheadAttention`` attends, all is computed as the formulas are written. Text encoder and
condition tokens, a small part, are the same modules.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diff_dalle.batch import Conditioning
from diff_dalle.models.latent.blocks import NORM_EPS, noise_embedding
from diff_dalle.models.latent.conditions import ConditionTokens
from diff_dalle.models.latent.config import LatentUnetConfig
from diff_dalle.models.latent.stages import StageBConfig
from diff_dalle.models.text_encoder import TextEncoder, encode_captions


class Norm(nn.LayerNorm):
    """Over the channels of [N, C, H, W]."""

    def __init__(self, channels: int):
        super().__init__(channels, NORM_EPS, elementwise_affine=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ResponseNorm(nn.Module):
    """Of [N, H, W, C]."""

    def __init__(self, channels: int):
        super().__init__()
        self.gamma, self.beta = (nn.Parameter(torch.zeros(1, 1, 1, channels)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        energy = torch.norm(x, p=2, dim=(1, 2), keepdim=True)
        return self.gamma * (x * energy / (energy.mean(dim=-1, keepdim=True) + NORM_EPS)) + self.beta + x


class ConvBlock(nn.Module):
    def __init__(self, channels: int, skip_channels: int, kernel_size: int):
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, kernel_size, padding=kernel_size // 2, groups=channels)
        self.norm = Norm(channels)
        self.mlp = nn.Sequential(
            nn.Linear(channels + skip_channels, 4 * channels),
            nn.GELU(),
            ResponseNorm(4 * channels),
            nn.Linear(4 * channels, channels),
        )

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        h = self.norm(self.depthwise(x))
        if skip is not None:
            h = torch.cat([h, skip], dim=1)
        return x + self.mlp(h.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class AttentionBlock(nn.Module):
    def __init__(self, channels: int, heads: int, cond_width: int):
        super().__init__()
        self.norm = Norm(channels)
        self.attention = nn.MultiheadAttention(channels, heads, batch_first=True)
        self.kv_mapper = nn.Sequential(nn.SiLU(), nn.Linear(cond_width, channels)) if cond_width else None

    def forward(self, x: Tensor, tokens: Tensor | None) -> Tensor:
        rows = self.norm(x).flatten(2).transpose(1, 2)
        keys = rows if self.kv_mapper is None else torch.cat([rows, self.kv_mapper(tokens)], dim=1)
        out, _ = self.attention(rows, keys, keys, need_weights=False)
        return x + out.transpose(1, 2).reshape(x.shape)


class TimestepBlock(nn.Module):
    def __init__(self, channels: int, time_width: int, conditions: int):
        super().__init__()
        self.mappers = nn.ModuleList(nn.Linear(time_width, 2 * channels) for _ in range(conditions))

    def forward(self, x: Tensor, embs: list[Tensor]) -> Tensor:
        signal = sum(mapper(emb)[:, :, None, None] for mapper, emb in zip(self.mappers, embs, strict=True))
        scale, shift = signal.chunk(2, dim=1)
        return x * (1 + scale) + shift


class BaselineLatentUnet(nn.Module):
    """Has the parameters of ``StageB`` or ``StageC`` in the same order."""

    def __init__(self, config: LatentUnetConfig, vocab_size: int):
        super().__init__()
        self.config = c = config
        widths, levels = c.widths, range(c.depth)
        self.in_conv, self.in_norm = nn.Conv2d(c.channels * c.patch_size**2, widths[0], 1), Norm(widths[0])
        self.condition_tokens = ConditionTokens(c) if c.has_tokens else None
        self.down_blocks = nn.ModuleList(self._blocks(i, c.down_blocks[i], 0) for i in levels)
        self.down_repeats = nn.ModuleList(_between(widths[i], c.down_repeats[i]) for i in levels)
        self.downs = nn.ModuleList(
            _transition(widths[i], widths[i + 1], c.transitions[i], nn.Conv2d) for i in levels[:-1]
        )
        upwards = levels[::-1]
        self.up_blocks = nn.ModuleList(
            self._blocks(i, count, widths[i] if i < levels[-1] else 0)
            for i, count in zip(upwards, c.up_blocks, strict=True)
        )
        self.up_repeats = nn.ModuleList(_between(widths[i], n) for i, n in zip(upwards, c.up_repeats, strict=True))
        self.ups = nn.ModuleList(
            _transition(widths[i], widths[i - 1], c.transitions[i - 1], nn.ConvTranspose2d) for i in upwards[:-1]
        )
        self.out = nn.Sequential(Norm(widths[0]), nn.Conv2d(widths[0], c.channels * c.patch_size**2, 1))
        self.text_encoder = TextEncoder(c.text, vocab_size) if c.text.enc_attn_dim else None
        self.semantic_mapper: nn.Module | None = None
        if isinstance(c, StageBConfig):
            self.semantic_mapper = nn.Sequential(
                nn.Conv2d(c.semantic_channels, 4 * widths[0], 1),
                nn.GELU(),
                nn.Conv2d(4 * widths[0], widths[0], 1),
                Norm(widths[0]),
            )

    def _blocks(self, level: int, count: int, skip_channels: int) -> nn.ModuleList:
        c, width, letters = self.config, self.config.widths[level], self.config.levels[level] * count
        makers = {
            "C": lambda skip: ConvBlock(width, skip, c.kernel_size),
            "A": lambda _: AttentionBlock(width, c.heads[level], c.cond_width if c.has_tokens else 0),
            "T": lambda _: TimestepBlock(width, c.time_width, 1 + len(c.micro_conditions)),
        }
        return nn.ModuleList(makers[letter](0 if i else skip_channels) for i, letter in enumerate(letters))

    def forward(self, x: Tensor, t: Tensor, cond: Conditioning) -> Tensor:
        c = self.config
        cond = encode_captions(self.text_encoder, cond)
        tokens = None if self.condition_tokens is None else self.condition_tokens(cond, len(x))
        embs = [noise_embedding(t, c.time_width)]
        embs += [noise_embedding(torch.zeros_like(t), c.time_width) for _ in c.micro_conditions]
        h = self.in_norm(self.in_conv(F.pixel_unshuffle(x, c.patch_size)))
        if self.semantic_mapper is not None and cond.semantic is not None:
            semantic = F.interpolate(cond.semantic, h.shape[2:], mode="bilinear", align_corners=True)
            h = h + self.semantic_mapper(semantic)
        skips: list[Tensor] = []
        for level, (blocks, repeats) in enumerate(zip(self.down_blocks, self.down_repeats, strict=True)):
            h = _run(blocks, repeats, self.downs[level - 1](h) if level else h, embs, tokens, None)
            skips.append(h)
        for level, (blocks, repeats) in enumerate(zip(self.up_blocks, self.up_repeats, strict=True)):
            skip = skips[-1 - level] if level else None
            h = _run(blocks, repeats, self.ups[level - 1](h) if level else h, embs, tokens, skip)
        return F.pixel_shuffle(self.out(h), c.patch_size)


def _between(width: int, passes: int) -> nn.ModuleList:
    return nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(passes - 1))


def _transition(channels: int, out_channels: int, kind: str, convolution: type[nn.Module]) -> nn.Sequential:
    """kind: "strided" or "same"; the tiny sizes have no "resized"."""
    strided = convolution(channels, out_channels, 2, stride=2)
    return nn.Sequential(Norm(channels), strided if kind == "strided" else nn.Conv2d(channels, out_channels, 1))


def _run(blocks, repeats, h: Tensor, embs: list[Tensor], tokens: Tensor | None, skip: Tensor | None) -> Tensor:
    for conv in (*repeats, None):
        for i, block in enumerate(blocks):
            if isinstance(block, ConvBlock):
                h = block(h, None if i else skip)
            else:
                h = block(h, embs if isinstance(block, TimestepBlock) else tokens)
        h = h if conv is None else conv(h)
    return h
