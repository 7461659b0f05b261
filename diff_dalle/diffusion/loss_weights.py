"""Weights of the squared error by log-SNR: functions in LOSS_WEIGHTS. They apply to the error of the network's own
target, whatever that is."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .losses import MIN_SNR_GAMMA, P2_GAMMA, P2_K

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
