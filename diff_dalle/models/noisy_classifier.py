"""A classifier of noisy images into classes (Dhariwal & Nichol 2021, §4)."""

from __future__ import annotations

from torch import Tensor, nn

from ..batch import Conditioning
from ..config import option, section, settings
from .dropout import number_dropouts
from .noised_clip import AttentionPool
from .norms import GroupNorm32
from .unet import UNetConfig, UNetEncoder


@settings
class NoisyClassifierConfig:
    """Classifier of classes"""

    tower: UNetConfig = section(UNetConfig)
    classes: int = option(1000, "number of classes that it tells apart", least=2)


class NoisyClassifier(nn.Module):
    """The encoder half of the diffusion U-Net with attention pooling: log p(class | x_t) up to a constant."""

    def __init__(self, config: NoisyClassifierConfig):
        super().__init__()
        self.config = config
        self.tower = UNetEncoder(config.tower)
        channels = self.tower.channels
        self.norm = GroupNorm32(channels)
        size = config.tower.image_size // config.tower.divisor
        self.pool = AttentionPool(size, channels, config.tower.heads(channels), config.classes)
        number_dropouts(self)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        """x: [N, 3, image_size, image_size]; t: [N], steps of the original process. Returns logits [N, classes]
        float32."""
        h = self.tower(x, t, Conditioning())[0]
        return self.pool(self.norm(h, silu=True)).float()
