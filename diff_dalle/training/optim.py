"""AdamW, its parameter groups, and the learning rate as a function of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from ..config import option
from ..errors import InputError


@dataclass(frozen=True)
class OptimConfig:
    """Optimizer"""

    lr: float = option(3e-4, "peak learning rate")
    weight_decay: float = option(0.0, "decoupled weight decay of matrices and convolutions; never of norms and biases")
    adam_beta1: float = option(0.9, "AdamW's decay of the first moment")
    adam_beta2: float = option(0.999, "AdamW's decay of the second moment")
    warmup_steps: int = option(0, "steps over which the learning rate rises linearly from 0")
    lr_anneal_steps: int = option(0, "step at which the annealed learning rate reaches 0; 0 = constant rate")
    lr_anneal: str = option("linear", "shape of the annealing", choices=("linear", "cosine"))
    grad_clip: float = option(1.0, "largest norm of the whole gradient; 0 = no clipping")
    ema_rate: tuple[float, ...] = option((0.9999,), "decay of each moving average of the weights, per step")

    def __post_init__(self):
        if not self.lr > 0:
            raise InputError(f"lr is {self.lr:g}, but must be above 0")
        if any(not 0 <= rate < 1 for rate in self.ema_rate) or len(set(self.ema_rate)) < len(self.ema_rate):
            raise InputError(
                f"ema_rate is {self.ema_rate}, but must be different numbers from 0 up to, not including, 1"
            )
        if not (0 <= self.adam_beta1 < 1 and 0 <= self.adam_beta2 < 1):
            raise InputError(f"adam_beta1 and adam_beta2 are {self.adam_beta1:g} and {self.adam_beta2:g}, but must lie "
                             "between 0 and, not including, 1")  # fmt: skip
        for name in ("warmup_steps", "lr_anneal_steps", "grad_clip", "weight_decay"):
            if getattr(self, name) < 0:
                raise InputError(f"{name} is {getattr(self, name)}, but must not be negative")
        if 0 < self.lr_anneal_steps <= self.warmup_steps:
            raise InputError(
                f"warmup_steps is {self.warmup_steps}, but must be below lr_anneal_steps ({self.lr_anneal_steps})"
            )


def learning_rate(config: OptimConfig, step: int) -> float:
    """The rate of the update that follows ``step`` finished ones."""
    rate = config.lr
    if step < config.warmup_steps:
        return rate * (step + 1) / config.warmup_steps
    if config.lr_anneal_steps:
        done = min(1.0, (step - config.warmup_steps) / (config.lr_anneal_steps - config.warmup_steps))
        rate *= 0.5 * (1 + math.cos(math.pi * done)) if config.lr_anneal == "cosine" else 1 - done
    return rate


def decayed(model: nn.Module) -> set[str]:
    """Names of the parameters that weight decay applies to: weights of linear and convolution layers."""
    names = set()
    for prefix, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d)):
            names.add(f"{prefix}.weight" if prefix else "weight")
    return names


def build_optimizer(config: OptimConfig, model: nn.Module) -> torch.optim.AdamW:
    """Fused AdamW (Loshchilov & Hutter 2019): one kernel for all parameters, and able to skip a step on the device."""
    with_decay, parameters = decayed(model), dict(model.named_parameters())
    groups = [
        {"params": [p for name, p in parameters.items() if name in with_decay], "weight_decay": config.weight_decay},
        {"params": [p for name, p in parameters.items() if name not in with_decay], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.adam_beta1, config.adam_beta2), fused=True)
