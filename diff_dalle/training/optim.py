"""The optimizer, its parameter groups and its update: learning rate, loss scale, gradient clipping."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..config import InputError
from ..distributed.parallel import local, total_norm
from ..distributed.world import ALONE, World
from .muon import AdamW, Muon
from .settings import OptimConfig


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


def build_optimizer(config: OptimConfig, *modules: nn.Module, world: World = ALONE) -> AdamW:
    """The optimizer of the modules' trainable parameters, which can skip a step on the device. AdamW is fused: one
    kernel for all of them. Frozen parameters have no state in it. world: of the ranks that share the work of Muon."""
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
    kind = functools.partial(Muon, world=world) if config.optimizer == "muon" else AdamW
    return kind(groups, lr=config.lr, betas=(config.adam_beta1, config.adam_beta2), fused=True)


@dataclass
class LossScale:
    """Dynamic loss scaling for fp16 (Micikevicius et al. 2018, §3.2), kept on the device so that nothing waits for it.

    The scale doubles after ``growth_interval`` consecutive finite steps and halves after an overflow. For other
    precisions it is 1.
    """

    scale: Tensor
    good_steps: Tensor
    dynamic: bool
    growth_interval: int = 2000

    @classmethod
    def create(cls, precision: str, device: torch.device) -> LossScale:
        dynamic = precision == "fp16"
        start = 2.0**16 if dynamic else 1.0
        return cls(torch.tensor(start, device=device), torch.zeros((), device=device), dynamic)

    def update(self, overflowed: Tensor) -> None:
        """``overflowed``: float32 scalar, 1 when the step's gradient was not finite, else 0."""
        if not self.dynamic:
            return
        self.good_steps.add_(1).mul_(1 - overflowed)
        grow = (self.good_steps >= self.growth_interval).float()
        self.scale.mul_(torch.exp2(grow - overflowed)).clamp_(min=1.0)
        self.good_steps.mul_(1 - grow)

    def state(self) -> dict[str, Tensor]:
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Continue with a saved scale, unless one of the two sessions has another precision than fp16. A session
        without scaling has saved scale 1 and no good steps."""
        if self.dynamic and (state["scale"] > 1 or state["good_steps"] > 0):
            self.scale.copy_(state["scale"])
            self.good_steps.copy_(state["good_steps"])


class Optimization:
    """One optimizer of a task: its parameters, learning-rate schedule, loss scale and gradient clipping."""

    def __init__(self, config: OptimConfig, modules: Mapping[str, nn.Module], precision: str, world: World):
        self.config, self.modules, self.world = config, modules, world
        self.optimizer = build_optimizer(config, *modules.values(), world=world)
        self.parameters = [p for module in modules.values() for p in module.parameters() if p.requires_grad]
        self.loss_scale = LossScale.create(precision, world.device)

    def begin(self, step: int) -> None:
        """Prepare the update that follows ``step`` completed ones."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.config, step, group.get("peak"))
        self.optimizer.zero_grad(set_to_none=True)

    def finish(self, losses: Tensor) -> tuple[Tensor, Tensor]:
        """Update from the accumulated gradients; a gradient or loss [N] that is not finite, on any rank, leaves
        parameters and optimizer unchanged on all.

        Returns the gradient's norm and whether the step was not finite (0 or 1), float32 scalars on the device.
        """
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norm = total_norm(gradients) / self.loss_scale.scale
        finite = torch.cat([norm.reshape(1), losses]).isfinite().all()
        overflowed = self.world.maximum(1 - finite.float())
        factor = 1 / self.loss_scale.scale
        if self.config.grad_clip > 0:
            factor = factor * (self.config.grad_clip / (norm + 1e-6)).clamp(max=1.0)
        if self.config.grad_clip > 0 or self.loss_scale.dynamic:
            torch._foreach_mul_(local(gradients), factor)
        # Fused AdamW skips the whole update, including its step count, where found_inf is 1.
        fused: Any = self.optimizer
        fused.grad_scale, fused.found_inf = None, overflowed
        self.optimizer.step()
        self.loss_scale.update(overflowed)
        return norm, overflowed

    def state(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer.state_dict(), "loss_scale": self.loss_scale.state()}

    def expected(self) -> dict[str, Any]:
        """What ``state`` returns, with the optimizer itself for the state that it has after its first update."""
        return {**self.state(), "optimizer": self.optimizer}

    def load_state(self, state: Mapping[str, Any]) -> None:
        own = [{**group} for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(state["optimizer"])
        for group, settings in zip(self.optimizer.param_groups, own, strict=True):
            group.update(settings)  # this run's weight decay and betas, not the file's
        for parameter, entry in self.optimizer.state.items():
            for name, value in entry.items():
                if value.shape == parameter.shape and value.stride() != parameter.stride():
                    # Fused AdamW reads both in the order of their memory.
                    entry[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
        self.loss_scale.load_state(state["loss_scale"])
