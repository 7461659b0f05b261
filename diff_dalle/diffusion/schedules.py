"""Named schedules of betas, the noise added at each step. Float64 throughout.

A new schedule is one function ``num_diffusion_timesteps -> betas`` and one line in SCHEDULES.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np

from ..config import Fault, InputError, lookup, named
from ..config.bounds import MAX_STEPS


def _linear_ends(steps: int) -> tuple[float, float]:
    """First and last beta. Ho et al. 2020 use 1e-4 and 0.02 for 1000 steps; other counts keep the total noise."""
    scale = 1000 / steps
    return scale * 1e-4, scale * 0.02


def linear(steps: int) -> np.ndarray:
    """Linear betas (Ho et al. 2020, section 4)."""
    return np.linspace(*_linear_ends(steps), steps, dtype=np.float64)


def quadratic(steps: int) -> np.ndarray:
    """Linear square roots of beta, between those of ``linear`` (from Ho et al. 2020's code)."""
    first, last = _linear_ends(steps)
    return np.linspace(math.sqrt(first), math.sqrt(last), steps, dtype=np.float64) ** 2


def sigmoid(steps: int) -> np.ndarray:
    """From the first to the last beta of ``linear`` along a logistic curve over [-6, 6]."""
    first, last = _linear_ends(steps)
    return first + (last - first) / (1 + np.exp(-np.linspace(-6, 6, steps, dtype=np.float64)))


def jsd(steps: int) -> np.ndarray:
    """1/T, 1/(T-1), …, 1 (Sohl-Dickstein et al. 2015, section 2.4.1): alpha-bar falls linearly to 0."""
    return 1 / np.linspace(steps, 1, steps, dtype=np.float64)


def cosine(steps: int) -> np.ndarray:
    """alpha-bar as a squared cosine (Nichol & Dhariwal 2021, equation 17, offset s = 0.008)."""
    return betas_for_alpha_bar(steps, lambda t: math.cos((t + 0.008) / 1.008 * math.pi / 2) ** 2)


def betas_for_alpha_bar(
    num_diffusion_timesteps: int, alpha_bar: Callable[[float], float], max_beta: float = 0.999
) -> np.ndarray:
    """Betas for a given ``alpha_bar``, the cumulative product of (1 - beta) as a function of time from 0 to 1.

    max_beta: upper limit of each beta; below 1 the last step keeps some signal.
    """
    levels = [alpha_bar(i / num_diffusion_timesteps) for i in range(num_diffusion_timesteps + 1)]
    return np.array([min(1 - after / before, max_beta) for before, after in itertools.pairwise(levels)])


SCHEDULES: dict[str, Callable[[int], np.ndarray]] = {
    "linear": linear,
    "cosine": cosine,
    "quadratic": quadratic,
    "jsd": jsd,
    "sigmoid": sigmoid,
}


def get_named_beta_schedule(schedule_name: str, num_diffusion_timesteps: int) -> np.ndarray:
    """[T] float64 betas, each in (0, 1].

    Raises InputError for an unknown name, for T < 1, and if the formula leaves (0, 1]: linear, quadratic and sigmoid
    with 2 to 19 steps.
    """
    schedule = lookup(SCHEDULES, schedule_name, "noise_schedule")
    if not 1 <= num_diffusion_timesteps <= MAX_STEPS:
        raise InputError(Fault("diffusion_steps", f"must be from 1 to {MAX_STEPS:,}", num_diffusion_timesteps))
    betas = schedule(num_diffusion_timesteps)
    if not (betas > 0).all() or not (betas <= 1).all():
        rule = (
            f"{named('noise_schedule')} {schedule_name} then has betas up to {betas.max():.3g}, above 1: set it to 20 "
            f"or more, or {named('noise_schedule')} to cosine"
        )
        raise InputError(Fault("diffusion_steps", rule, num_diffusion_timesteps))
    return betas
