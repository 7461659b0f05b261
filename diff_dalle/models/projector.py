"""The projector of representation alignment. A file of its own, because units.py shards it like a network."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from .layers import Linear


class Projector(nn.Module):
    """An MLP of three layers from a network's tokens [N, T, channels] to an encoder's features [N, T, out_channels]
    (Yu et al. 2025, REPA, appendix A)."""

    def __init__(self, channels: int, width: int, out_channels: int):
        super().__init__()
        self.first, self.second, self.last = Linear(channels, width), Linear(width, width), Linear(width, out_channels)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.last(F.silu(self.second(F.silu(self.first(tokens)))))
