"""Sampling algorithms: one function each, in the notation of its paper, listed in SAMPLERS.

The layers, from the network outwards::

    network(x, t [N], cond=…) → [N, C or 2C, H, W]     any model; t as it was trained
    denoise(x, t int) → Prediction                     process.denoiser(network, …), wrapped by guidance.py
    sampler(process, denoise, x_T, noise) → Steps      this file

A sampler takes every step t = T-1, …, 0 of ``process`` (respace it to take fewer) and yields a Step after each; the
last Step's ``x`` is the result. Of the process it reads the noise levels only (``NoiseLevels``), so any sequence of
increasing noise works. All samples of a batch share t, so coefficients are Python floats from the float64 tables and
nothing waits for the device. ``noise(t)`` returns standard normal noise of x's shape, so the caller controls what each
sample's randomness depends on; deterministic samplers never call it, and give it a default. x_start may have been
clipped or guided, and eps follows it, so samplers work the same with every prediction type and with learned variance.

Notation: ᾱ = alphas_cumprod; α = sqrt(ᾱ); σ = sqrt(1 − ᾱ); λ = log(α/σ); a prime marks the level after the step.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from ..config import Registry


class NoiseLevels(Protocol):
    """What samplers need to know about a process.

    num_timesteps:  number of steps T.
    alphas_cumprod: [T] float64, ᾱ in [0, 1) of each step, strictly decreasing.
    """

    num_timesteps: int
    alphas_cumprod: np.ndarray


@dataclass(frozen=True)
class Prediction:
    """A denoiser's estimates for x_t [N, C, …].

    x_start:      the expected clean sample, after clipping, thresholding and guidance.
    eps:          the noise that this x_start implies.
    mean:         of x_{t-1} given x_t.
    log_variance: of x_{t-1} given x_t; a float if fixed.
    variance:     the same, but 0 at t = 0 where the posterior's is; None = not told.
    """

    x_start: Tensor
    eps: Tensor
    mean: Tensor
    log_variance: Tensor | float
    variance: Tensor | float | None = None


@dataclass(frozen=True)
class Step:
    """One sampling step.

    t:       the step taken: from noise level t to the next lower level, or to the next higher one in inversion.
    x:       the sample after the step.
    x_start: the clean sample predicted before the step.
    """

    t: int
    x: Tensor
    x_start: Tensor


Model = Callable[..., Tensor]  # a network
Denoise = Callable[[Tensor, int], Prediction]
Noise = Callable[[int], Tensor]
Sampler = Callable[..., Iterator[Step]]


def _sqrt(value):
    """Square root of a number or tensor that is at least 0 up to rounding."""
    return value.clamp(min=0).sqrt() if isinstance(value, Tensor) else math.sqrt(max(value, 0.0))


def _half_log_snr(alpha_bar: float) -> float:
    """λ, infinite where there is no noise (ᾱ = 1) or no signal (ᾱ = 0)."""
    if alpha_bar in (0.0, 1.0):
        return math.inf if alpha_bar else -math.inf
    return 0.5 * (math.log(alpha_bar) - math.log1p(-alpha_bar))


def _levels(process: NoiseLevels) -> list[float]:
    """ᾱ by level: ``levels[t]`` before step t, ``levels[t - 1]`` after it; ``levels[-1]`` = 1, the clean sample."""
    return [*process.alphas_cumprod.tolist(), 1.0]


def ancestral(process: NoiseLevels, denoise: Denoise, x: Tensor, noise: Noise) -> Iterator[Step]:
    """A draw from p(x_{t-1} | x_t) at every step (Ho et al. 2020, algorithm 2). T evaluations."""
    for t in reversed(range(process.num_timesteps)):
        p = denoise(x, t)
        x = p.mean
        if t > 0:
            half = 0.5 * p.log_variance
            x = x + (half.exp() if isinstance(half, Tensor) else math.exp(half)) * noise(t)
        yield Step(t, x, p.x_start)


def ddim_sigma(alpha_bar, alpha_bar_next, eta: float):
    """σ of Song et al. 2021, equation 16, from level ᾱ to the less noisy ᾱ'. Numbers or tensors."""
    return eta * _sqrt((1 - alpha_bar_next) / (1 - alpha_bar)) * _sqrt(1 - alpha_bar / alpha_bar_next)


def ddim_move(x_start: Tensor, eps: Tensor, alpha_bar_next, sigma=0.0) -> Tensor:
    """Song et al. 2021, equation 12, without its random term: x_start and the direction to x_t, at the level ᾱ'."""
    return x_start * _sqrt(alpha_bar_next) + _sqrt(1 - alpha_bar_next - sigma**2) * eps


