"""What a network is told of the noise level: functions of log-SNR, in NOISE_CONDITIONS."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .log_snr_schedules import cosine_time, stable_diffusion_time

NoiseCondition = Callable[[Tensor], Tensor]


def sigma_condition(log_snr: Tensor, sigma_data: float = 1.0) -> Tensor:
    """σ/α in units of the data: their standard deviation is ``sigma_data``."""
    return torch.exp(-log_snr / 2) * sigma_data


NOISE_CONDITIONS: dict[str, NoiseCondition] = {
    "cosine": cosine_time,  # the time on the cosine schedule, so that a shifted schedule looks like a later time
    "stable_diffusion": stable_diffusion_time,
    "rectified_flow": lambda log_snr: torch.sigmoid(log_snr / 2),  # the share of x_start: 1 = clean
    "flow_steps": lambda log_snr: 1000 * torch.sigmoid(-log_snr / 2),  # the share of noise, as one of 1,000 steps
    "sigmoid": lambda log_snr: torch.sigmoid(-log_snr),  # σ²
    "edm": lambda log_snr: -log_snr / 8,  # log(σ) / 4 (Karras et al. 2022, table 1)
    "log_snr": lambda log_snr: log_snr,
    "sigma": sigma_condition,
}


def discrete(condition: NoiseCondition, steps: int, clean: float, noisy: float) -> NoiseCondition:
    """``condition`` as one of the integers 0 (clean) to ``steps`` − 1.

    clean, noisy: its values at both ends of the schedule.
    """

    def level(log_snr: Tensor) -> Tensor:
        share = (condition(log_snr) - clean) / (noisy - clean)
        return (share * steps).floor().clamp(0, steps - 1)

    return level
