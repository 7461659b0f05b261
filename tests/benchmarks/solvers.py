"""Error of every solver with every spacing, for data whose score is known: a mixture of Gaussians.

Of a deterministic sampler, the root mean square (RMS) distance to the exact solution of the same ODE from the same
noise. Of a random one there is no such solution; the distributions are compared instead.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import torch
from exact_denoisers import CENTERS, posterior_mean
from torch import Tensor

from diff_dalle.diffusion.diffusion_config import FLOW, DiffusionConfig, training_process
from diff_dalle.diffusion.samplers import SAMPLERS, Prediction, is_random
from diff_dalle.diffusion.sampling import SamplerConfig
from diff_dalle.diffusion.spacing import SPACINGS, TIME_SPACINGS, default_spacing
from diff_dalle.evaluation.report import markdown_table

WIDTHS = (0.3, 0.05)  # standard deviations of the Gaussians: they overlap, or lie far apart
EVALUATIONS = (10, 20, 50, 250)
SCHEDULES = ("linear", "cosine", "quadratic", "sigmoid", FLOW)
ANCESTRAL_STEPS, FEW = 250, (14, 16, 20)  # 1/18 of them, and more
_LEAST_NOISE = 1e-5  # σ/α at which the exact solution is read
_ODE_STEPS, _DIRECTIONS, _BISECTIONS = 1500, 16, 50


def exact_solution(x: Tensor, alpha_bar: float, width: float) -> Tensor:
    """The data [N, 2] at which the probability flow from x [N, 2] at the level ᾱ ends: fourth-order Runge-Kutta in
    log(σ/α)."""

    def slope(position: Tensor, log_noise: float) -> Tensor:
        level = 1 / (1 + math.exp(2 * log_noise))
        return position - posterior_mean(position * math.sqrt(level), level, width)

    position = x / math.sqrt(alpha_bar)
    logs = np.linspace(0.5 * math.log((1 - alpha_bar) / alpha_bar), math.log(_LEAST_NOISE), _ODE_STEPS)
    for start, stop in itertools.pairwise(logs.tolist()):
        h, middle = stop - start, (start + stop) / 2
        one = slope(position, start)
        two = slope(position + h / 2 * one, middle)
        three = slope(position + h / 2 * two, middle)
        four = slope(position + h * three, stop)
        position = position + h / 6 * (one + 2 * two + 2 * three + four)
    return position - slope(position, math.log(_LEAST_NOISE))


def noise(count: int, seed: int) -> Tensor:
    return torch.randn(count, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def last_level(schedule: str) -> float:
    """ᾱ at the end of a process."""
    return float(training_process(DiffusionConfig(noise_schedule=schedule)).noisiest.alphas_cumprod[-1])


def sampled(name: str, schedule: str, spacing: str, count: int, x: Tensor, width: float) -> Tensor:
    """The samples [N, 2] at the end of ``count`` steps from the noise x [N, 2], with the small variance."""
    config = DiffusionConfig(noise_schedule=schedule, variance="fixed_small", prediction="x_start")
    process = SamplerConfig(name, count, spacing=spacing).process(config)

    def denoise(x: Tensor, t: int) -> Prediction:
        x_start = posterior_mean(x, float(process.alphas_cumprod[t]), width)
        return process.predict(x_start, x, t, clip_denoised=False)

    *_, last = SAMPLERS[name](process, denoise, x, lambda t: noise(len(x), t))
    return last.x


def steps_of(name: str, evaluations: int) -> int:
    """As many steps as that many evaluations allow. Heun's method takes 2T − 1."""
    return (evaluations + 1) // 2 if name == "heun" else evaluations


def errors(schedule: str, width: float) -> Iterator[tuple[str, str, list[float]]]:
    """Deterministic sampler, spacing, and its RMS error at each of EVALUATIONS."""
    x = noise(256, 0)
    exact = exact_solution(x, last_level(schedule), width)
    for name, spacing in itertools.product(SAMPLERS, TIME_SPACINGS if schedule == FLOW else SPACINGS):
        if not is_random(name):
            ends = [sampled(name, schedule, spacing, steps_of(name, count), x, width) for count in EVALUATIONS]
            yield name, spacing, [float((end - exact).square().mean().sqrt()) for end in ends]


def exact_quantiles(count: int, directions: Tensor, width: float) -> Tensor:
    """[count, D] the quantiles (i + ½) / count of the data along each of the directions [D, 2]."""
    shares = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    columns = []
    for means in directions @ CENTERS.T:
        low, high = torch.full_like(shares, -4.0), torch.full_like(shares, 4.0)
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            below = torch.special.ndtr((middle[:, None] - means) / width).mean(1) < shares
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        columns.append(low)
    return torch.stack(columns, 1)


def distribution_error(x: Tensor, width: float) -> float:
    """The distance of samples x [N, 2] from the data's distribution: 2-Wasserstein along lines, RMS over directions."""
    angles = torch.arange(_DIRECTIONS, dtype=torch.float64) * (math.pi / _DIRECTIONS)
    directions = torch.stack([angles.cos(), angles.sin()], 1)
    found = (x @ directions.T).sort(0).values
    return float((found - exact_quantiles(len(x), directions, width)).square().mean().sqrt())


def tables(count: int = 20_000) -> str:
    """RMS errors by schedule, sampler and spacing (* = default), and the distributions of few and of many steps.

    count: samples of a distribution.
    """
    rows: list[list] = []
    for schedule in SCHEDULES:
        for wide, narrow in zip(*(errors(schedule, width) for width in WIDTHS), strict=True):
            star = "*" if wide[1] == default_spacing(schedule) else ""
            rows.append([schedule, wide[0], wide[1] + star, *(f"{value:.4f}" for value in wide[2] + narrow[2])])
    header = [f"{evaluations} ({width:g})" for width in WIDTHS for evaluations in EVALUATIONS]
    first = markdown_table(["schedule", "sampler", "spacing", *header], rows)
    x, rows = noise(count, 0), []
    for schedule in ("linear", "cosine"):
        few = itertools.product(("dpm++2m", "unipc"), sorted({default_spacing(schedule), "flow"}), FEW)
        for name, spacing, steps in (("ancestral", "even", ANCESTRAL_STEPS), *few):
            found = distribution_error(sampled(name, schedule, spacing, steps, x, WIDTHS[0]), WIDTHS[0])
            rows.append([schedule, name, spacing, steps, f"{found:.4f}"])
    second = markdown_table(["schedule", "sampler", "spacing", "steps", "distance"], rows)
    return (
        f"RMS distance to the exact solution, by network evaluations (and width of the mixture); * = default spacing\n"
        f"{first}\n\nDistance of {count:,} samples from the distribution of the data, of width {WIDTHS[0]:g}\n{second}"
    )
