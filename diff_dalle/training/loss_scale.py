"""Loss scaling for fp16."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


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
