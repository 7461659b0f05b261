"""The interface of a process to guidance and editing: its noise levels, and reading a network's output at each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
from torch import Tensor

from .samplers import Denoise, NoiseLevels, Prediction

Model = Callable[..., Tensor]


class SamplingProcess(NoiseLevels, Protocol):
    """A process to sample with: ``SpacedDiffusion``, or the ``steps`` of a ``LogSnrProcess``.

    posterior_log_variance_clipped: [T] float64, log-variance of q(x_{t-1} | x_t, x_start).
    """

    posterior_log_variance_clipped: np.ndarray

    def fraction(self, t: int) -> float:
        """The position of step t in the whole process, in [0, 1): 0 = clean, towards 1 = noise."""

    def truncated(self, count: int) -> SamplingProcess:
        """The ``count`` least noisy steps, with the same numbers and tables."""

    def model_input(self, x: Tensor, t: int) -> Tensor:
        """x_t as the network was trained on it: the same, but for a factor."""

    def model_steps(self, x: Tensor, t: int) -> Tensor:
        """[N] step t for all samples of x as the network's time input."""

    def q_sample(self, x_start: Tensor, t: int, noise: Tensor | None = None) -> Tensor:
        """x_t = α x_start + σ noise."""

    def posterior_mean(self, x_start: Tensor, x_t: Tensor, t: int) -> Tensor:
        """Mean of q(x_{t-1} | x_t, x_start)."""

    def predict(
        self,
        model_output: Tensor,
        x: Tensor,
        t: int,
        clip_denoised: bool = True,
        denoised_fn: Callable[[Tensor], Tensor] | None = None,
    ) -> Prediction:
        """A network's output at step t, read as a Prediction."""

    def denoiser(
        self,
        model: Model,
        clip_denoised: bool = True,
        denoised_fn: Callable[[Tensor], Tensor] | None = None,
        model_kwargs: Mapping | None = None,
    ) -> Denoise:
        """A network as the ``denoise(x, t)`` that samplers call."""
