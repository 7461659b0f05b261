"""``guided_diffusion.resample``: distributions of training timesteps, with weights as numpy arrays."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, distributed

from .config import lookup
from .diffusion import resample
from .diffusion.resample import in_proportion

__all__ = [
    "LossAwareSampler",
    "LossSecondMomentResampler",
    "ScheduleSampler",
    "UniformSampler",
    "create_named_schedule_sampler",
]


class ScheduleSampler(resample.ScheduleSampler):
    """A distribution over the timesteps of ``diffusion``; a subclass says its ``weights``."""

    def __init__(self, diffusion):
        super().__init__(diffusion)
        self.num_timesteps = diffusion.num_timesteps

    @abstractmethod
    def weights(self) -> np.ndarray:
        """[T] weights above 0, to which the probabilities of the steps are proportional."""

    def sample_at(self, u: Tensor) -> tuple[Tensor, Tensor]:
        weights = torch.as_tensor(self.weights(), dtype=u.dtype, device=u.device)
        return in_proportion(weights / weights.sum(), u)


class UniformSampler(ScheduleSampler):
    """Every step with the same probability."""

    def weights(self) -> np.ndarray:
        return np.ones(self.num_timesteps)


class LossAwareSampler(ScheduleSampler):
    """A distribution that follows the losses."""

    def update_with_local_losses(self, local_ts: Tensor, local_losses: Tensor) -> None:
        """Every rank gives its steps [N] and their losses [N]; all of them learn from all."""
        pairs = [(local_ts.tolist(), local_losses.tolist())]
        if distributed.is_initialized() and distributed.get_world_size() > 1:
            own = pairs[0]
            pairs = [own] * distributed.get_world_size()
            distributed.all_gather_object(pairs, own)
        self.update_with_all_losses([t for ts, _ in pairs for t in ts], [loss for _, them in pairs for loss in them])

    @abstractmethod
    def update_with_all_losses(self, ts: Sequence[int], losses: Sequence[float]) -> None:
        """Record the losses at the steps ``ts``."""


class LossSecondMomentResampler(resample.LossSecondMomentResampler, LossAwareSampler):
    """Steps in proportion to the root mean square of their latest losses (Nichol & Dhariwal 2021, section 3.3)."""

    def weights(self) -> np.ndarray:
        return self._probabilities(torch.zeros((), dtype=torch.float64)).numpy()

    def update_with_all_losses(self, ts: Sequence[int], losses: Sequence[float]) -> None:
        self.update(torch.tensor(ts), torch.tensor(losses))


def create_named_schedule_sampler(name: str, diffusion) -> ScheduleSampler:
    """ "uniform" or "loss-second-moment". InputError for another name."""
    samplers = {"uniform": UniformSampler, "loss-second-moment": LossSecondMomentResampler}
    return lookup(samplers, name, "schedule_sampler")(diffusion)
