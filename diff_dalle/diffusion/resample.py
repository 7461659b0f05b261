"""Distributions of training timesteps, with the weights of their losses.

A sampler maps uniform numbers to timesteps by inverse transform sampling, so the caller controls what a sample's
timestep depends on, and everything stays on the device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from ..config import InputError, lookup, named, option, settings
from .log_snr import LogSnrProcess
from .log_snr_schedules import normal_quantile
from .process import Process


class ScheduleSampler(ABC):
    """A distribution over the times of ``diffusion``: its steps 0 … T-1, or 0 to 1 in continuous time."""

    observes = False  # whether it depends on the losses

    def __init__(self, diffusion: Process | LogSnrProcess):
        self.diffusion = diffusion

    @abstractmethod
    def sample_at(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """u [N] in [0, 1) → (t [N], weights [N] float32): t grows with u, the time as a fraction of the process."""

    def sample(self, batch_size: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
        """``sample_at`` with numbers from numpy's global generator: a seed gives Guided-Diffusion's timesteps."""
        u = torch.from_numpy(np.random.random_sample(batch_size))
        t, weights = self.sample_at(u)
        return t.to(device), weights.to(device)

    def update(self, ts: Tensor, losses: Tensor) -> None:  # noqa: B027  (optional)
        """Record the losses [N] at the steps ts [N]. Only loss-aware samplers use them."""

    def state_dict(self) -> dict[str, Tensor]:
        """The state to save for resuming."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:  # noqa: B027  (optional)
        """Restore the result of ``state_dict``."""


