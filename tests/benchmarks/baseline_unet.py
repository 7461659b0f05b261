"""Guided-Diffusion's U-Net as published: the baseline for speed.

The same function as ``models.unet.UNet`` without text, in NCHW layout, with attention as 1-D convolutions and two
einsums around an explicit softmax, and with activation checkpointing of all attention layers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from diff_dalle.models.attention import SelfAttention
from diff_dalle.models.layers import timestep_embedding
from diff_dalle.models.unet import UNet, UNetConfig


class Norm(nn.GroupNorm):
    def __init__(self, channels: int):
        super().__init__(32, channels)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.float()).type(input.dtype)


class Res(nn.Module):
    def __init__(self, channels: int, out_channels: int, emb_width: int, scale_shift: bool, resample=None):
        super().__init__()
        self.scale_shift, self.resample = scale_shift, resample
        self.in_norm, self.in_conv = Norm(channels), nn.Conv2d(channels, out_channels, 3, padding=1)
        self.emb = nn.Sequential(nn.SiLU(), nn.Linear(emb_width, (1 + scale_shift) * out_channels))
        self.out_norm, self.out_conv = Norm(out_channels), nn.Conv2d(out_channels, out_channels, 3, padding=1)
        self.skip = nn.Identity() if channels == out_channels else nn.Conv2d(channels, out_channels, 1)

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        h = F.silu(self.in_norm(x))
        if self.resample is not None:
            h, x = self.resample(h), self.resample(x)
        h = self.in_conv(h)
        signal = self.emb(emb)[:, :, None, None]
        if self.scale_shift:
            scale, shift = signal.chunk(2, dim=1)
            h = self.out_norm(h) * (1 + scale) + shift
        else:
            h = self.out_norm(h + signal)
        return self.skip(x) + self.out_conv(F.silu(h))


class Attention(nn.Module):
    def __init__(self, channels: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm = Norm(channels)
        self.qkv, self.proj = nn.Conv1d(channels, 3 * channels, 1), nn.Conv1d(channels, channels, 1)

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        return checkpoint(self._forward, x, use_reentrant=True, preserve_rng_state=False)

    def _forward(self, x: Tensor) -> Tensor:
        n, c, *size = x.shape
        x = x.reshape(n, c, -1)
        width = c // self.heads
        q, k, v = self.qkv(self.norm(x)).reshape(n * self.heads, 3 * width, -1).split(width, dim=1)
        scale = width**-0.25  # applied to both factors against overflow in fp16
        weights = torch.einsum("bct,bcs->bts", q * scale, k * scale).float().softmax(dim=-1).type(q.dtype)
        h = torch.einsum("bts,bcs->bct", weights, v).reshape(n, c, -1)
        return (x + self.proj(h)).reshape(n, c, *size)


class Down(nn.Module):
    def __init__(self, channels: int, learned: bool):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2, padding=1) if learned else None

    def forward(self, x: Tensor, emb: Tensor | None = None) -> Tensor:
        return F.avg_pool2d(x, 2) if self.conv is None else self.conv(x)


class Up(nn.Module):
    def __init__(self, channels: int, learned: bool):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1) if learned else None

    def forward(self, x: Tensor, emb: Tensor | None = None) -> Tensor:
        x = F.interpolate(x, scale_factor=2.0, mode="nearest")
        return x if self.conv is None else self.conv(x)


class InputLayer(nn.Conv2d):
    def forward(self, input: Tensor, emb: Tensor | None = None) -> Tensor:
        return super().forward(input)


class LayerList(nn.ModuleList):
    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        for layer in self:
            x = layer(x, emb)
        return x


class BaselineUNet(nn.Module):
    """Has the config of our ``UNet``, but no dropout, classes, text or patches, and its checkpointing is fixed."""

    def __init__(self, config: UNetConfig, in_channels: int = 3, out_channels: int = 3):
        super().__init__()
        c, widths, self.width = config, config.level_channels, config.num_channels
        emb = 4 * c.num_channels
        self.time_emb = nn.Sequential(nn.Linear(c.num_channels, emb), nn.SiLU(), nn.Linear(emb, emb))

        def res(channels: int, out_channels: int, resample: nn.Module | None = None) -> Res:
            return Res(channels, out_channels, emb, c.use_scale_shift_norm, resample)

        def resample(kind: type[Down] | type[Up], channels: int) -> nn.Module:
            if c.resblock_updown:
                return res(channels, channels, kind(channels, False))
            return kind(channels, c.conv_resample)

        channels = widths[0]
        self.down, skips = nn.ModuleList([LayerList([InputLayer(in_channels, channels, 3, padding=1)])]), [channels]
        for level, width in enumerate(widths):
            for _ in range(c.num_res_blocks):
                attention = [Attention(width, c.heads(width))] if c.has_attention(level) else []
                self.down.append(LayerList([res(channels, width), *attention]))
                channels = width
                skips.append(channels)
            if level < c.levels - 1:
                self.down.append(LayerList([resample(Down, channels)]))
                skips.append(channels)
        middle = Attention(channels, c.heads(channels))
        self.middle = LayerList([res(channels, channels), middle, res(channels, channels)])
        self.up = nn.ModuleList()
        for level, width in reversed(list(enumerate(widths))):
            for i in range(c.num_res_blocks + 1):
                layers: list[nn.Module] = [res(channels + skips.pop(), width)]
                channels = width
                if c.has_attention(level):
                    layers.append(Attention(channels, c.heads(channels, decoder=True)))
                if level and i == c.num_res_blocks:
                    layers.append(resample(Up, channels))
                self.up.append(LayerList(layers))
        self.out_norm, self.out_conv = Norm(channels), nn.Conv2d(channels, out_channels, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        emb, skips = self.time_emb(timestep_embedding(t, self.width)), []
        for layers in self.down:
            x = layers(x, emb)
            skips.append(x)
        x = self.middle(x, emb)
        for layers in self.up:
            x = layers(torch.cat([x, skips.pop()], dim=1), emb)
        return self.out_conv(F.silu(self.out_norm(x)))


def to_baseline(network: UNet, tensors: list[Tensor]) -> list[Tensor]:
    """Convert tensors shaped like ``network``'s parameters (weights or gradients) to the baseline's layout.

    Both networks register their parameters in the same order. The rows of a qkv projection are ordered by (head, role)
    in the baseline and by (role, head) in ours.
    """
    heads: dict[int, int] = {}
    for module in network.modules():
        if isinstance(module, SelfAttention):
            heads[id(module.qkv.weight)] = heads[id(module.qkv.bias)] = module.heads
    with torch.device("meta"):
        baseline = BaselineUNet(network.config)
    converted = []
    for own, tensor, other in zip(network.parameters(), tensors, baseline.parameters(), strict=True):
        if id(own) in heads:
            tensor = tensor.unflatten(0, (3, heads[id(own)], -1)).transpose(0, 1)
        converted.append(tensor.reshape(other.shape))
    return converted
