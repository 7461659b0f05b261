"""Settings of the optimizer."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import option
from ..errors import InputError


@dataclass(frozen=True)
class OptimConfig:
    """Optimizer"""

    optimizer: str = option(
        "adamw",
        "optimizer of the weights of linear and convolution layers; muon orthogonalizes their updates, to learn in "
        "fewer steps; embeddings, norms and biases have adamw",
        choices=("adamw", "muon"),
    )
    lr: float = option(3e-4, "peak learning rate")
    weight_decay: float = option(
        0.0, "decoupled weight decay of linear and convolution weights; norms and biases are exempt"
    )
    adam_beta1: float = option(0.9, "AdamW beta1, decay of the first moment")
    adam_beta2: float = option(0.999, "AdamW beta2, decay of the second moment")
    muon_lr: float | None = option(
        None, "peak learning rate of muon, with the schedule of lr; none = lr", needs=("optimizer", "muon")
    )
    muon_momentum: float = option(0.95, "Nesterov momentum of muon", needs=("optimizer", "muon"))
    warmup_steps: int = option(0, "linear warm-up of the learning rate, in steps")
    lr_anneal_steps: int = option(0, "step at which the annealed learning rate reaches 0; 0 = constant rate")
    lr_anneal: str = option(
        "linear",
        "learning-rate schedule of the annealing",
        choices=("linear", "cosine"),
        needs=("lr_anneal_steps",),
    )
    grad_clip: float = option(1.0, "maximum gradient norm; 0 = no clipping")
    ema_rate: tuple[float, ...] = option(
        (0.9999,), "decay per update of each exponential moving average of the weights, every ema_every steps"
    )
    ema_start: int | None = option(
        None,
        "steps in which the averages are the weights themselves; none = their decay warms up by itself",
        needs=("ema_rate",),
    )
    ema_every: int = option(1, "steps between updates of the averages", needs=("ema_rate",))

    def __post_init__(self):
        if not self.lr > 0:
            raise InputError(f"lr is {self.lr:g}, but must be above 0")
        if any(not 0 <= rate < 1 for rate in self.ema_rate) or len(set(self.ema_rate)) < len(self.ema_rate):
            raise InputError(f"ema_rate is {self.ema_rate}, but must be distinct numbers, at least 0 and below 1")
        if not (0 <= self.adam_beta1 < 1 and 0 <= self.adam_beta2 < 1):
            raise InputError(
                f"adam_beta1 and adam_beta2 are {self.adam_beta1:g} and {self.adam_beta2:g}, but must be "
                "at least 0 and below 1"
            )
        if self.muon_lr is not None and not self.muon_lr > 0:
            raise InputError(f"muon_lr is {self.muon_lr:g}, but must be above 0, or none")
        if not 0 <= self.muon_momentum < 1:
            raise InputError(f"muon_momentum is {self.muon_momentum:g}, but must be at least 0 and below 1")
        if self.ema_start is not None and self.ema_start < 0:
            raise InputError(f"ema_start is {self.ema_start}, but must not be negative, or none")
        if self.ema_every < 1:
            raise InputError(f"ema_every is {self.ema_every}, but must be at least 1")
        for name in ("warmup_steps", "lr_anneal_steps", "grad_clip", "weight_decay"):
            if getattr(self, name) < 0:
                raise InputError(f"{name} is {getattr(self, name)}, but must not be negative")
        if 0 < self.lr_anneal_steps <= self.warmup_steps:
            raise InputError(
                f"warmup_steps is {self.warmup_steps}, but must be below lr_anneal_steps ({self.lr_anneal_steps})"
            )
