"""Tiny networks of the latent cascade, and their conditions."""

from __future__ import annotations

from dataclasses import replace

import torch
from network_making import VOCABULARY, captions, randomize, seeded

from diff_dalle.batch import Conditioning
from diff_dalle.models.latent.config import LatentTextConfig, LatentUnetConfig
from diff_dalle.models.latent.stages import StageB, StageBConfig, StageC, StageCConfig

SHAPE = {
    "widths": (8, 12),
    "heads": (2, 3),
    "levels": ("CTF", "CTA"),
    "down_blocks": (1, 2),
    "up_blocks": (2, 1),
    "down_repeats": (2, 1),
    "up_repeats": (2, 3),
    "dropout": (0.0, 0.0),
    "cond_width": 10,
    "vector_tokens": 2,
    "time_width": 6,
    "pooled_width": 5,
}
TEXT = LatentTextConfig(enc_attn_dim=0, enc_depth=1, enc_heads=3, text_length=9)
B = StageBConfig(**SHAPE, text=TEXT, semantic_channels=3, pixel_channels=2)
C = StageCConfig(**SHAPE, text=TEXT, channels=4, text_width=7, image_width=6, switch_level=(True,))


def make(config: LatentUnetConfig, seed: int = 0) -> StageB | StageC:
    torch.manual_seed(seed)
    network = StageB(config, VOCABULARY) if isinstance(config, StageBConfig) else StageC(config, VOCABULARY)
    return randomize(network)


def own_text(config: LatentUnetConfig) -> LatentUnetConfig:
    """The same with an own text encoder."""
    return replace(config, text=replace(config.text, enc_attn_dim=12))


def conditioning(config: LatentUnetConfig, n: int = 3, seed: int = 2) -> Conditioning:
    """All conditions that the network takes, at other resolutions than the latents."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(n, *shape, generator=generator)

    cond = captions((3, 7, 1)[:n], seed=seed)
    if not config.text.enc_attn_dim:
        cond = replace(cond, tokens=None, text_pooled=draw(config.pooled_width))
    if isinstance(config, StageBConfig):
        cond = replace(cond, semantic=draw(config.semantic_channels, 3, 2), low_res=draw(config.pixel_channels, 4, 6))
    elif not config.text.enc_attn_dim:
        cond = replace(cond, text_states=draw(8, config.text_width))
    if isinstance(config, StageCConfig):
        cond = replace(cond, image_embedding=draw(config.image_width))
    return replace(cond, extra={name: torch.linspace(0.2, 0.9, n) for name in config.micro_conditions})


def latents(config: LatentUnetConfig, n: int = 3, size: tuple[int, int] = (8, 12)) -> tuple[torch.Tensor, torch.Tensor]:
    """(x_t, t)."""
    return seeded(n, config.channels, *size, seed=1), torch.linspace(0.1, 0.9, n)
