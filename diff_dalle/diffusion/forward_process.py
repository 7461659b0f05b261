"""q: the forward noising process, and the conversions between x_start, eps, v and x_{t-1}."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..batch import moved
from ..config import InputError

# Replaces 1/sqrt(ᾱ) where ᾱ = 0 (a last beta of exactly 1), so that no table contains an infinity.
_NO_SIGNAL = 1e10


def at_least_float32(x: Tensor) -> Tensor:
    """x converted to float32 if it is in half precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class ForwardProcess:
    """q(x_t | x_start) and q(x_{t-1} | x_t, x_start) of a Gaussian process (Ho et al. 2020, section 2).

    t counts from 0, the first noising step, to ``num_timesteps`` - 1. The tables are float64 numpy arrays [T] under
    Guided-Diffusion's names; ``at`` looks them up.

    betas: [T], each in (0, 1], else InputError.
    """

    def __init__(self, betas):
        betas = np.array(betas, dtype=np.float64)
        if betas.ndim != 1 or not len(betas) or not ((betas > 0) & (betas <= 1)).all():
            raise InputError("betas must be a list of numbers above 0 and at most 1, one for each step")
        self.betas = betas
        self.num_timesteps = len(betas)
        alphas = 1.0 - betas
        self.alphas_cumprod = np.cumprod(alphas)
        self.alphas_cumprod_prev = np.append(1.0, self.alphas_cumprod[:-1])
        self.alphas_cumprod_next = np.append(self.alphas_cumprod[1:], 0.0)

        # q(x_t | x_start), equation 4
        self.sqrt_alphas_cumprod = np.sqrt(self.alphas_cumprod)
        self.one_minus_alphas_cumprod = 1.0 - self.alphas_cumprod
        self.sqrt_one_minus_alphas_cumprod = np.sqrt(self.one_minus_alphas_cumprod)
        self.log_one_minus_alphas_cumprod = np.log(self.one_minus_alphas_cumprod)
        has_signal = self.alphas_cumprod > 0
        with np.errstate(divide="ignore"):
            recip = 1.0 / self.alphas_cumprod
        self.sqrt_recip_alphas_cumprod = np.where(has_signal, np.sqrt(recip), _NO_SIGNAL)
        self.sqrt_recipm1_alphas_cumprod = np.where(has_signal, np.sqrt(recip - 1), _NO_SIGNAL)

        # q(x_{t-1} | x_t, x_start), equations 6 and 7
        self.posterior_variance = betas * (1.0 - self.alphas_cumprod_prev) / self.one_minus_alphas_cumprod
        self.posterior_mean_coef1 = betas * np.sqrt(self.alphas_cumprod_prev) / self.one_minus_alphas_cumprod
        self.posterior_mean_coef2 = (1.0 - self.alphas_cumprod_prev) * np.sqrt(alphas) / self.one_minus_alphas_cumprod
        # The posterior variance is 0 at t = 0, where a sampler adds no noise but a likelihood needs a scale: the one
        # of t = 1, as in Guided-Diffusion; a process of one step has only its beta.
        first = self.posterior_variance[1:2] if self.num_timesteps > 1 else betas
        self.posterior_log_variance_clipped = np.log(np.append(first, self.posterior_variance[1:]))
        self.fixed_large_variance = np.append(first, betas[1:])
        self.fixed_large_log_variance = np.log(self.fixed_large_variance)
        self.log_betas = np.log(betas)

        # x_start from eps and from x_{t-1}. Without any signal, eps says nothing about x_start: 0 (gray).
        self.xstart_from_x = np.where(has_signal, self.sqrt_recip_alphas_cumprod, 0.0)
        self.xstart_from_eps = np.where(has_signal, self.sqrt_recipm1_alphas_cumprod, 0.0)
        self.xstart_from_xprev = 1.0 / self.posterior_mean_coef1
        self.xstart_from_xprev_x = self.posterior_mean_coef2 / self.posterior_mean_coef1

        self._on_device: dict[torch.device, dict[str, Tensor]] = {}

    @property
    def snr(self) -> np.ndarray:
        """[T] signal-to-noise ratio ᾱ / (1 − ᾱ)."""
        return self.alphas_cumprod / self.one_minus_alphas_cumprod

    def log_snr(self, t: Tensor) -> Tensor:
        """[N] float32, the logarithm of ``snr`` at the steps t [N]."""
        alpha_bar = self._table("alphas_cumprod", t.device)[t]
        return alpha_bar.log() - self._table("log_one_minus_alphas_cumprod", t.device)[t]

    @property
    def duration(self) -> float:
        """In the unit of t."""
        return self.num_timesteps

    def at_fraction(self, fraction: Tensor) -> Tensor:
        """Fractions [N] of the process, 0 = the first step and 1 = noise → the steps t [N] int64 there."""
        return (fraction * self.num_timesteps).long().clamp(max=self.num_timesteps - 1)  # float32 may round up to T

    def fraction(self, t: int) -> float:
        """The position of step t in the original process: 0 for its first step, just below 1 for its last."""
        return t / self.num_timesteps

    def at(self, table: str, t: Tensor | int, x: Tensor) -> Any:
        """The values of a table, given by attribute name, at t, for arithmetic with x.

        t [N] int64 on x's device → float32 expanded to x's shape; one int t for all samples → a float. Neither waits
        for the device.
        """
        if isinstance(t, int):
            return float(getattr(self, table)[t])
        return self._table(table, t.device)[t].view(-1, *[1] * (x.dim() - 1)).expand(x.shape)

    def _table(self, table: str, device: torch.device) -> Tensor:
        """A table's copy on a device, cached: [T] float32, or int64 of integers."""
        if device not in self._on_device:
            tables = {name: torch.tensor(v) for name, v in vars(self).items() if isinstance(v, np.ndarray | list)}
            narrow = {name: values.float() if values.is_floating_point() else values for name, values in tables.items()}
            self._on_device[device] = moved(narrow, device)
        return self._on_device[device][table]

    def q_mean_variance(self, x_start: Tensor, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Mean, variance and log-variance of q(x_t | x_start), each of x_start's shape."""
        mean = self.at("sqrt_alphas_cumprod", t, x_start) * x_start
        variance = self.at("one_minus_alphas_cumprod", t, x_start)
        return mean, variance, self.at("log_one_minus_alphas_cumprod", t, x_start)

    def q_sample(self, x_start: Tensor, t: Tensor | int, noise: Tensor | None = None) -> Tensor:
        """x_t = sqrt(ᾱ) x_start + sqrt(1 − ᾱ) noise. ``noise`` defaults to ``torch.randn_like``."""
        noise = torch.randn_like(x_start) if noise is None else noise
        if noise.shape != x_start.shape:
            raise InputError(f"noise has shape {list(noise.shape)}, but x_start {list(x_start.shape)}")
        signal, noisy = (self.at(name, t, x_start) for name in ("sqrt_alphas_cumprod", "sqrt_one_minus_alphas_cumprod"))
        return signal * x_start + noisy * noise

    def q_posterior_mean_variance(self, x_start: Tensor, x_t: Tensor, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Mean, variance and clipped log-variance of q(x_{t-1} | x_t, x_start), each of x_t's shape."""
        variance = self.at("posterior_variance", t, x_t)
        return self.posterior_mean(x_start, x_t, t), variance, self.at("posterior_log_variance_clipped", t, x_t)

    def posterior_mean(self, x_start: Tensor, x_t: Tensor, t: Tensor | int) -> Tensor:
        """Mean of q(x_{t-1} | x_t, x_start), equation 7."""
        return self.at("posterior_mean_coef1", t, x_t) * x_start + self.at("posterior_mean_coef2", t, x_t) * x_t

    def _predict_xstart_from_eps(self, x_t, t, eps) -> Tensor:
        return self.at("xstart_from_x", t, x_t) * x_t - self.at("xstart_from_eps", t, x_t) * eps

    def _predict_xstart_from_xprev(self, x_t, t, xprev) -> Tensor:
        return self.at("xstart_from_xprev", t, x_t) * xprev - self.at("xstart_from_xprev_x", t, x_t) * x_t

    def _predict_xstart_from_v(self, x_t, t, v) -> Tensor:
        return self.at("sqrt_alphas_cumprod", t, x_t) * x_t - self.at("sqrt_one_minus_alphas_cumprod", t, x_t) * v

    def _predict_eps_from_xstart(self, x_t, t, pred_xstart) -> Tensor:
        signal, noise = self.at("sqrt_recip_alphas_cumprod", t, x_t), self.at("sqrt_recipm1_alphas_cumprod", t, x_t)
        return (signal * x_t - pred_xstart) / noise

    def _velocity(self, x_start, t, noise) -> Tensor:
        signal = self.at("sqrt_alphas_cumprod", t, x_start)
        return signal * noise - self.at("sqrt_one_minus_alphas_cumprod", t, x_start) * x_start
