"""Convolutional blocks of the decoder's U-Nets. Feature maps are [N, C, H, W] in channels-last layout."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..layers import Linear, recompute, to_image, to_tokens
from ..norms import GroupNorm32
from .attention import TokenAttention


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
        self.full_precision = ("conv",) if standardized else ()  # see ``cast_weights``

    def forward(self, x: Tensor, scale_shift: Tensor | None = None) -> Tensor:
        """scale_shift: [N, 2 · out_channels]."""
        return self.norm(self.conv(x), scale_shift, silu=True)


class ResidualBlock(nn.Module):
    """Two ``ConvNorm`` and a shortcut. The timestep vector scales and shifts the first; attention to condition tokens
    follows it.

    token_width: width of the condition tokens; 0 = no attention to them.
    skip_scale:  factor of the skip connection that is concatenated to the input.
    """

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
