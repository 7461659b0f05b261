"""Guided-Diffusion's U-Net in the form in which it was published, as the yardstick of every speed claim.

The same function as ``models.unet.UNet`` without text: NCHW throughout, group norms through fp32 casts, attention as
1-D convolutions and two einsums around an explicit softmax, and attention always recomputed in the backward pass.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ..models.attention import SelfAttention
from ..models.layers import timestep_embedding
from ..models.unet import UNet, UNetConfig


class Norm(nn.GroupNorm):
    def __init__(self, channels: int):
        super().__init__(32, channels)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float()).type(x.dtype)


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
        scale = width**-0.25  # on both factors, against overflow in fp16
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


class First(nn.Conv2d):
    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        return super().forward(x)


class BaselineUNet(nn.Module):
    """Takes the same config; dropout, classes, text and patches are left out, and so is checkpointing by choice."""

    def __init__(self, config: UNetConfig, in_channels: int = 3, out_channels: int = 3):
        super().__init__()
        c, widths, self.width = config, config.level_channels, config.num_channels
        emb = 4 * c.num_channels
        self.time_emb = nn.Sequential(nn.Linear(c.num_channels, emb), nn.SiLU(), nn.Linear(emb, emb))

        def res(before: int, after: int, resample: nn.Module | None = None) -> Res:
            return Res(before, after, emb, c.use_scale_shift_norm, resample)

        def resample(kind: type[nn.Module], channels: int) -> nn.Module:
            return (
                res(channels, channels, kind(channels, False)) if c.resblock_updown else kind(channels, c.conv_resample)
            )

        channels = widths[0]
        self.down, skips = nn.ModuleList([nn.ModuleList([First(in_channels, channels, 3, padding=1)])]), [channels]
        for level, width in enumerate(widths):
            for _ in range(c.num_res_blocks):
                attention = [Attention(width, c.heads(width))] if c.has_attention(level) else []
                self.down.append(nn.ModuleList([res(channels, width), *attention]))
                channels = width
                skips.append(channels)
            if level < c.levels - 1:
                self.down.append(nn.ModuleList([resample(Down, channels)]))
                skips.append(channels)
        middle = Attention(channels, c.heads(channels))
        self.middle = nn.ModuleList([res(channels, channels), middle, res(channels, channels)])
        self.up = nn.ModuleList()
        for level, width in reversed(list(enumerate(widths))):
            for i in range(c.num_res_blocks + 1):
                layers = [res(channels + skips.pop(), width)]
                channels = width
                if c.has_attention(level):
                    layers.append(Attention(channels, c.heads(channels, upward=True)))
                if level and i == c.num_res_blocks:
                    layers.append(resample(Up, channels))
                self.up.append(nn.ModuleList(layers))
        self.out_norm, self.out_conv = Norm(channels), nn.Conv2d(channels, out_channels, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        emb, skips = self.time_emb(timestep_embedding(t, self.width)), []
        for layers in self.down:
            for layer in layers:
                x = layer(x, emb)
            skips.append(x)
        for layer in self.middle:
            x = layer(x, emb)
        for layers in self.up:
            x = torch.cat([x, skips.pop()], dim=1)
            for layer in layers:
                x = layer(x, emb)
        return self.out_conv(F.silu(self.out_norm(x)))


def to_baseline(network: UNet, tensors: list[Tensor]) -> list[Tensor]:
    """Tensors shaped like ``network``'s parameters (weights or gradients) in the baseline's shapes and order.

    Both networks register their parameters in the same order. The baseline orders the rows of a qkv projection by head
    and then by role, ours by role and then by head.
    """
    heads = {}
    for module in network.modules():
        if isinstance(module, SelfAttention):
            heads[id(module.qkv.weight)] = heads[id(module.qkv.bias)] = module.heads
    with torch.device("meta"):
        baseline = BaselineUNet(network.config, 3, network.out_conv.out_channels)
    mapped = []
    for own, tensor, other in zip(network.parameters(), tensors, baseline.parameters(), strict=True):
        if id(own) in heads:
            tensor = tensor.unflatten(0, (3, heads[id(own)], -1)).transpose(0, 1)
        mapped.append(tensor.reshape(other.shape))
    return mapped
