"""Tiny networks with all parameters randomized (zero-initialized layers would hide those before them), and inputs."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import torch
from torch import nn

from diff_dalle.batch import Conditioning
from diff_dalle.models.generator import Generator, GeneratorConfig, LowResConfig
from diff_dalle.models.text_encoder import TextEncoderConfig
from diff_dalle.models.transformer import DenoiserConfig

VOCABULARY = 50
NO_LOW_RES = LowResConfig()
UNET = DenoiserConfig(
    image_size=16, num_channels=8, num_res_blocks=1, channel_mult=(1, 2), attention_resolutions=(8,), num_heads=2
)
TRANSFORMER = {
    "network": "transformer",
    "num_channels": 16,
    "depth": 3,
    "separate_blocks": 1,
    "patch_size": 4,
    "patch_channels": 6,
    "output_conv": 4,
    "position_patches": 3,
}
TEXT = TextEncoderConfig(enc_attn_dim=12, enc_depth=2, enc_heads=3, text_length=10)


Module = TypeVar("Module", bound=nn.Module)


def randomize(network: Module, seed: int = 0, spread: float = 0.1) -> Module:
    """Add noise to all parameters, so that zero-initialized layers have an effect."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += spread * torch.randn(parameter.shape, generator=generator)
    return network


def make_generator(
    text=None, image_channels: int = 3, learned_variance: bool = False, low_res: LowResConfig = NO_LOW_RES, **unet
) -> Generator:
    torch.manual_seed(0)
    config = GeneratorConfig(replace(UNET, **unet), TEXT if text is None else text, low_res, image_channels)
    return randomize(Generator(config, VOCABULARY, learned_variance))


def captions(lengths=(3, 7, 1), total: int = 8, seed: int = 0) -> Conditioning:
    """Random captions of these lengths, padded with random tokens."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (len(lengths), 64), generator=generator)[:, :total]
    mask = torch.arange(total) < torch.tensor(lengths)[:, None]
    return Conditioning(tokens=tokens, mask=mask)


def noisy(n: int = 3, size: tuple[int, int] = (16, 16), channels: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """(x_t, t)."""
    return seeded(n, channels, *size, seed=1), torch.linspace(0, 999, n)


def seeded(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def pixels(*shape: int, seed: int = 0) -> torch.Tensor:
    """Uniform in [-1, 1)."""
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def without_gradient(network: nn.Module) -> list[str]:
    """The parameters whose gradient is missing or 0."""
    return [name for name, p in network.named_parameters() if p.grad is None or not p.grad.any()]


def gradient(network: nn.Module) -> torch.Tensor:
    """Of all parameters, as one vector."""
    return torch.cat([p.grad.flatten() for p in network.parameters()])


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Relative error of a with respect to b."""
    return ((a - b).norm() / b.norm()).item()