def in_proportion(p: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """``ScheduleSampler.sample_at`` for the probabilities p [T] of the steps."""
    cumulative = p.cumsum(0)
    t = torch.searchsorted(cumulative / cumulative[-1], u, right=True).clamp(max=len(p) - 1)
    return t, (1 / (len(p) * p[t])).float()


class UniformSampler(ScheduleSampler):
    """Every time with the same probability."""

    def sample_at(self, u: Tensor) -> tuple[Tensor, Tensor]:
        return self.diffusion.at_fraction(u), torch.ones_like(u, dtype=torch.float32)


class LogitNormalSampler(ScheduleSampler):
    """Times whose logit is normally distributed (Esser et al. 2024, section 3.1), without weights: what is seen more
    often counts more.

    mean, std: of log(t / (1 − t)), t as a fraction of the process, 1 = noise. A mean above 0 = more noise.
    """

    def __init__(self, diffusion: Process | LogSnrProcess, mean: float = 0.0, std: float = 1.0):
        super().__init__(diffusion)
        self.mean, self.std = mean, std

    def sample_at(self, u: Tensor) -> tuple[Tensor, Tensor]:
        fraction = torch.sigmoid(self.mean + self.std * normal_quantile(u))
        return self.diffusion.at_fraction(fraction), torch.ones_like(u, dtype=torch.float32)


class LossSecondMomentResampler(ScheduleSampler):
    """Steps in proportion to the root mean square of their latest losses (Nichol & Dhariwal 2021, section 3.3), with
    the weights that keep the loss unbiased: E over u of weight × loss(t) = mean loss over t.

    Uniform until every step has a full history.

    history_per_term: number of losses stored for each step.
    uniform_prob:     share of the distribution that stays uniform.
    """

    observes = True

    def __init__(self, diffusion: Process, history_per_term: int = 10, uniform_prob: float = 0.001):
        super().__init__(diffusion)
        self.num_timesteps = diffusion.num_timesteps
        self.history_per_term, self.uniform_prob = history_per_term, uniform_prob
        # One extra row, to which ``update`` writes discarded losses.
        self._history = torch.zeros(self.num_timesteps + 1, history_per_term)
        self._counts = torch.zeros(self.num_timesteps + 1, dtype=torch.int64)

    def _move(self, device: torch.device) -> None:
        if self._history.device != device:
            self._history, self._counts = self._history.to(device), self._counts.to(device)

    def _probabilities(self, u: Tensor) -> Tensor:
        """[T], in u's precision and on its device."""
        self._move(u.device)
        history, counts = self._history[:-1].to(u.dtype), self._counts[:-1]
        weights = history.square().mean(1).sqrt()
        weights = weights / weights.sum() * (1 - self.uniform_prob) + self.uniform_prob / self.num_timesteps
        warm = (counts == self.history_per_term).all()
        return torch.where(warm, weights, 1 / self.num_timesteps)

    def sample_at(self, u: Tensor) -> tuple[Tensor, Tensor]:
        return in_proportion(self._probabilities(u), u)

    @torch.no_grad()
    def update(self, ts: Tensor, losses: Tensor) -> None:
        """Equivalent to one update per pair, each replacing the oldest loss in its step's full history.

        Non-finite losses are discarded: they would corrupt the distribution permanently.
        """
        self._move(ts.device)
        last = self.history_per_term
        ts = torch.where(losses.isfinite(), ts, self.num_timesteps)
        # ranks[i]: number of earlier entries of this batch with the same step. The stable sort groups equal steps.
        ordered, order = ts.sort(stable=True)
        ranks = torch.empty_like(ts)
        ranks[order] = torch.arange(len(ts), device=ts.device) - torch.searchsorted(ordered, ordered)
        arrivals = torch.zeros_like(self._counts).scatter_add_(0, ts, torch.ones_like(ts))
        overflow = (self._counts + arrivals - last).clamp(min=0)
        slots = self._counts[ts] + ranks - overflow[ts]  # negative: replaced again within this batch
        shifted = (torch.arange(last, device=ts.device) + overflow[:, None]).clamp(max=last - 1)
        self._history = self._history.gather(1, shifted)
        rows = torch.where(slots < 0, self.num_timesteps, ts)
        self._history[rows, slots.clamp(min=0)] = losses.to(self._history.dtype)
        self._counts = (self._counts + arrivals).clamp(max=last)

    def state_dict(self) -> dict[str, Tensor]:
        return {"loss_history": self._history[:-1].clone(), "loss_counts": self._counts[:-1].clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        history, counts = state["loss_history"], state["loss_counts"]
        shape = (self.num_timesteps, self.history_per_term)
        if tuple(history.shape) != shape:
            raise InputError(
                f"the saved losses of loss-second-moment have shape {list(history.shape)}, but this process requires "
                f"{list(shape)}: do not change {named('diffusion_steps')}"
            )
        self._history[:-1], self._counts[:-1] = history.to(self._history), counts.to(self._counts)


LOGIT_NORMAL, LOSS_AWARE = "logit_normal", "loss-second-moment"
SCHEDULE_SAMPLERS: dict[str, Callable[..., ScheduleSampler]] = {
    "uniform": UniformSampler,
    LOGIT_NORMAL: LogitNormalSampler,
    LOSS_AWARE: LossSecondMomentResampler,
}


def create_named_schedule_sampler(name: str, diffusion: Process | LogSnrProcess, **options) -> ScheduleSampler:
    """A sampler of SCHEDULE_SAMPLERS. options: its settings; those not given have their defaults."""
    return lookup(SCHEDULE_SAMPLERS, name, "schedule_sampler")(diffusion, **options)


@settings
class TimestepConfig:
    """Timesteps"""

    schedule_sampler: str = option(
        "uniform", "distribution of training timesteps", choices=SCHEDULE_SAMPLERS, needs=("noised",)
    )
    logit_mean: float = option(
        0.0,
        "logit_normal: mean of log(t / (1 − t)), t from 0 (image) to 1 (noise); above 0 = more noise",
        needs=("schedule_sampler", LOGIT_NORMAL),
    )
    logit_std: float = option(
        1.0,
        "logit_normal: standard deviation of log(t / (1 − t))",
        needs=("schedule_sampler", LOGIT_NORMAL),
        above=0,
    )

    def sampler(self, diffusion: Process | LogSnrProcess) -> ScheduleSampler:
        """The distribution of the times of a process."""
        normal = {"mean": self.logit_mean, "std": self.logit_std} if self.schedule_sampler == LOGIT_NORMAL else {}
        return create_named_schedule_sampler(self.schedule_sampler, diffusion, **normal)


@settings
class DenoisingConfig(TimestepConfig):
    """Denoising"""

    caption_dropout: float = option(
        0.1, "probability of dropping caption and class, for classifier-free guidance", least=0, most=1
    )


@settings
class ContrastiveConfig(TimestepConfig):
    """Contrastive training"""

    noised: bool = option(True, "train on noised images of all noise levels; False = ordinary CLIP, at t = 0")