def ddim(
    process: NoiseLevels, denoise: Denoise, x: Tensor, noise: Noise | None = None, eta: float = 0.0
) -> Iterator[Step]:
    """DDIM (Song et al. 2021, equation 12). T evaluations; order 1 at eta 0.

    eta: 0 = deterministic, 1 = as random as ``ancestral`` with the small fixed variance. Above 0 it requires ``noise``.
    """
    levels = _levels(process)
    for t in reversed(range(process.num_timesteps)):
        p = denoise(x, t)
        sigma = ddim_sigma(levels[t], levels[t - 1], eta)
        x = ddim_move(p.x_start, p.eps, levels[t - 1], sigma)
        if sigma > 0:
            assert noise is not None, "eta above 0 requires noise"
            x = x + sigma * noise(t)
        yield Step(t, x, p.x_start)


def lcm(process: NoiseLevels, denoise: Denoise, x: Tensor, noise: Noise) -> Iterator[Step]:
    """x_start, noised afresh to the next level (Song et al. 2023, algorithm 1; Luo et al. 2023). T evaluations.

    For networks whose x_start is a sample, as after consistency distillation. With an ordinary denoiser, whose x_start
    is a mean, samples vary too little.
    """
    levels = _levels(process)
    for t in reversed(range(process.num_timesteps)):
        p = denoise(x, t)
        x = p.x_start
        if t > 0:
            x = _sqrt(levels[t - 1]) * x + _sqrt(1 - levels[t - 1]) * noise(t)
        yield Step(t, x, p.x_start)


def ddim_inversion(process: NoiseLevels, denoise: Denoise, x: Tensor, noise: Noise | None = None) -> Iterator[Step]:
    """A clean sample x → the noise from which ``ddim`` at eta 0 reproduces it (Song et al. 2021, section 4.3).

    Ascends from t = 0, whose noise is invisible, to t = T-1, where ``ddim`` starts. T-1 evaluations; order 1.
    """
    levels = _levels(process)
    for t in range(process.num_timesteps - 1):
        p = denoise(x, t)
        x = ddim_move(p.x_start, p.eps, levels[t + 1])
        yield Step(t, x, p.x_start)


def _exponential_step(x: Tensor, target: Tensor, alpha_bar: float, alpha_bar_next: float) -> Tensor:
    """The exact solution from level ᾱ to ᾱ' if x_start stays ``target`` (Lu et al. 2022, proposition 4.1)."""
    keep = _sqrt((1 - alpha_bar_next) / (1 - alpha_bar))  # σ'/σ
    gain = -math.expm1(_half_log_snr(alpha_bar) - _half_log_snr(alpha_bar_next))  # 1 - exp(-h), h = λ' - λ
    return keep * x + _sqrt(alpha_bar_next) * gain * target


def _extrapolate(now: Tensor, before: Tensor, h: float, h_before: float) -> Tensor:
    """x_start in the middle of a step of length h in λ, from its last two values (Lu et al. 2022, algorithm 2).

    Never further ahead than the last step reached back. That changes nothing for even steps in λ, and preserves order
    2; with steps even in t, where h grows several times towards the image, it prevents an overshoot that made the RMS
    error at 10 and 20 evaluations 2 to 7 times larger (a mixture of Gaussians, linear and cosine schedule).
    """
    return now + 0.5 * min(h / h_before, 1.0) * (now - before)


def dpm_solver_pp_2m(process: NoiseLevels, denoise: Denoise, x: Tensor, noise: Noise | None = None) -> Iterator[Step]:
    """DPM-Solver++(2M) (Lu et al. 2022, algorithm 2). T evaluations; order 2."""
    levels = _levels(process)
    before, h_before = None, 0.0
    for t in reversed(range(process.num_timesteps)):
        p = denoise(x, t)
        h = _half_log_snr(levels[t - 1]) - _half_log_snr(levels[t])
        target = p.x_start
        if before is not None and t > 0:  # the first step has no history, and the last ends at x_start itself
            target = _extrapolate(target, before, h, h_before)
        x = _exponential_step(x, target, levels[t], levels[t - 1])
        before, h_before = p.x_start, h
        yield Step(t, x, p.x_start)


