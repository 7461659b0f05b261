"""A Gaussian process in continuous time t in [0, 1], defined by its log signal-to-noise ratio (Kingma et al. 2021).

Everything is a function of log-SNR: a schedule gives it at a time, and from it follow x_t, what the network is told,
and the weight of the error (log_snr_schedules.py, parametrization.py, losses.py). Noise for training is white, with an
offset per channel, or with large spots (pyramid noise).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..config import Fault, InputError, named
from .adaptive import ADAPTIVE, Adaptive, AdaptiveSchedule, AdaptiveWeight
from .log_snr_config import LogSnrConfig
from .log_snr_schedules import LogSnrSchedule, discrete, discretized, interpolated
from .losses import Loss, mean_error
from .parametrization import PREDICTIONS, SCALERS, TARGETS, LossType, ModelMeanType, ModelVarType
from .process import Process, at_least_float32
from .samplers import Model
from .spacing import LEVEL_SPACINGS, TIME_SPACINGS

#: (purpose, shape of a sample) → standard normal numbers [N, *shape], the same for the same purpose: ``Draw.normal``.
Normal = Callable[[str, Sequence[int]], Tensor]

PYRAMID_OCTAVES = 9
PYRAMID_SIDE = 16  # largest height and width of an octave
LEAST_TIME = 0.001  # in training
_BISECTIONS = 53  # the digits of a double
_DISTRIBUTIONS = {"edm_train": "edm", ADAPTIVE: "cosine"}  # schedules to train on → to sample with


class LogSnrProcess:
    """Training in continuous time; ``steps`` gives the discrete process to sample with.

    config: its settings; None = the defaults. loss: the error of a prediction.

    x_t = a x_start + b noise with any scaler; the network sees it as it is, and the noise condition as its time input.
    What is adaptive is state, which a task feeds and saves: see ``observes``.
    """

    def __init__(self, config: LogSnrConfig | None = None, loss: Loss = LossType.MSE):
        config = self.config = LogSnrConfig() if config is None else config
        self.loss = loss
        self._scaler, self._target = SCALERS[config.scaler], TARGETS[config.prediction]
        self._adaptive: dict[str, Adaptive] = {}
        self._schedule = self._sampling_schedule = _Limited(self._training_schedule())
        sampled = config.sampling_schedule or _DISTRIBUTIONS.get(config.log_snr_schedule)
        if sampled is not None:
            self._sampling_schedule = _Limited(config.schedule(sampled))
        adaptive = AdaptiveWeight()
        self._weights = config.weights(adaptive)
        if any(weight is adaptive for weight, _ in self._weights):
            self._adaptive["adaptive_weight"] = adaptive
        self._condition = config.condition()
        if config.noise_condition_steps:
            noisy, clean = self._condition(torch.tensor(self._schedule.limits, dtype=torch.float64)).tolist()
            self._condition = discrete(self._condition, config.noise_condition_steps, clean, noisy)

    def _training_schedule(self) -> LogSnrSchedule:
        config = self.config
        if config.log_snr_schedule == ADAPTIVE:
            self._adaptive["adaptive_schedule"] = schedule = AdaptiveSchedule()
            return schedule
        first = config.schedule(config.log_snr_schedule)
        if config.log_snr_interpolation is not None:
            first = interpolated(first, config.schedule(config.log_snr_interpolation))
        return discretized(first, config.log_snr_steps) if config.log_snr_steps else first

    # ------------------------------------------------------------------------------------------------------ training

    duration = 1.0  # in the unit of times

    def at_fraction(self, fraction: Tensor) -> Tensor:
        """Fractions [N] of the process, 0 = clean and 1 = noise → the times t [N] there: the same."""
        return fraction

    def training_times(self, u: Tensor) -> Tensor:
        """u [N], uniform in [0, 1) → times t [N] to train at: at least .001, except with a schedule that is itself a
        distribution."""
        least = 0.0 if self.config.log_snr_schedule in _DISTRIBUTIONS else LEAST_TIME
        return (1 + least - u).clamp(max=1)

    def log_snr(self, t: Tensor) -> Tensor:
        """log(a²/b²) at the times t [N] in [0, 1], float64 (float32 on devices without float64)."""
        t = t if t.device.type == "mps" else t.double()
        return self._schedule(t, self.config.log_shift)

    def condition(self, log_snr: Tensor) -> Tensor:
        """[N] float32, the network's time input at log_snr [N]."""
        return self._condition(log_snr).float()

    def loss_weight(self, log_snr: Tensor) -> Tensor:
        """[N] float32, the weight of the error at log_snr [N]."""
        product = self._conversion(log_snr).square()
        log_snr = log_snr + 2 * math.log(self.config.loss_shift)
        for weight, divides in self._weights:
            product = product / weight(log_snr) if divides else product * weight(log_snr)
        low, high = self.config.loss_weight_limits
        return product.clamp(low, high).float()

    def _conversion(self, log_snr: Tensor) -> Tensor:
        """[N], by which an error of the prediction becomes one of ``loss_space``."""
        space, prediction = self.config.loss_space, self.config.prediction
        if space in (None, prediction):
            return torch.ones_like(log_snr)
        a, b = self._scaler(log_snr)
        return TARGETS[space].size(a, b) / self._target.size(a, b).clamp(min=self.config.loss_space_limit)

    def scales(self, log_snr: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """a and b at log_snr [N], [N, 1, …] in x's precision, at least float32."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        a, b = self._scaler(log_snr.view(-1, *[1] * (x.dim() - 1)))
        return a.to(dtype), b.to(dtype)

    def noise(self, normal: Normal, shape: Sequence[int]) -> Tensor:
        """[N, *shape] noise to train on, with ``offset_noise`` (Guttenberg 2023), which trains brightness and adds its
        square to the variance, and ``pyramid_noise``.

        normal: where all random numbers come from. shape: [C, …] of a sample.
        """
        factor = self.config.pyramid_noise
        noise = pyramid_noise(normal, shape, factor) if factor else normal("noise", shape)
        if self.config.offset_noise:
            constant = normal("offset noise", shape[:1])
            noise = noise + self.config.offset_noise * constant.view(*constant.shape, *[1] * (len(shape) - 1))
        return noise

    def _own_noise(self, x_start: Tensor) -> Tensor:
        """From torch's own generator."""

        def normal(purpose: str, shape) -> Tensor:
            dtype = torch.promote_types(x_start.dtype, torch.float32)
            return torch.randn(len(x_start), *shape, dtype=dtype, device=x_start.device)

        return self.noise(normal, x_start.shape[1:])

    def q_sample(self, x_start: Tensor, t: Tensor, noise: Tensor | None = None) -> Tensor:
        """x_t = a x_start + b noise at the times t [N]. ``noise`` defaults to that of ``noise``, from torch's own
        generator."""
        noise = self._own_noise(x_start) if noise is None else noise
        a, b = self.scales(self.log_snr(t), x_start)
        return a * x_start + b * noise

    def target(self, x_start: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        """The training target at the times t [N], of x_start's shape."""
        return self._target.make(x_start, noise, *self.scales(self.log_snr(t), x_start))

    def undiffuse(self, x_t: Tensor, t: Tensor, output: Tensor) -> tuple[Tensor, Tensor]:
        """x_start and noise according to a network's output for x_t at the times t [N]."""
        return self._target.read(x_t, at_least_float32(output), *self.scales(self.log_snr(t), x_t))

    def x_start(self, model_output: Tensor, x_t: Tensor, t: Tensor) -> Tensor:
        """``undiffuse``'s x_start."""
        return self.undiffuse(x_t, t, model_output)[0]

    def training_losses(
        self,
        model: Model,
        x_start: Tensor,
        t: Tensor,
        model_kwargs: Mapping | None = None,
        noise: Tensor | None = None,
        target: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """ "mse" [N], the mean squared error of the network's prediction, or another error as in
        ``GaussianDiffusion.training_losses``, and "loss", the same weighted; at least float32.

        t: [N] float in [0, 1], as from ``training_times``. noise: as for ``q_sample``. target: what the prediction is
        compared with; None = ``target`` of x_start and noise.
        """
        noise = self._own_noise(x_start) if noise is None else noise
        output = self.output(model, self.q_sample(x_start, t, noise), t, model_kwargs)
        target = self.target(x_start, t, noise) if target is None else target
        name, error = mean_error(self.loss, output, target)
        return {"loss": error * self.loss_weight(self.log_snr(t)), name: error}

    def output(self, model: Model, x_t: Tensor, t: Tensor, model_kwargs: Mapping | None = None) -> Tensor:
        """What a network predicts of ``target`` at the times t [N], at least float32. InputError for another shape."""
        output = at_least_float32(model(x_t, self.condition(self.log_snr(t)), **(model_kwargs or {})))
        if output.shape != x_t.shape:
            raise InputError(f"the model returned shape {list(output.shape)}, but x_t has shape {list(x_t.shape)}")
        return output

    # --------------------------------------------------------------------------------------------------------- state

    @property
    def observes(self) -> bool:
        """Whether a task must pass every step's losses to ``observe``, and save ``state_dict``."""
        return bool(self._adaptive)

    def observe(self, log_snr: Tensor, mse: Tensor) -> None:
        """Take the errors [N] at log_snr [N] into account: of a whole step, all ranks, in order of position."""
        for each in self._adaptive.values():
            each.update(log_snr, mse)

    def state_dict(self) -> dict[str, Tensor]:
        """The state to save for resuming; empty if nothing is adaptive."""
        return {name: each.state() for name, each in self._adaptive.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the result of ``state_dict`` of the same settings."""
        for name, each in self._adaptive.items():
            each.load(state[name])

    # ------------------------------------------------------------------------------------------------------ sampling

    def steps(
        self,
        count: int,
        shift: float = 1.0,
        t_start: float = 1.0,
        t_end: float = 0.0,
        spacing: str = "even",
        variance: ModelVarType = ModelVarType.FIXED_SMALL,
    ) -> LogSnrSteps:
        """``count`` sampling steps: the first ``count`` of count + 1 evenly spaced times from t_start to t_end.

        The last step ends at the clean sample. Of times with the same log-SNR, where a schedule is limited, one stays.

        shift:   multiplies that of the process.
        spacing: of TIME_SPACINGS; those other than even place ``count`` levels from that of t_start to that of t_end.
        variance: one of the fixed ones.

        Raises InputError for fewer than 1 step, and unless 0 <= t_end < t_start <= 1 and shift > 0.
        """
        if count < 1:
            raise InputError(Fault("steps", "must be at least 1", count))
        if not 0 <= t_end < t_start <= 1:
            raise InputError(
                f"{named('t_start')} and {named('t_end')} are {t_start:g} and {t_end:g}, but must have "
                "0 <= t_end < t_start <= 1"
            )
        if shift <= 0:
            raise InputError(Fault("shift", "must be above 0", shift))
        if spacing not in TIME_SPACINGS:
            known = f"set it to one of {', '.join(TIME_SPACINGS)}"
            rule = f"is {spacing}, but a process in log-SNR has no steps of training to count: {known}"
            raise InputError(Fault("spacing", rule))

        def schedule(t: np.ndarray) -> np.ndarray:
            shifted = self._sampling_schedule(torch.from_numpy(t), self.config.log_shift + 2 * math.log(shift))
            return shifted.numpy()

        if spacing == "even":
            times = t_end + (t_start - t_end) * np.arange(1, count + 1) / count
            log_snr = schedule(times)
        else:
            noisy, clean = schedule(np.array([t_start, t_end])) / 2
            log_snr = 2 * LEVEL_SPACINGS[spacing](noisy, clean, count)[::-1]
            times = _times_of(schedule, log_snr, t_end, t_start)
        noisier = np.diff(torch.sigmoid(torch.from_numpy(log_snr)).numpy(), prepend=1.0) < 0
        return LogSnrSteps(self, times[noisier], log_snr[noisier], variance)

    @property
    def noisiest(self) -> LogSnrSteps:
        """A process whose last step is at the end of this one."""
        return self.steps(1)


def pyramid_noise(normal: Normal, shape: Sequence[int], factor: float) -> Tensor:
    """[N, C, H, W] of unit variance: white noise, and ``factor``^i times noise of 2^i times lower resolution for
    i = 1 … 9, each enlarged without smoothing.

    Octaves higher or wider than 16 are left out; the last one has a single position. Raises InputError for samples that
    are not [C, H, W].
    """
    if len(shape) != 3:
        raise InputError(f"pyramid_noise is {factor:g}, but samples of shape {list(shape)} have no height and width")
    channels, height, width = shape
    noise, variance = normal("noise", shape), 1.0
    for i in range(1, PYRAMID_OCTAVES + 1):
        small = max(height >> i, 1), max(width >> i, 1)
        if max(small) <= PYRAMID_SIDE:
            octave = normal(f"pyramid noise {i}", (channels, *small))
            noise = noise + factor**i * F.interpolate(octave, size=(height, width), mode="nearest")
            variance += factor ** (2 * i)
        if small == (1, 1):
            break
    return noise / math.sqrt(variance)


def _times_of(schedule: Callable[[np.ndarray], np.ndarray], log_snr: np.ndarray, low: float, high: float) -> np.ndarray:
    """The times in [low, high] at which a schedule, which falls, has these values, by bisection."""
    before, after = np.full_like(log_snr, low), np.full_like(log_snr, high)
    for _ in range(_BISECTIONS):
        middle = (before + after) / 2
        later = schedule(middle) > log_snr
        before, after = np.where(later, middle, before), np.where(later, after, middle)
    return after


class _Limited:
    """A schedule that can be shifted, within the ``limits`` that it has at t = 1 and t = 0."""

    def __init__(self, schedule: LogSnrSchedule):
        self._schedule = schedule
        self.limits = schedule(torch.tensor([1.0, 0.0], dtype=torch.float64)).tolist()

    def __call__(self, t: Tensor, log_shift: float) -> Tensor:
        """[N] log-SNR at t [N], less ``log_shift``."""
        return (self._schedule(t) - log_shift).clamp(*self.limits)


class LogSnrSteps(Process):
    """The discrete process between some times of a ``LogSnrProcess``.

    It is variance preserving, as samplers, guidance and editing require. With a scaler that is not, x_t differs from
    the network's by the factor sqrt(a² + b²) alone: ``model_input`` multiplies by it, and the network's output is read
    with a and b.

    times:   [T] float64, increasing, in (0, 1].
    log_snr: [T] float64, strictly decreasing, at these times.
    variance: one of the fixed ones.
    """

    def __init__(
        self,
        process: LogSnrProcess,
        times: np.ndarray,
        log_snr: np.ndarray,
        variance: ModelVarType = ModelVarType.FIXED_SMALL,
    ):
        self._process, self.times, self._log_snr = process, times, log_snr
        levels = torch.from_numpy(log_snr)
        alphas_cumprod = torch.sigmoid(levels).numpy()
        betas = 1 - alphas_cumprod / np.append(1.0, alphas_cumprod[:-1])
        # A flow is a velocity too; _x_start reads it.
        mean_type = PREDICTIONS.get(process.config.prediction, ModelMeanType.VELOCITY)
        super().__init__(betas, mean_type, variance)
        a, b = SCALERS[process.config.scaler](levels)
        self.signal_scale, self.noise_scale, self.input_scale = a.numpy(), b.numpy(), torch.hypot(a, b).numpy()
        self.time_inputs = process.condition(levels).numpy()

    def fraction(self, t: int) -> float:
        """Just below the time of step t: like a discrete process, whose step t ends at (t + 1) / T, in infinitely many
        steps."""
        return math.nextafter(self.times[t], 0.0)

    def truncated(self, count: int) -> LogSnrSteps:
        return LogSnrSteps(self._process, self.times[:count], self._log_snr[:count], self.model_var_type)

    def model_input(self, x: Tensor, t: Tensor | int) -> Tensor:
        return x * self.at("input_scale", t, x)

    def _scale_timesteps(self, t: Tensor) -> Tensor:
        return self._table("time_inputs", t.device)[t]

    def _x_start(self, output: Tensor, x: Tensor, t: Tensor | int) -> Tensor:
        a, b = self.at("signal_scale", t, x), self.at("noise_scale", t, x)
        return TARGETS[self._process.config.prediction].read(self.model_input(x, t), output, a, b)[0]
