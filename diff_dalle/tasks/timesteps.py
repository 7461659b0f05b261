"""Tasks that draw a time for each sample, and losses in bins: by quarter of the process, and by log-SNR with a plot."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from ..diffusion.diffusion_config import TrainingProcess
from ..diffusion.resample import TimestepConfig
from ..evaluation.plots import line_plot
from ..training.task import Task


class TimestepTask(Task):
    """A task on images noised by a diffusion process.

    ``losses`` must report "t" and, with a loss-aware schedule sampler, which sets ``observed``, "unweighted_loss".

    process: the full (not respaced) process.
    """

    recorded = ("t",)

    def __init__(self, model: nn.Module, process: TrainingProcess, config: TimestepConfig):
        super().__init__()
        self.model, self.process, self.config = model, process, config
        self.schedule_sampler = config.sampler(process)
        self.observed = ("t", "unweighted_loss") if self.schedule_sampler.observes else ()

    def observe(self, values: Mapping[str, Tensor]) -> None:
        self.schedule_sampler.update(values["t"], values["unweighted_loss"])

    def extra_state(self) -> dict[str, Tensor]:
        return self.schedule_sampler.state_dict()

    def load_extra_state(self, state: Mapping[str, Tensor]) -> None:
        self.schedule_sampler.load_state_dict(state)


QUARTILES = 4  # of the process, 0 with the least noise, as in Guided-Diffusion
BINS = 10  # of log-SNR in ±LIMIT; the first and the last take what lies beyond
LIMIT = 10.0
CENTERS = {f"loss_log_snr_{center:g}": center for center in (LIMIT * (2 * i + 1 - BINS) / BINS for i in range(BINS))}


def by_quartile(name: str, values: Tensor, quarter: Tensor) -> dict[str, Tensor]:
    """Values [N] by quarter [N] of the process, as NAME_q0 to NAME_q3, [N] each: NaN for those of other quarters."""
    return _by_bin([f"{name}_q{q}" for q in range(QUARTILES)], quarter, values.detach())


def _by_bin(names: Sequence[str], number: Tensor, values: Tensor) -> dict[str, Tensor]:
    every = torch.arange(len(names), device=number.device)
    return dict(zip(names, torch.where(number == every[:, None], values, torch.nan).unbind(), strict=True))


def by_log_snr(log_snr: Tensor, losses: Tensor) -> dict[str, Tensor]:
    """Losses [N] at log_snr [N] by the names of the bins, [N] each: NaN for those of other bins."""
    number = ((log_snr + LIMIT) * (BINS / (2 * LIMIT))).long().clamp(0, BINS - 1)
    return _by_bin(list(CENTERS), number, losses)


def plot_by_log_snr(means: Mapping[str, float], weight: Callable[[Tensor], Tensor]) -> np.ndarray | None:
    """The means of ``by_log_snr``, those that there are, and the weights of the loss at the bins' centers: uint8
    [H, W, 3]; None without a mean. weight: of log-SNR [N]. Raises MissingMatplotlib."""
    points = [(center, means[name]) for name, center in CENTERS.items() if math.isfinite(means.get(name, math.nan))]
    if not points:
        return None
    weights = weight(torch.tensor([center for center, _ in points], dtype=torch.float64)).tolist()
    series = {"loss": points, "weight": [(center, y) for (center, _), y in zip(points, weights, strict=True)]}
    top = max(y for line in series.values() for _, y in line)
    return np.asarray(line_plot(series, "log-SNR", y_range=(0.0, top)))
