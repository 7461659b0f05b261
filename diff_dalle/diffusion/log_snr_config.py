"""Settings of a process in log-SNR."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping

from ..config import Fault, named, option, settings
from ..config.bounds import MAX_STEPS
from .adaptive import ADAPTIVE
from .log_snr_schedules import (
    LOG_SNR_SCHEDULES,
    NOISE_CONDITIONS,
    SQUEEZED,
    LogSnrSchedule,
    NoiseCondition,
    sigma_condition,
)
from .losses import (
    LOSS_WEIGHTS,
    MIN_SNR_GAMMA,
    P2_GAMMA,
    P2_K,
    LossWeight,
    min_snr_plus_one_weight,
    min_snr_weight,
    p2_weight,
    sigmoid_weight,
)
from .parametrization import SCALERS, TARGETS

_OVER = "/"  # before a weight that divides
_FLOWS = ("log_snr_schedule", "log_snr_interpolation", "sampling_schedule", "prediction")
_WEIGHTS = (*LOSS_WEIGHTS, ADAPTIVE)


@settings
class LogSnrConfig:
    """Diffusion process in log-SNR"""

    log_snr_schedule: str = option(
        "cosine",
        "log signal-to-noise ratio (log-SNR) over time; two are training distributions: edm_train (Karras et al. "
        "2022), and adaptive, in proportion to the running loss",
        choices=(*LOG_SNR_SCHEDULES, ADAPTIVE),
    )
    log_snr_interpolation: str | None = option(
        None,
        "second schedule, blended in toward the clean sample: t × the first + (1 − t) × this one; none = the first "
        "alone",
        choices=LOG_SNR_SCHEDULES,
    )
    log_snr_steps: int = option(
        0, "number of evenly spaced training times; 0 = continuous time", least=0, most=MAX_STEPS
    )
    squeeze_log_snr: bool = option(
        False,
        "squeeze α² of the schedules cosine and sqrt into [0.0001, 0.9999], instead of clamping it",
    )
    shift: float = option(
        1.0,
        "α/σ is divided by this, within the limits of the schedule: above 1 = more noise, for larger images; in "
        "training and sampling (which may shift further)",
        above=0,
    )
    sampling_schedule: str | None = option(
        None,
        "schedule of the sampling steps; none = as in training, except for edm_train (edm) and adaptive (cosine)",
        choices=LOG_SNR_SCHEDULES,
    )
    scaler: str = option(
        "vp",
        "x_t = a x_start + b noise with a² + b² = 1 (vp, variance preserving), or a + b = 1 (lerp)",
        choices=SCALERS,
    )
    prediction: str = option(
        "eps",
        "prediction type of the network: flow is noise − x_start, and requires the scaler lerp",
        choices=TARGETS,
    )
    noise_condition: str = option(
        "cosine",
        "noise level as input to the network: time on the schedule cosine or stable_diffusion (0 = clean), share of "
        "x_start (rectified_flow), share of noise × 1,000 (flow_steps), sigmoid(−log-SNR), log(σ)/4 (edm), log_snr "
        "itself, or sigma = σ/α",
        choices=NOISE_CONDITIONS,
    )
    noise_condition_steps: int = option(
        0,
        "number of levels to round the noise condition down to, the lowest clean; 0 = continuous",
        least=2,
        besides=(0,),
        most=MAX_STEPS,
    )
    sigma_data: float = option(
        1.0, "standard deviation of the data, the unit of sigma", needs=("noise_condition", "sigma"), above=0
    )
    loss_weighting: tuple[str, ...] = option(
        ("p2",),
        "weights of the squared error by signal-to-noise ratio, multiplied; /NAME divides by one. adaptive = 1 / the "
        "running loss at this log-SNR",
        choices=(*_WEIGHTS, *(_OVER + name for name in _WEIGHTS)),
    )
    p2_k: float = option(
        P2_K, "p2: k in the weight 1 / (k + SNR^s)^gamma", needs=("loss_weighting", "p2", _OVER + "p2"), above=0
    )
    p2_gamma: float = option(
        P2_GAMMA, "p2: gamma in the weight 1 / (k + SNR^s)^gamma", needs=("loss_weighting", "p2", _OVER + "p2"), least=0
    )
    p2_s: float = option(1.0, "p2: s in the weight 1 / (k + SNR^s)^gamma", needs=("loss_weighting", "p2", _OVER + "p2"))
    min_snr_gamma: float = option(
        MIN_SNR_GAMMA,
        "min_snr, min_snr_plus_one: largest weight",
        needs=("loss_weighting", *(over + name for over in ("", _OVER) for name in ("min_snr", "min_snr_plus_one"))),
        above=0,
    )
    sigmoid_s: float = option(
        1.0,
        "sigmoid: s in the weight sigmoid(s × log-SNR)",
        needs=("loss_weighting", "sigmoid", _OVER + "sigmoid"),
    )
    loss_shift: float = option(1.0, "α/σ is multiplied by this before weighting", above=0)
    loss_weight_limits: tuple[float, ...] = option((1e-7, 1e7), "smallest and largest weight of the error, LOW,HIGH")
    loss_space: str | None = option(
        None,
        "quantity whose error is weighted, converted from that of the network's prediction; none = the prediction",
        choices=TARGETS,
    )
    loss_space_limit: float = option(
        0.05,
        "lower limit of σ (prediction x_start) or α (eps), by which the conversion to loss_space divides the error",
        needs=("loss_space",),
        least=0,
    )
    offset_noise: float = option(
        0.0, "standard deviation of a constant added to the noise of each channel in training; 0 = none", least=0
    )
    pyramid_noise: float = option(
        0.0,
        "pyramid noise in training: amplitude of each octave relative to the one above; 0 = white noise",
        least=0,
    )

    def faults(self) -> Iterator[Fault]:
        if self.prediction == "flow" and self.scaler != "lerp":
            rule = f"{named('scaler')} is {self.scaler}, of which it does not determine x_start"
            yield Fault.of(self, "prediction", f"{rule}: set {named('scaler')} to lerp, or this to v")
        if self.log_snr_schedule == ADAPTIVE and (self.log_snr_interpolation or self.log_snr_steps):
            rule = "is adaptive, a distribution, which cannot be interpolated or limited to steps"
            remedy = f"leave out {named('log_snr_interpolation')} and {named('log_snr_steps')}"
            yield Fault("log_snr_schedule", f"{rule}: {remedy}")
        used = {self.log_snr_schedule, self.log_snr_interpolation, self.sampling_schedule}
        if self.squeeze_log_snr and not used & {*SQUEEZED}:
            schedules = f"{' and '.join(SQUEEZED)} have it, not {self.log_snr_schedule}"
            yield Fault.of(self, "squeeze_log_snr", f"only {schedules}: leave it out")
        ends = self.loss_weight_limits
        if len(ends) != 2 or not 0 <= ends[0] < ends[1]:
            yield Fault.of(self, "loss_weight_limits", "must be LOW,HIGH with 0 <= LOW < HIGH")

    @staticmethod
    def earlier(recorded: Mapping) -> Mapping:
        """flow was called rectified_flow."""
        return {**recorded, **{name: "flow" for name in _FLOWS if recorded.get(name) == "rectified_flow"}}

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

    def weights(self, adaptive: LossWeight) -> list[tuple[LossWeight, bool]]:
        """The weights of ``loss_weighting``, and whether each divides."""
        table: dict[str, LossWeight] = {
            **LOSS_WEIGHTS,
            "p2": functools.partial(p2_weight, k=self.p2_k, gamma=self.p2_gamma, s=self.p2_s),
            "min_snr": functools.partial(min_snr_weight, gamma=self.min_snr_gamma),
            "min_snr_plus_one": functools.partial(min_snr_plus_one_weight, gamma=self.min_snr_gamma),
            "sigmoid": functools.partial(sigmoid_weight, s=self.sigmoid_s),
            ADAPTIVE: adaptive,
        }
        return [(table[name.removeprefix(_OVER)], name.startswith(_OVER)) for name in self.loss_weighting]
