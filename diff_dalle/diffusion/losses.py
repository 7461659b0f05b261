"""Errors of a prediction, terms of the variational bound, and weights that depend on the noise level."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeGuard

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..config import InputError, Registry
from .parametrization import LossType

ErrorFunction = Callable[[Tensor, Tensor], Tensor]
Loss = LossType | ErrorFunction  # one of one's own: output and target [N, …] → the error of each element, or sample [N]

#: Their names in flags and configuration files.
LOSSES: Registry[Loss] = Registry(
    "diff_dalle.losses",
    {
        "mse": LossType.MSE,
        "rescaled_mse": LossType.RESCALED_MSE,
        "kl": LossType.KL,
        "rescaled_kl": LossType.RESCALED_KL,
        "l1": LossType.L1,
        "huber": LossType.HUBER,
    },
)
#: Per loss: its name in the reported terms, and the error of one element.
_ERRORS: dict[LossType, tuple[str, Callable[..., Tensor]]] = {
    LossType.MSE: ("mse", F.mse_loss),
    LossType.RESCALED_MSE: ("mse", F.mse_loss),
    LossType.L1: ("l1", F.l1_loss),
    LossType.HUBER: ("huber", F.huber_loss),
}

MIN_SNR_GAMMA = 5.0  # recommended by Hang et al. 2023
P2_K, P2_GAMMA = 1.0, 1.0  # recommended by Choi et al. 2022


def mean_flat(values: Tensor) -> Tensor:
    """[N, …] → [N]: the mean over every axis but the first."""
    return values.reshape(len(values), -1).mean(1)


def is_bound(loss: Loss) -> TypeGuard[LossType]:
    """Whether a loss is the variational bound, which compares distributions."""
    return isinstance(loss, LossType) and loss.is_vb()


def mean_error(loss: Loss, output: Tensor, target: Tensor) -> tuple[str, Tensor]:
    """What the error of a loss is called in logs, and its mean over each sample [N]. InputError for a function of one's
    own that does not return an error for each."""
    if isinstance(loss, LossType):
        name, error = _ERRORS[loss]
        return name, mean_flat(error(output, target, reduction="none"))
    found = loss(output, target)
    if found.shape[:1] != output.shape[:1]:
        given, needed = list(found.shape), f"the error of each element {list(output.shape)} or sample [{len(output)}]"
        raise InputError(f"the loss {getattr(loss, '__name__', loss)} returned shape {given}, but must return {needed}")
    return "error", mean_flat(found)


def normal_kl(mean1, logvar1, mean2, logvar2) -> Tensor:
    """KL(N(mean1, exp(logvar1)) ‖ N(mean2, exp(logvar2))) in nats, elementwise.

    Tensors and numbers may be mixed and are broadcast; at least one must be a Tensor.
    """
    like = next(value for value in (mean1, logvar1, mean2, logvar2) if isinstance(value, Tensor))
    logvar1, logvar2 = (
        value if isinstance(value, Tensor) else torch.full((), value, dtype=like.dtype, device=like.device)
        for value in (logvar1, logvar2)
    )
    # Summed in Guided-Diffusion's order: the terms nearly cancel, so another order changes the fifth digit.
    spread = -1.0 + logvar2 - logvar1 + torch.exp(logvar1 - logvar2)
    return 0.5 * (spread + (mean1 - mean2) ** 2 * torch.exp(-logvar2))


def approx_standard_normal_cdf(x: Tensor) -> Tensor:
    """Tanh approximation of the standard normal distribution function (Page 1977): fast, error below 2e-4."""
    return 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def discretized_gaussian_log_likelihood(x: Tensor, *, means: Tensor, log_scales: Tensor) -> Tensor:
    """log P(x) in nats, elementwise, for 8-bit values under a Gaussian (Ho et al. 2020, equation 13).

    x:          8-bit values scaled to [-1, 1], so that neighbors are 2/255 apart. The first and the last value get
                the entire tail.
    log_scales: log of the standard deviation.
    """
    centered, precision = x - means, torch.exp(-log_scales)
    cdf_above = approx_standard_normal_cdf(precision * (centered + 1 / 255))
    cdf_below = approx_standard_normal_cdf(precision * (centered - 1 / 255))
    lowest, highest, tiny = x < -0.999, x > 0.999, 1e-12  # tiny keeps the logarithm finite
    inner = torch.log((cdf_above - cdf_below).clamp(min=tiny))
    upper_tail = torch.log((1 - cdf_below).clamp(min=tiny))
    lower_tail = torch.log(cdf_above.clamp(min=tiny))
    return torch.where(lowest, lower_tail, torch.where(highest, upper_tail, inner))


def min_snr_weights(snr: np.ndarray, gamma: float = MIN_SNR_GAMMA) -> np.ndarray:
    """min(SNR, gamma) / SNR: the weight of the eps-loss in min-SNR-γ (Hang et al. 2023)."""
    with np.errstate(divide="ignore"):  # the last step may have SNR 0; the weight there is 1
        return np.minimum(1.0, gamma / snr)


def p2_weights(snr: np.ndarray, k: float = P2_K, gamma: float = P2_GAMMA) -> np.ndarray:
    """1 / (k + SNR)^gamma: the weight of the eps-loss in P2 (Choi et al. 2022)."""
    return 1 / (k + snr) ** gamma


#: Log-SNR [N] → the weight [N] of the error of the network's own target, whatever that is.
LossWeight = Callable[[Tensor], Tensor]


def constant_weight(log_snr: Tensor) -> Tensor:
    return torch.ones_like(log_snr)


def p2_weight(log_snr: Tensor, k: float = P2_K, gamma: float = P2_GAMMA, s: float = 1.0) -> Tensor:
    """1 / (k + SNR^s)^gamma (Choi et al. 2022, equation 8)."""
    return (k + torch.exp(s * log_snr)) ** -gamma


def min_snr_weight(log_snr: Tensor, gamma: float = MIN_SNR_GAMMA) -> Tensor:
    """min(SNR, gamma) (Hang et al. 2023), for networks that predict x_start."""
    return torch.exp(log_snr).clamp(max=gamma)


def min_snr_plus_one_weight(log_snr: Tensor, gamma: float = MIN_SNR_GAMMA) -> Tensor:
    """min(SNR + 1, gamma)."""
    return (torch.exp(log_snr) + 1).clamp(max=gamma)


def truncated_snr_weight(log_snr: Tensor) -> Tensor:
    """max(SNR, 1) (Salimans & Ho 2022, section 4)."""
    return torch.exp(log_snr).clamp(min=1)


def sech_weight(log_snr: Tensor) -> Tensor:
    """1 / cosh(log-SNR / 2) (Kingma & Gao 2023, table 1: what eps and a cosine schedule amount to)."""
    return 1 / torch.cosh(log_snr / 2)


def debiased_weight(log_snr: Tensor) -> Tensor:
    """1 / sqrt(SNR) (Yu et al. 2023)."""
    return torch.exp(-log_snr / 2)


def sigmoid_weight(log_snr: Tensor, s: float = 1.0) -> Tensor:
    """sigmoid(s × log-SNR)."""
    return torch.sigmoid(s * log_snr)


LOSS_WEIGHTS: dict[str, LossWeight] = {
    "none": constant_weight,
    "p2": p2_weight,
    "snr": torch.exp,
    "snr_plus_one": lambda log_snr: torch.exp(log_snr) + 1,
    "min_snr": min_snr_weight,
    "min_snr_plus_one": min_snr_plus_one_weight,
    "truncated_snr": truncated_snr_weight,
    "sech": sech_weight,
    "debiased": debiased_weight,
    "sigmoid": sigmoid_weight,
}
