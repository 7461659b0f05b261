"""Named schedules of the log signal-to-noise ratio (log-SNR) over continuous time, and what a network is told of it.

A schedule is a function of times t [N] in [0, 1] (0 = clean, 1 = noise) in double precision, and falls with t. A new
one is one function ``t → log-SNR`` and one line in LOG_SNR_SCHEDULES.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

LogSnrSchedule = Callable[[Tensor], Tensor]

COSINE_OFFSET = 0.008  # s in Nichol & Dhariwal 2021, equation 17
LEAST_ALPHA_BAR = 1e-4  # and 1 − it the largest: log-SNR within ±9.21, so that both ends stay finite
_COSINE_START = math.cos(COSINE_OFFSET / (1 + COSINE_OFFSET) * math.pi / 2) ** 2
_COSINE2_END = 7.5  # log(σ/α) at t = 1, and its negative at t = 0
_FLOW_LIMIT = 15.0  # of log-SNR
_SQRT_OFFSET = 1e-4  # s in Li et al. 2022, appendix A
_EDM_SIGMAS, _EDM_RHO = (0.002, 80.0), 7.0  # Karras et al. 2022, table 1
_EDM_MEAN, _EDM_STD = -1.2, 1.2  # of log σ in training, in the same table
_LEAST_PROBABILITY = 1e-6  # quantiles beyond are cut off: 4.8 standard deviations
_SD_BETAS, _SD_STEPS = (0.00085, 0.012), 1000  # Rombach et al. 2022: linear square roots


def _limited(alpha_bar: Tensor, squeeze: bool) -> Tensor:
    """ᾱ in [0, 1] → log-SNR; ᾱ is clamped to [1e-4, 1 − 1e-4], or squeezed into it."""
    low, high = LEAST_ALPHA_BAR, 1 - LEAST_ALPHA_BAR
    return torch.logit(low + (high - low) * alpha_bar if squeeze else alpha_bar.clamp(low, high))


def cosine_log_snr(t: Tensor, squeeze: bool = False) -> Tensor:
    """ᾱ as a squared cosine (Nichol & Dhariwal 2021, equation 17), limited to [1e-4, 1 − 1e-4]."""
    angle = (t + COSINE_OFFSET) / (1 + COSINE_OFFSET) * (math.pi / 2)
    return _limited(torch.cos(angle).square() / _COSINE_START, squeeze)


def cosine_time(log_snr: Tensor) -> Tensor:
    """The time at which ``cosine_log_snr`` has this value. At its limits .0023 and .9936, where clamping begins."""
    alpha_bar = torch.sigmoid(log_snr).clamp(LEAST_ALPHA_BAR, 1 - LEAST_ALPHA_BAR)
    angle = torch.acos((alpha_bar * _COSINE_START).sqrt())
    return angle / (math.pi / 2) * (1 + COSINE_OFFSET) - COSINE_OFFSET


def cosine2_log_snr(t: Tensor) -> Tensor:
    """α and σ on an arc of constant speed, from log-SNR 15 to −15 (Hoogeboom et al. 2023, equation 3)."""
    first, last = (math.atan(math.exp(end)) for end in (-_COSINE2_END, _COSINE2_END))
    return -2 * torch.log(torch.tan(first + t * (last - first)))


def linear_log_snr(t: Tensor) -> Tensor:
    """From 10 to −10 in a straight line."""
    return 10 - 20 * t


def sqrt_log_snr(t: Tensor, squeeze: bool = False) -> Tensor:
    """ᾱ = 1 − sqrt(t + 1e-4) (Li et al. 2022), limited to [1e-4, 1 − 1e-4]."""
    return _limited((1 - (t + _SQRT_OFFSET).sqrt()).clamp(min=0), squeeze)


def flow_log_snr(t: Tensor) -> Tensor:
    """That of (1 − t) x_start + t noise (Liu et al. 2022), within ±15."""
    return (-2 * torch.logit(t)).clamp(-_FLOW_LIMIT, _FLOW_LIMIT)


def stable_diffusion_log_snr(t: Tensor) -> Tensor:
    """Stable Diffusion's 1000 steps (Rombach et al. 2022), from the first at t = 0 to the last at t = 1; between them
    log-SNR is interpolated."""
    times, log_snr = _stable_diffusion_table(t.device, t.dtype)
    return interpolate(t, times, log_snr)


def stable_diffusion_time(log_snr: Tensor) -> Tensor:
    """The time at which ``stable_diffusion_log_snr`` has this value; 0 or 1 beyond its ends."""
    times, table = _stable_diffusion_table(log_snr.device, log_snr.dtype)
    return interpolate(log_snr, table.flip(0), times.flip(0))


@functools.cache
def _stable_diffusion_table(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    first, last = (math.sqrt(beta) for beta in _SD_BETAS)
    betas = torch.linspace(first, last, _SD_STEPS, dtype=torch.float64).square()
    log_snr = torch.logit((1 - betas).cumprod(0))
    return torch.linspace(0, 1, _SD_STEPS, dtype=dtype).to(device), log_snr.to(device, dtype)


def edm_log_snr(t: Tensor) -> Tensor:
    """The noise levels of sampling in Karras et al. 2022, equation 5: σ from .002 to 80."""
    first, last = (sigma ** (1 / _EDM_RHO) for sigma in _EDM_SIGMAS)
    return -2 * _EDM_RHO * torch.log(first + t * (last - first))


def edm_train_log_snr(t: Tensor) -> Tensor:
    """Quantiles of log σ ~ N(−1.2, 1.2²), the noise levels of training in Karras et al. 2022, table 1: with uniform t
    they have that distribution."""
    return -2 * (_EDM_MEAN + _EDM_STD * normal_quantile(t))


def normal_quantile(p: Tensor) -> Tensor:
    """The value below which a standard normal variable is with probability p [N], limited to [1e-6, 1 − 1e-6]."""
    p = p.clamp(_LEAST_PROBABILITY, 1 - _LEAST_PROBABILITY)
    return math.sqrt(2) * torch.erfinv(2 * p - 1)


LOG_SNR_SCHEDULES: dict[str, LogSnrSchedule] = {
    "cosine": cosine_log_snr,
    "cosine2": cosine2_log_snr,
    "linear": linear_log_snr,
    "sqrt": sqrt_log_snr,
    "flow": flow_log_snr,
    "stable_diffusion": stable_diffusion_log_snr,
    "edm": edm_log_snr,
    "edm_train": edm_train_log_snr,
}
#: Those with limits on ᾱ into which it may be squeezed.
SQUEEZED: dict[str, LogSnrSchedule] = {
    "cosine": functools.partial(cosine_log_snr, squeeze=True),
    "sqrt": functools.partial(sqrt_log_snr, squeeze=True),
}


def interpolated(first: LogSnrSchedule, second: LogSnrSchedule) -> LogSnrSchedule:
    """t × first + (1 − t) × second."""
    return lambda t: t * first(t) + (1 - t) * second(t)


def discretized(schedule: LogSnrSchedule, count: int) -> LogSnrSchedule:
    """``schedule`` at ``count`` times only: each t is rounded up to one of 1/count, 2/count, …, 1."""
    # Less than any distance of interest, and more than the rounding error of k / count × count.
    return lambda t: schedule((t * count - 1e-6).ceil().clamp(min=1) / count)


def interpolate(x: Tensor, knots: Tensor, values: Tensor) -> Tensor:
    """The piecewise linear function through (knots, values), both [K], at x [N]; constant beyond the ends.

    knots: increasing, in x's precision and on its device.
    """
    right = torch.searchsorted(knots, x.contiguous()).clamp(1, len(knots) - 1)
    left = right - 1
    share = (x - knots[left]) / (knots[right] - knots[left])
    return torch.lerp(values[left], values[right], share.clamp(0, 1))


#: Log-SNR [N] → the network's time input [N].
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
