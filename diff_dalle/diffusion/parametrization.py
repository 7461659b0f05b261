"""What a network predicts and its loss function: Guided-Diffusion's enumerations, and targets at any noise level.

x_t = a x_start + b noise. A scaler gives a and b at a log-SNR; whatever it is, a²/b² is the SNR. A new scaler is one
line in SCALERS, a new target one in TARGETS. a and b may be numbers, or tensors that broadcast with x.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class ModelMeanType(enum.Enum):
    """What the first C output channels are."""

    PREVIOUS_X = enum.auto()  #: the mean of x_{t-1}
    START_X = enum.auto()  #: x_start
    EPSILON = enum.auto()  #: the noise in x_t
    VELOCITY = enum.auto()  #: v = sqrt(ᾱ) eps − sqrt(1 − ᾱ) x_start (Salimans & Ho 2022, section 4)


class ModelVarType(enum.Enum):
    """The variance of x_{t-1} given x_t. With a learned variance the network has 2C output channels."""

    LEARNED = enum.auto()  #: the last C channels are its logarithm
    FIXED_SMALL = enum.auto()  #: the variance of q(x_{t-1} | x_t, x_start)
    FIXED_LARGE = enum.auto()  #: beta
    LEARNED_RANGE = enum.auto()  #: the last C channels, from -1 to 1, interpolate the logarithm from small to large

    @property
    def is_learned(self) -> bool:
        return self in (ModelVarType.LEARNED, ModelVarType.LEARNED_RANGE)


class LossType(enum.Enum):
    """The training loss. All but KL and RESCALED_KL add the variational term of a learned variance."""

    MSE = enum.auto()  #: squared error, plus the unscaled variational term
    RESCALED_MSE = enum.auto()  #: squared error, plus the variational term × T/1000
    KL = enum.auto()  #: the variational term of step t, in bits per dimension
    RESCALED_KL = enum.auto()  #: the same × T, an estimate of the full bound
    L1 = enum.auto()  #: absolute error, plus the variational term × T/1000
    HUBER = enum.auto()  #: squared error / 2 up to 1, then absolute error − 1/2, plus the variational term × T/1000

    def is_vb(self) -> bool:
        return self in (LossType.KL, LossType.RESCALED_KL)


#: Their names in flags and configuration files.
PREDICTIONS = {
    "eps": ModelMeanType.EPSILON,
    "x_start": ModelMeanType.START_X,
    "v": ModelMeanType.VELOCITY,
    "previous_x": ModelMeanType.PREVIOUS_X,
}
VARIANCES = {
    "fixed_large": ModelVarType.FIXED_LARGE,
    "fixed_small": ModelVarType.FIXED_SMALL,
    "learned": ModelVarType.LEARNED,
    "learned_range": ModelVarType.LEARNED_RANGE,
}

Scaler = Callable[[Tensor], tuple[Tensor, Tensor]]
Pair = tuple[Tensor, Tensor]


def variance_preserving(log_snr: Tensor) -> Pair:
    """a² + b² = 1: the variance of x_t stays that of x_start, if that is 1."""
    return torch.sigmoid(log_snr).sqrt(), torch.sigmoid(-log_snr).sqrt()


def linear_interpolation(log_snr: Tensor) -> Pair:
    """a + b = 1: straight lines from x_start to the noise."""
    return torch.sigmoid(log_snr / 2), torch.sigmoid(-log_snr / 2)


SCALERS: dict[str, Scaler] = {"vp": variance_preserving, "lerp": linear_interpolation}


@dataclass(frozen=True)
class Target:
    """What a network predicts.

    make: (x_start, noise, a, b) → the training target.
    read: (x_t, the network's output, a, b) → x_start and noise; of the target they are the true ones.
    size: (a, b) → the size of its error, up to a factor that all targets share. As x_t is known, an error of a e in
          eps is one of −b e in x_start, and the other targets are made of these two.
    """

    make: Callable[..., Tensor]
    read: Callable[..., Pair]
    size: Callable[..., Any]


def _read_eps(x_t: Tensor, output: Tensor, a, b) -> Pair:
    return (x_t - b * output) / a, output


def _read_x_start(x_t: Tensor, output: Tensor, a, b) -> Pair:
    return output, (x_t - a * output) / b


def _make_v(x_start: Tensor, noise: Tensor, a, b) -> Tensor:
    """Salimans & Ho 2022, section 4."""
    return a * noise - b * x_start


def _read_v(x_t: Tensor, output: Tensor, a, b) -> Pair:
    power = a**2 + b**2
    return (a * x_t - b * output) / power, (b * x_t + a * output) / power


def _read_flow(x_t: Tensor, output: Tensor, a, b) -> Pair:
    """For a + b = 1 alone."""
    return x_t - b * output, x_t + a * output


TARGETS: dict[str, Target] = {
    "eps": Target(lambda x_start, noise, a, b: noise, _read_eps, lambda a, b: a),
    "x_start": Target(lambda x_start, noise, a, b: x_start, _read_x_start, lambda a, b: b),
    "v": Target(_make_v, _read_v, lambda a, b: a**2 + b**2),
    "flow": Target(lambda x_start, noise, a, b: noise - x_start, _read_flow, lambda a, b: a + b),
}
