"""Settings of a process in log-SNR."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from ..config import lookup, option
from ..errors import InputError
from .adaptive import ADAPTIVE
from .log_snr_schedules import LOG_SNR_SCHEDULES, SQUEEZED, LogSnrSchedule
from .log_snr_targets import SCALERS, TARGETS
from .loss_weights import (
    LOSS_WEIGHTS,
    LossWeight,
    min_snr_plus_one_weight,
    min_snr_weight,
    p2_weight,
    sigmoid_weight,
)
from .losses import MIN_SNR_GAMMA, P2_GAMMA, P2_K
from .noise_conditions import NOISE_CONDITIONS, NoiseCondition, sigma_condition

_OVER = "/"  # before a weight that divides
_WEIGHTS = (*LOSS_WEIGHTS, ADAPTIVE)


@dataclass(frozen=True)
class LogSnrConfig:
    """Diffusion process in log-SNR"""

    log_snr_schedule: str = option(
        "cosine",
        "log signal-to-noise ratio (log-SNR) over time; two are distributions to train on: edm_train that of Karras et "
        "al. 2022, adaptive in proportion to the running loss",
        choices=(*LOG_SNR_SCHEDULES, ADAPTIVE),
    )
    log_snr_interpolation: str | None = option(
        None,
        "another schedule that the first one passes into towards the clean sample: t × the first + (1 − t) × this one; "
        "none = the first alone",
        choices=tuple(LOG_SNR_SCHEDULES),
    )
    log_snr_steps: int = option(0, "number of evenly spaced times that training is limited to; 0 = continuous time")
    squeeze_log_snr: bool = option(
        False,
        "squeeze α² of the schedules cosine and sqrt into [0.0001, 0.9999], instead of clamping it",
    )
    shift: float = option(
        1.0,
        "α/σ is divided by this, within the limits of the schedule: above 1 = more noise, for larger images; in "
        "training and sampling (which may shift further)",
    )
    sampling_schedule: str | None = option(
        None,
        "schedule of the sampling steps; none = as in training, except for edm_train (edm) and adaptive (cosine)",
        choices=tuple(LOG_SNR_SCHEDULES),
    )
    scaler: str = option(
        "vp",
        "x_t = a x_start + b noise with a² + b² = 1 (vp, variance preserving), or a + b = 1 (lerp)",
        choices=tuple(SCALERS),
    )
    prediction: str = option(
        "eps",
        "prediction type of the network: rectified_flow is noise − x_start, and requires the scaler lerp",
        choices=tuple(TARGETS),
    )
    noise_condition: str = option(
        "cosine",
        "how the network is told the noise level: as time on the schedule cosine or stable_diffusion (0 = clean), as "
        "share of x_start (rectified_flow), sigmoid(−log-SNR), log(σ)/4 (edm), log_snr itself, or sigma = σ/α",
        choices=tuple(NOISE_CONDITIONS),
    )
    noise_condition_steps: int = option(
        0, "number of levels that the noise condition is rounded down to, 0 = clean; 0 = continuous"
    )
    sigma_data: float = option(
        1.0, "standard deviation of the data, in which sigma is measured", needs=("noise_condition", "sigma")
    )
    loss_weighting: tuple[str, ...] = option(
        ("p2",),
        "weights of the squared error by signal-to-noise ratio, multiplied; /NAME divides by one. adaptive = 1 / the "
        "running loss at this log-SNR",
        choices=(*_WEIGHTS, *(_OVER + name for name in _WEIGHTS)),
    )
    p2_k: float = option(
        P2_K, "p2: k in the weight 1 / (k + SNR^s)^gamma", needs=("loss_weighting", "p2", _OVER + "p2")
    )
    p2_gamma: float = option(
        P2_GAMMA, "p2: gamma in the weight 1 / (k + SNR^s)^gamma", needs=("loss_weighting", "p2", _OVER + "p2")
    )
    p2_s: float = option(1.0, "p2: s in the weight 1 / (k + SNR^s)^gamma", needs=("loss_weighting", "p2", _OVER + "p2"))
    min_snr_gamma: float = option(
        MIN_SNR_GAMMA,
        "min_snr, min_snr_plus_one: largest weight",
        needs=("loss_weighting", *(over + name for over in ("", _OVER) for name in ("min_snr", "min_snr_plus_one"))),
    )
    sigmoid_s: float = option(
        1.0,
        "sigmoid: s in the weight sigmoid(s × log-SNR)",
        needs=("loss_weighting", "sigmoid", _OVER + "sigmoid"),
    )
    loss_shift: float = option(1.0, "α/σ is multiplied by this before weighting")
    loss_weight_limits: tuple[float, ...] = option((1e-7, 1e7), "smallest and largest weight of the error, LOW,HIGH")
    offset_noise: float = option(
        0.0, "standard deviation of a constant added to the noise of each channel in training; 0 = none"
    )
    pyramid_noise: float = option(
        0.0,
        "training noise with large spots: amplitude of each octave relative to the one above; 0 = white noise",
    )

    def __post_init__(self):
        self._check_names()
        self._check_numbers()

    def _check_names(self) -> None:
        training = (*LOG_SNR_SCHEDULES, ADAPTIVE)
        lookup(dict.fromkeys(training), self.log_snr_schedule, "log_snr_schedule")
        for name in ("log_snr_interpolation", "sampling_schedule"):
            if getattr(self, name) is not None:
                lookup(LOG_SNR_SCHEDULES, getattr(self, name), name)
        lookup(SCALERS, self.scaler, "scaler")
        lookup(TARGETS, self.prediction, "prediction")
        lookup(NOISE_CONDITIONS, self.noise_condition, "noise_condition")
        for name in self.loss_weighting:
            lookup(dict.fromkeys(_WEIGHTS), name.removeprefix(_OVER), "loss_weighting")
        if self.prediction == "rectified_flow" and self.scaler != "lerp":
            raise InputError(
                f"prediction is rectified_flow, but scaler is {self.scaler}, of which it does not determine x_start: "
                "set scaler to lerp, or prediction to v"
            )
        if self.log_snr_schedule == ADAPTIVE and (self.log_snr_interpolation or self.log_snr_steps):
            raise InputError(
                "log_snr_schedule is adaptive, a distribution, which cannot be interpolated or limited to steps: leave "
                "out log_snr_interpolation and log_snr_steps"
            )
        used = {self.log_snr_schedule, self.log_snr_interpolation, self.sampling_schedule}
        if self.squeeze_log_snr and not used & {*SQUEEZED}:
            raise InputError(
                f"squeeze_log_snr is True, but only {' and '.join(SQUEEZED)} have it, not {self.log_snr_schedule}: "
                "leave it out"
            )

    def _check_numbers(self) -> None:
        for name in ("shift", "loss_shift", "sigma_data", "p2_k", "min_snr_gamma"):
            if getattr(self, name) <= 0:
                raise InputError(f"{name} is {getattr(self, name):g}, but must be above 0")
        for name in ("log_snr_steps", "p2_gamma", "offset_noise", "pyramid_noise"):
            if getattr(self, name) < 0:
                raise InputError(f"{name} is {getattr(self, name):g}, but must be at least 0")
        if self.noise_condition_steps < 0 or self.noise_condition_steps == 1:
            raise InputError(f"noise_condition_steps is {self.noise_condition_steps}, but must be 0, or at least 2")
        ends = self.loss_weight_limits
        if len(ends) != 2 or not 0 <= ends[0] < ends[1]:
            raise InputError(f"loss_weight_limits is {ends}, but must be LOW,HIGH with 0 <= LOW < HIGH")

    @property
    def log_shift(self) -> float:
        """What ``shift`` subtracts from log-SNR."""
        return 2 * math.log(self.shift)

    def schedule(self, name: str) -> LogSnrSchedule:
        """A schedule by its name."""
        table = {**LOG_SNR_SCHEDULES, **SQUEEZED} if self.squeeze_log_snr else LOG_SNR_SCHEDULES
        return table[name]

    def condition(self) -> NoiseCondition:
        """``noise_condition``, before rounding."""
        if self.noise_condition == "sigma":
            return functools.partial(sigma_condition, sigma_data=self.sigma_data)
        return NOISE_CONDITIONS[self.noise_condition]

    def weights(self, adaptive: Mapping[str, LossWeight]) -> list[tuple[LossWeight, bool]]:
        """The weights of ``loss_weighting``, and whether each divides. adaptive: those that have state, by name."""
        table: dict[str, LossWeight] = {
            **LOSS_WEIGHTS,
            "p2": functools.partial(p2_weight, k=self.p2_k, gamma=self.p2_gamma, s=self.p2_s),
            "min_snr": functools.partial(min_snr_weight, gamma=self.min_snr_gamma),
            "min_snr_plus_one": functools.partial(min_snr_plus_one_weight, gamma=self.min_snr_gamma),
            "sigmoid": functools.partial(sigmoid_weight, s=self.sigmoid_s),
            **adaptive,
        }
        return [(table[name.removeprefix(_OVER)], name.startswith(_OVER)) for name in self.loss_weighting]

    @property
    def weighs_adaptively(self) -> bool:
        return any(name.removeprefix(_OVER) == ADAPTIVE for name in self.loss_weighting)
