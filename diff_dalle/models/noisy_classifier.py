"""A classifier of noisy images into classes (Dhariwal & Nichol 2021, §4)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..batch import Conditioning
from ..config import option, section, settings
from ..config.bounds import MAX_ROWS
from .dropout import number_dropouts
from .noised_clip import AttentionPool
from .norms import GroupNorm32
from .unet import UNetConfig, UNetEncoder

POOLS = ("attention", "adaptive", "spatial", "spatial_v2")
HIDDEN = 2048  # channels of the MLP of spatial pools


@settings
class NoisyClassifierConfig:
    """Classifier of classes"""

    tower: UNetConfig = section(UNetConfig)
    classes: int = option(1000, "number of classes", least=2, most=MAX_ROWS)
    pool: str = option(
        "attention",
        "classification head: attention pooling; average pooling and a linear layer (adaptive); or average-pooled "
        "feature maps of all layers and an MLP, with a group norm (spatial_v2) or without (spatial)",
        choices=POOLS,
    )


class NoisyClassifier(nn.Module):
    """The encoder half of the diffusion U-Net with a pool: log p(class | x_t) up to a constant."""

    def __init__(self, config: NoisyClassifierConfig):
        super().__init__()
        self.config = config
        self.tower = UNetEncoder(config.tower)
        channels = self.tower.channels
        kind = config.pool
        self.norm = {"spatial": nn.Identity(), "spatial_v2": GroupNorm32(HIDDEN)}.get(kind) or GroupNorm32(channels)
        if kind == "attention":
            size = config.tower.image_size // config.tower.divisor
            self.pool: nn.Module = AttentionPool(size, channels, config.tower.heads(channels), config.classes)
        else:
            is_spatial = kind != "adaptive"
            self.hidden = nn.Linear(sum(self.tower.skip_channels) + channels, HIDDEN) if is_spatial else None
            self.pool = nn.Linear(HIDDEN if is_spatial else channels, config.classes)
        number_dropouts(self)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        """x: [N, 3, image_size, image_size]; t: [N], steps of the original process. Returns logits [N, classes]
        float32."""
        h, skips, _ = self.tower(x, t, Conditioning())
        if self.config.pool == "attention":
            return self.pool(self.norm(h, silu=True)).float()
        if self.hidden is None:
            return self.pool(self.norm(h, silu=True).mean((2, 3))).float()
        means = self.hidden(torch.cat([each.mean((2, 3)) for each in (*skips, h)], 1))
        if self.config.pool == "spatial":
            return self.pool(means.relu()).float()
        return self.pool(self.norm(means[:, :, None, None], silu=True).flatten(1)).float()