def unipc(process: NoiseLevels, denoise: Denoise, x: Tensor, noise: Noise | None = None) -> Iterator[Step]:
    """UniPC-2 with B2(h) = exp(h) − 1, predicting x_start (Zhao et al. 2023, algorithms 1 and 2). T evaluations.

    The predictor alone is DPM-Solver++(2M), of order 2; once x_start at the new level is known, the corrector repeats
    the step that led there with it (order 3), without another evaluation.
    """
    levels = _levels(process)
    history: list[tuple[float, Tensor]] = []  # (λ, x_start) of the last levels, oldest first, at most two
    x_before = x
    for t in reversed(range(process.num_timesteps)):
        p, lambda_t = denoise(x, t), _half_log_snr(levels[t])
        if history:
            x = _unipc_correct(x_before, p.x_start, lambda_t, history, levels[t + 1], levels[t])
        target = p.x_start
        if history and t > 0:
            lambda_before, before = history[-1]
            h = _half_log_snr(levels[t - 1]) - lambda_t
            target = _extrapolate(target, before, h, lambda_t - lambda_before)
        history = [*history, (lambda_t, p.x_start)][-2:]
        x_before, x = x, _exponential_step(x, target, levels[t], levels[t - 1])
        yield Step(t, x, p.x_start)


def _unipc_correct(
    x: Tensor,
    new: Tensor,
    lambda_new: float,
    history: list[tuple[float, Tensor]],
    alpha_bar: float,
    alpha_bar_next: float,
) -> Tensor:
    """UniC: the step from ᾱ to ᾱ' again, now that x_start at ᾱ' (``new``) is known.

    Its weights solve the paper's order conditions R a = φ / B for the nodes before and at ᾱ', here in closed form.
    """
    lambda_now, now = history[-1]
    h = lambda_new - lambda_now
    phi_1 = math.expm1(-h)
    if len(history) == 1:
        target = now + 0.5 * (new - now)
    else:
        phi_2 = -phi_1 / h - 1
        phi_3 = -phi_2 / h - 0.5
        b_1, b_2 = phi_2 / phi_1, 2 * phi_3 / phi_1
        lambda_before, before = history[0]
        r = (lambda_before - lambda_now) / h  # negative: the older node lies on the other side of the step
        weight = (b_1 - b_2) / (1 - r)
        target = now + (b_1 - weight) * (new - now) + (weight / r) * (before - now)
    return _exponential_step(x, target, alpha_bar, alpha_bar_next)


_HEUN_STEPS = 15  # from which on the step before the image is not limited


def heun(process: NoiseLevels, denoise: Denoise, x: Tensor, noise: Noise | None = None) -> Iterator[Step]:
    """Heun's method (Karras et al. 2022, algorithm 1), in s = σ/α. 2T-1 evaluations: one for the last step; order 2.

    Averaging the slopes at both ends adds α' (1 − s'/s) × s / 2s' times the change of x_start to Euler's step, which is
    DDIM's. The first factor is what the change would add if x_start had changed at once, so the second is limited to 1:
    it exceeds that in steps that more than halve s, of which a cosine schedule's first is the worst (s/s' up to 1000).
    Not in the step before the image of 15 or more, where s is so small that the slope falls in a straight line and the
    method is exact as published; the limit there made the RMS error of 15 steps up to 1.7 and of 125 steps up to 15
    times larger, while fewer steps err more without it (README.md).
    """
    levels = _levels(process)
    for t in reversed(range(process.num_timesteps)):
        p = denoise(x, t)
        x = ddim_move(p.x_start, p.eps, levels[t - 1])
        if t > 0:
            ratio = math.exp(_half_log_snr(levels[t - 1]) - _half_log_snr(levels[t]))  # s/s'
            weight = 0.5 * (ratio - 1)
            if t > 1 or process.num_timesteps < _HEUN_STEPS:
                weight = min(weight, 1 - 1 / ratio)
            weight *= _sqrt(levels[t - 1])
            x = x + weight * (denoise(x, t - 1).x_start - p.x_start)
        yield Step(t, x, p.x_start)


SAMPLERS: Registry[Sampler] = Registry(
    "diff_dalle.samplers",
    {
        "ancestral": ancestral,
        "ddim": ddim,
        "dpm++2m": dpm_solver_pp_2m,
        "unipc": unipc,
        "heun": heun,
        "lcm": lcm,
    },
)
TWICE = ("heun",)  # evaluate the denoiser twice at every step but the last


def is_random(name: str) -> bool:
    """Whether a sampler draws noise at every step, whatever its settings: then its ``noise`` has no default."""
    noise = inspect.signature(SAMPLERS[name]).parameters.get("noise")
    return noise is None or noise.default is inspect.Parameter.empty
