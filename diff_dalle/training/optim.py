"""The optimizer, its parameter groups, and the learning rate as a function of the step."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from ..errors import InputError
from .muon import AdamW, Muon
from .optim_config import OptimConfig


def learning_rate(config: OptimConfig, step: int, peak: float | None = None) -> float:
    """The learning rate of the update that follows ``step`` completed ones. peak: None = ``lr``."""
    rate = config.lr if peak is None else peak
    if step < config.warmup_steps:
        return rate * (step + 1) / config.warmup_steps
    if config.lr_anneal_steps:
        done = min(1.0, (step - config.warmup_steps) / (config.lr_anneal_steps - config.warmup_steps))
        rate *= 0.5 * (1 + math.cos(math.pi * done)) if config.lr_anneal == "cosine" else 1 - done
    return rate


def decayed(*modules: nn.Module) -> set[int]:
    """``id`` of each parameter that weight decay applies to: weights of linear and convolution layers, and what other
    modules name in ``decayed``."""
    found: set[int] = set()
    for layer in (layer for module in modules for layer in module.modules()):
        usual = ("weight",) if isinstance(layer, (nn.Linear, nn.Conv1d, nn.Conv2d)) else ()
        names = getattr(layer, "decayed", usual)
        found |= {id(parameter) for name, parameter in layer.named_parameters(recurse=False) if name in names}
    return found


def build_optimizer(config: OptimConfig, *modules: nn.Module) -> AdamW:
    """The optimizer of the modules' trainable parameters, which can skip a step on the device. AdamW is fused: one
    kernel for all of them. Frozen parameters have no state in it."""
    with_decay = decayed(*modules)
    parameters = [p for module in modules for p in module.parameters() if p.requires_grad]
    weights: dict[str, Any] = {"weight_decay": config.weight_decay}
    if config.optimizer == "muon":
        weights |= {"momentum": config.muon_momentum, "peak": config.muon_lr}
    groups = [
        {"params": [p for p in parameters if id(p) in with_decay], **weights},
        {"params": [p for p in parameters if id(p) not in with_decay], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if not groups:
        raise InputError("all parameters are frozen, so there is nothing to train")
    kind = Muon if config.optimizer == "muon" else AdamW
    return kind(groups, lr=config.lr, betas=(config.adam_beta1, config.adam_beta2), fused=True)
