"""Losses in bins: by quarter of the process, and by log-SNR, also as a plot."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from ..evaluation.plots import line_plot

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
