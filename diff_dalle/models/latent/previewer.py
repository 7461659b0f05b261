"""The previewer: a small decoder that shows what semantic latents hold."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..precision import autocast_disabled
from .running_norm import RunningNorm


class Previewer(nn.Module):
    """Semantic latents [N, channels, h, w] → images [N, 3, 8 · h, 8 · w] in [-1, 1], not clipped.

    width: channels at the latents' resolution; each doubling halves them, down to a quarter.
    """

    full_precision = ("out_conv",)  # see ``cast_weights``

    def __init__(self, channels: int, width: int):
        super().__init__()
        widths = (width, width // 2, width // 4, width // 4)
        convs: list[nn.Module] = [nn.Conv2d(channels, width, 1), nn.Conv2d(width, width, 3, padding=1)]
        for wide, narrow in itertools.pairwise(widths):
            convs += [nn.ConvTranspose2d(wide, narrow, 2, stride=2), nn.Conv2d(narrow, narrow, 3, padding=1)]
        self.convs = nn.ModuleList(convs)
        self.norms = nn.ModuleList(RunningNorm(each) for each in widths for _ in range(2))
        self.out_conv = nn.Conv2d(widths[-1], 3, 1)
        if not self.out_conv.weight.is_meta:  # without values, torch would import its compiler
            self._set_statistics(channels)

    @torch.no_grad()
    def _set_statistics(self, channels: int) -> None:
        """Those of normal latents, layer after layer.

        They stay. If they followed the training, those of each layer would be out of date as soon as those below it
        moved: in our trials the loss then jumped by factors of ten.
        """
        h = torch.randn(8, channels, 8, 8)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            moments: list[Tensor] = []
            h = F.gelu(conv(h))
            norm(h, moments)
            norm.update(moments[0])  # type: ignore[operator]  # a RunningNorm
            h = norm(h)

    def forward(self, latents: Tensor) -> Tensor:
        h = latents.contiguous(memory_format=torch.channels_last)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            h = norm(F.gelu(conv(h)))
        with autocast_disabled(h.device):
            return 2 * self.out_conv(h.float()) - 1  # released weights give [0, 1]
