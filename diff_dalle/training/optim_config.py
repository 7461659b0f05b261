"""Settings of the optimizer."""

from __future__ import annotations

from collections.abc import Iterator

from ..config import Fault, named, option, settings


@settings
class OptimConfig:
    """Optimizer"""

    optimizer: str = option(
        "adamw",
        "optimizer of linear and convolution weights; muon orthogonalizes their updates, to learn in fewer steps; "
        "embeddings, norms and biases use adamw",
        choices=("adamw", "muon"),
    )
    lr: float = option(3e-4, "peak learning rate", above=0, free=True)
    weight_decay: float = option(
        0.0, "decoupled weight decay of linear and convolution weights; norms and biases are exempt", least=0, free=True
    )
    adam_beta1: float = option(0.9, "AdamW beta1, decay of the first moment", least=0, below=1, free=True)
    adam_beta2: float = option(0.999, "AdamW beta2, decay of the second moment", least=0, below=1, free=True)
    muon_lr: float | None = option(
        None,
        "peak learning rate of muon, with the schedule of lr; none = lr",
        needs=("optimizer", "muon"),
        above=0,
        free=True,
    )
    muon_momentum: float = option(
        0.95, "Nesterov momentum of muon", needs=("optimizer", "muon"), least=0, below=1, free=True
    )
    warmup_steps: int = option(0, "linear warm-up of the learning rate, in steps", least=0, free=True)
    lr_anneal_steps: int = option(
        0, "step at which the annealed learning rate reaches 0; 0 = constant rate", least=0, free=True
    )
    lr_anneal: str = option(
        "linear",
        "learning-rate schedule of the annealing",
        choices=("linear", "cosine"),
        needs=("lr_anneal_steps",),
        free=True,
    )
    grad_clip: float = option(1.0, "maximum gradient norm; 0 = no clipping", least=0, free=True)
    ema_rate: tuple[float, ...] = option(
        (0.9999,),
        "decay per update of each exponential moving average of the weights, every ema_every steps",
        least=0,
        below=1,
    )
    ema_start: int | None = option(
        None,
        "steps before the averages start; none = their decay warms up by itself",
        needs=("ema_rate",),
        least=0,
    )
    ema_every: int = option(1, "steps between updates of the averages", needs=("ema_rate",), least=1)

    def faults(self) -> Iterator[Fault]:
        if len(set(self.ema_rate)) < len(self.ema_rate):
            yield Fault.of(self, "ema_rate", "must be distinct numbers")
        if 0 < self.lr_anneal_steps <= self.warmup_steps:
            rule = f"must be below {named('lr_anneal_steps')} ({self.lr_anneal_steps})"
            yield Fault.of(self, "warmup_steps", rule)
