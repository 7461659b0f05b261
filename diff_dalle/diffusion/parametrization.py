"""What a network predicts, and its loss function."""

from __future__ import annotations

import enum


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
