"""A Gaussian process in continuous time t in [0, 1], defined by its log signal-to-noise ratio (Kingma et al. 2021).

x_t = α x_start + σ noise with α² = sigmoid(log-SNR) and σ² = sigmoid(−log-SNR). The network's time input is t itself.
A new schedule is one function ``t → log-SNR`` and one line in LOG_SNR_SCHEDULES.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from ..config import lookup
from ..errors import InputError
from .forward_process import at_least_float32
from .losses import mean_flat
from .parametrization import ModelMeanType, ModelVarType
from .process import Model
from .reverse_process import ReverseProcess

LogSnrSchedule = Callable[[Tensor], Tensor]
_COSINE_OFFSET = 0.008  # s in Nichol & Dhariwal 2021, equation 17
_MIN_ALPHA_BAR = 1e-4  # and 1 − it the maximum: log-SNR within ±9.21, so that both ends stay finite


def cosine_log_snr(t: Tensor) -> Tensor:
    """α² as a squared cosine (Nichol & Dhariwal 2021, equation 17), limited to [1e-4, 1 − 1e-4]."""
    start = math.cos(_COSINE_OFFSET / (1 + _COSINE_OFFSET) * math.pi / 2) ** 2
    alpha_bar = torch.cos((t + _COSINE_OFFSET) / (1 + _COSINE_OFFSET) * (math.pi / 2)).square() / start
    return torch.logit(alpha_bar.clamp(_MIN_ALPHA_BAR, 1 - _MIN_ALPHA_BAR))


LOG_SNR_SCHEDULES: dict[str, LogSnrSchedule] = {"cosine": cosine_log_snr}


class LogSnrProcess:
    """Training in continuous time; ``steps`` gives the discrete process to sample with.

    schedule:        of LOG_SNR_SCHEDULES.
    model_mean_type: the network's prediction; PREVIOUS_X, which has no meaning in continuous time, raises InputError.
    """

    def __init__(self, schedule: str = "cosine", model_mean_type: ModelMeanType = ModelMeanType.EPSILON):
        self._schedule = lookup(LOG_SNR_SCHEDULES, schedule, "log_snr_schedule")
        self.model_mean_type = model_mean_type
        if model_mean_type is ModelMeanType.PREVIOUS_X:
            raise InputError("prediction is previous_x, but must be eps, x_start or v in continuous time")

    def log_snr(self, t: Tensor) -> Tensor:
        """log(α²/σ²) at the times t [N] in [0, 1], float64 (float32 on devices without float64)."""
        return self._schedule(t if t.device.type == "mps" else t.double())

    def alpha_sigma(self, t: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """α and σ at t [N], [N, 1, …] in x's precision, at least float32."""
        log_snr = self.log_snr(t).view(-1, *[1] * (x.dim() - 1))
        dtype = torch.promote_types(x.dtype, torch.float32)
        return torch.sigmoid(log_snr).sqrt().to(dtype), torch.sigmoid(-log_snr).sqrt().to(dtype)

    def q_sample(self, x_start: Tensor, t: Tensor, noise: Tensor | None = None) -> Tensor:
        """x_t = α x_start + σ noise at the times t [N]. ``noise`` defaults to ``torch.randn_like``."""
        noise = torch.randn_like(x_start) if noise is None else noise
        alpha, sigma = self.alpha_sigma(t, x_start)
        return alpha * x_start + sigma * noise

    def target(self, x_start: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        """The training target at the times t [N]: noise, x_start, or v = α noise − σ x_start."""
        if self.model_mean_type is ModelMeanType.EPSILON:
            return noise
        if self.model_mean_type is ModelMeanType.START_X:
            return x_start
        alpha, sigma = self.alpha_sigma(t, x_start)
        return alpha * noise - sigma * x_start

    def training_losses(
        self,
        model: Model,
        x_start: Tensor,
        t: Tensor,
        model_kwargs: Mapping | None = None,
        noise: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """ "loss" and "mse" [N], at least float32: the mean squared error of the network's prediction.

        t: [N] float in [0, 1], given to the model as float32.
        """
        noise = torch.randn_like(x_start) if noise is None else noise
        output = at_least_float32(model(self.q_sample(x_start, t, noise), t.float(), **(model_kwargs or {})))
        if output.shape != x_start.shape:
            raise InputError(
                f"the model returned shape {list(output.shape)}, but x_start has shape {list(x_start.shape)}"
            )
        mse = mean_flat((self.target(x_start, t, noise) - output) ** 2)
        return {"loss": mse, "mse": mse}

    def steps(self, count: int) -> LogSnrSteps:
        """``count`` sampling steps, evenly spaced in time from t = 1 down to 1 / count; the last one ends at the clean
        sample. Of times with the same log-SNR, where a schedule is limited, one remains.

        Raises InputError for fewer than 1.
        """
        if count < 1:
            raise InputError(f"timestep_respacing is {count}, but must be at least 1")
        times = np.arange(1, count + 1) / count
        alphas_cumprod = torch.sigmoid(self.log_snr(torch.from_numpy(times))).numpy()
        noisier = np.diff(alphas_cumprod, prepend=1.0) < 0
        return LogSnrSteps(times[noisier], alphas_cumprod[noisier], self.model_mean_type)


class LogSnrSteps(ReverseProcess):
    """The discrete process between some times of a ``LogSnrProcess``, with the small fixed variance.

    times:          [T] float64, increasing, in (0, 1]; the model's time input.
    alphas_cumprod: [T] float64, α² at these times.
    """

    def __init__(self, times: np.ndarray, alphas_cumprod: np.ndarray, model_mean_type: ModelMeanType):
        betas = 1 - alphas_cumprod / np.append(1.0, alphas_cumprod[:-1])
        super().__init__(betas, model_mean_type, ModelVarType.FIXED_SMALL)
        self.times, self._levels = times, alphas_cumprod

    def fraction(self, t: int) -> float:
        """Just below the time of step t: like a discrete process, whose step t ends at (t + 1) / T, in infinitely many
        steps."""
        return math.nextafter(self.times[t], 0.0)

    def truncated(self, count: int) -> LogSnrSteps:
        """The process of the ``count`` least noisy of these steps, each with the same number and tables as here."""
        return LogSnrSteps(self.times[:count], self._levels[:count], self.model_mean_type)

    def _scale_timesteps(self, t: Tensor) -> Tensor:
        return self._table("times", t.device, torch.float32)[t]
