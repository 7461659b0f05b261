"""p: estimates of x_start and x_{t-1} from a network's output, by prediction type and variance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..config import InputError
from .forward_process import ForwardProcess, at_least_float32
from .parametrization import ModelMeanType, ModelVarType
from .samplers import Denoise, Model, Prediction

_LEAST_SIGNAL = 1e-20  # ᾱ below which all levels are the same noise


class ReverseProcess(ForwardProcess):
    """A diffusion process and the interpretation of a network's output (Ho et al. 2020; Nichol & Dhariwal 2021).

    A model is called as ``model(x [N, C, …], t [N], **model_kwargs)`` and returns [N, C, …], or [N, 2C, …] when the
    variance is learned. With 16-bit outputs, everything after the network is float32.

    betas:             [T], each in (0, 1].
    rescale_timesteps: scale the model's timesteps to 0–1000 (float), whatever T is.
    constrain_variance: keep a variance of LEARNED_RANGE within its range, by a sigmoid of the fraction.
    """

    def __init__(
        self,
        betas,
        model_mean_type: ModelMeanType,
        model_var_type: ModelVarType,
        rescale_timesteps: bool = False,
        constrain_variance: bool = False,
    ):
        super().__init__(betas)
        self.constrain_variance = constrain_variance
        self.model_mean_type = model_mean_type
        self.model_var_type = model_var_type
        self.rescale_timesteps = rescale_timesteps

    def _scale_timesteps(self, t: Tensor) -> Tensor:
        """Steps t of this process as the model's time input."""
        return t.float() * (1000.0 / self.num_timesteps) if self.rescale_timesteps else t

    def _read(self, model_output: Tensor, x: Tensor, t: Tensor | int, clip_denoised, denoised_fn) -> dict[str, Any]:
        """A model's output → the result of ``p_mean_variance``. An int t gives a fixed variance as floats."""
        output, var_values = self._split(model_output, x)
        variance, log_variance = self._variance(var_values, x, t)
        x_start = self._x_start(output, x, t)
        if denoised_fn is not None:
            x_start = denoised_fn(x_start)
        if clip_denoised:
            x_start = x_start.clamp(-1, 1)
        mean = output if self.model_mean_type == ModelMeanType.PREVIOUS_X else self.posterior_mean(x_start, x, t)
        return {"mean": mean, "variance": variance, "log_variance": log_variance, "pred_xstart": x_start}

    def _split(self, model_output: Tensor, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Mean and variance channels, at least float32.

        Half precision ends here: the following coefficients exceed its range, and sums over pixels its digits.
        """
        channels = x.shape[1]
        learned = self.model_var_type.is_learned
        expected = (x.shape[0], channels * (2 if learned else 1), *x.shape[2:])
        if model_output.shape != expected:
            raise InputError(
                f"the model returned shape {list(model_output.shape)}, but variance {self.model_var_type.name.lower()} "
                f"requires {list(expected)}"
            )
        output = at_least_float32(model_output)
        return (output[:, :channels], output[:, channels:]) if learned else (output, None)

    def _variance(self, var_values: Tensor | None, x: Tensor, t: Tensor | int) -> tuple[Tensor | float, Tensor | float]:
        """Variance and log-variance of x_{t-1} given x_t."""
        if self.model_var_type == ModelVarType.FIXED_SMALL:
            return self.at("posterior_variance", t, x), self.at("posterior_log_variance_clipped", t, x)
        if var_values is None:
            return self.at("fixed_large_variance", t, x), self.at("fixed_large_log_variance", t, x)
        if self.model_var_type == ModelVarType.LEARNED:
            return torch.exp(var_values), var_values
        fraction = (var_values + 1) / 2
        if self.constrain_variance:
            fraction = fraction.sigmoid()
        low, high = self.at("posterior_log_variance_clipped", t, x), self.at("log_betas", t, x)
        log_variance = fraction * high + (1 - fraction) * low
        return torch.exp(log_variance), log_variance

    def x_start(self, model_output: Tensor, x: Tensor, t: Tensor) -> Tensor:
        """x_start according to a network's output for x_t at the steps t [N], at least float32, not clipped."""
        return self._x_start(self._split(model_output, x)[0], x, t)

    def _x_start(self, output: Tensor, x: Tensor, t: Tensor | int) -> Tensor:
        """x_start from the network's prediction."""
        if self.model_mean_type == ModelMeanType.EPSILON:
            return self._predict_xstart_from_eps(x, t, output)
        if self.model_mean_type == ModelMeanType.VELOCITY:
            return self._predict_xstart_from_v(x, t, output)
        if self.model_mean_type == ModelMeanType.PREVIOUS_X:
            return self._predict_xstart_from_xprev(x, t, output)
        return output

    def p_mean_variance(
        self, model: Model, x: Tensor, t: Tensor, clip_denoised=True, denoised_fn=None, model_kwargs=None
    ) -> dict[str, Tensor]:
        """p(x_{t-1} | x_t): "mean", "variance", "log_variance" and "pred_xstart", each of x's shape.

        denoised_fn: applied to the expected x_start; then ``clip_denoised`` clamps it to [-1, 1].
        """
        output = model(self.model_input(x, t), self._scale_timesteps(t), **(model_kwargs or {}))
        return self._read(output, x, t, clip_denoised, denoised_fn)

    def predict(self, model_output: Tensor, x: Tensor, t: int, clip_denoised=True, denoised_fn=None) -> Prediction:
        """A model's output for a batch at one common step t, as samplers use it."""
        out = self._read(model_output, x, t, clip_denoised, denoised_fn)
        eps = self._predict_eps_from_xstart(x, t, out["pred_xstart"])
        return Prediction(out["pred_xstart"], eps, out["mean"], out["log_variance"], out["variance"])

    def truncated(self, count: int) -> ReverseProcess:
        """The process of the ``count`` least noisy steps, each with the same number and tables as here."""
        raise NotImplementedError

    def model_input(self, x: Tensor, t: Tensor | int) -> Tensor:
        """x_t of this process as the network was trained on it."""
        return x

    def nearest_step(self, alpha_bar: float) -> int:
        """The step whose noise level is nearest to ᾱ, by log-SNR; without any signal, the noisiest."""
        levels = np.append(self.alphas_cumprod, alpha_bar).clip(_LEAST_SIGNAL)
        log_snr = np.log(levels) - np.log1p(-levels)
        return int(np.abs(log_snr[:-1] - log_snr[-1]).argmin())

    def model_steps(self, x: Tensor, t: Tensor | int) -> Tensor:
        """[N] steps t of this process as the model's time input; t [N], or one int for all samples of x."""
        return self._scale_timesteps(torch.full((x.shape[0],), t, device=x.device) if isinstance(t, int) else t)

    def denoiser(
        self, model: Model, clip_denoised=True, denoised_fn=None, model_kwargs: Mapping | None = None
    ) -> Denoise:
        """The model as the ``denoise(x, t) -> Prediction`` that samplers call."""
        kwargs = model_kwargs or {}

        def denoise(x: Tensor, t: int) -> Prediction:
            output = model(self.model_input(x, t), self.model_steps(x, t), **kwargs)
            return self.predict(output, x, t, clip_denoised, denoised_fn)

        return denoise
