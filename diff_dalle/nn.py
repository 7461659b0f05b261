"""``guided_diffusion.nn``: small parts of networks and of their training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import SiLU
from torch.nn import functional as F

from .diffusion.losses import mean_flat
from .models import layers
from .models.norms import GROUPS

__all__ = [
    "GroupNorm32",
    "SiLU",
    "avg_pool_nd",
    "checkpoint",
    "conv_nd",
    "linear",
    "mean_flat",
    "normalization",
    "scale_module",
    "timestep_embedding",
    "update_ema",
    "zero_module",
]


linear, zero_module = nn.Linear, layers.zero_init


class GroupNorm32(nn.GroupNorm):
    """Group norm in fp32 of an input of any type and number of axes."""

    def forward(self, input: Tensor) -> Tensor:
        return F.group_norm(input.float(), self.num_groups, self.weight, self.bias, self.eps).to(input.dtype)


def conv_nd(dims: int, *args, **kwargs) -> nn.Module:
    """A convolution of 1, 2 or 3 dimensions."""
    return getattr(nn, f"Conv{dims}d")(*args, **kwargs)


def avg_pool_nd(dims: int, *args, **kwargs) -> nn.Module:
    """Average pooling in 1, 2 or 3 dimensions."""
    return getattr(nn, f"AvgPool{dims}d")(*args, **kwargs)


def normalization(channels: int) -> GroupNorm32:
    """The group norm of a U-Net."""
    return GroupNorm32(GROUPS, channels)


def timestep_embedding(timesteps: Tensor, dim: int, max_period: int = 10000) -> Tensor:
    """[N] steps, also fractional, → [N, dim] sinusoids (Vaswani et al. 2017, §3.5)."""
    return layers.timestep_embedding(timesteps, dim, max_period)


@torch.no_grad()
def scale_module(module: nn.Module, scale: float) -> nn.Module:
    """Multiply all parameters by a factor and return the module."""
    for parameter in module.parameters():
        parameter.mul_(scale)
    return module


@torch.no_grad()
def update_ema(target_params: Iterable[Tensor], source_params: Iterable[Tensor], rate: float = 0.99) -> None:
    """Move averages towards present values: rate × average + (1 − rate) × value."""
    for target, source in zip(target_params, source_params, strict=True):
        target.lerp_(source.to(target), 1 - rate)


def checkpoint(func: Callable[..., Tensor], inputs: Sequence[Tensor], params: Iterable[Tensor], flag: bool) -> Tensor:
    """``func(*inputs)``, computed again in the backward pass if ``flag``. ``params``, which Guided-Diffusion needs for
    their gradients, are found by torch."""
    return layers.recompute(flag, func, *inputs, random=True)
