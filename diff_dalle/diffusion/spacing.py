"""Spacings: which noise levels of a process to sample at, for a given number of steps.

Two kinds. Those in STEP_SPACINGS count the steps of training, as in Lin et al. 2024, table 2. Those in LEVEL_SPACINGS
place levels between the noisiest and the cleanest one, in λ = log(α/σ). A process in discrete steps then takes the
trained step nearest to each level: the network knows it, its time input is its own, and the samplers, which take any
levels, compute with exactly its ᾱ. Where a spacing wants several levels around one trained step, as near the image, the
following steps are taken as well. So there are always as many steps as asked for, each once.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..config import Fault, InputError, lookup, named

_KARRAS_RHO = 7.0  # Karras et al. 2022, equation 5


def even_steps(total: int, count: int) -> list[int]:
    """From the first step to the last ("linspace"; Nichol & Dhariwal 2021, section 4)."""
    spacing, position, steps = (total - 1) / (count - 1) if count > 1 else 1, 0.0, []
    for _ in range(count):
        steps.append(round(position))
        position += spacing  # not multiplied, so that rounding agrees with Guided-Diffusion
    return steps


def leading_steps(total: int, count: int) -> list[int]:
    """A constant stride from the first step (Song et al. 2021). The noisiest steps are left out.

    Raises InputError where the only stride is 1, which would leave out up to half of the process.
    """
    if count < total < 2 * count:
        remedy = f"set {named('steps')} to at most {total // 2}, or this to trailing"
        raise InputError(Fault("spacing", f"leading has no stride that takes {count} of {total} steps: {remedy}"))
    return [total // count * i for i in range(count)]


def trailing_steps(total: int, count: int) -> list[int]:
    """A constant stride down from the last step. The least noisy steps are left out."""
    return [round(total - i * total / count) - 1 for i in reversed(range(count))]


def log_snr_levels(noisy: float, clean: float, count: int) -> np.ndarray:
    """Even in λ (Lu et al. 2022, section 5.1)."""
    return np.linspace(noisy, clean, count)


def karras_levels(noisy: float, clean: float, count: int) -> np.ndarray:
    """Even in (σ/α)^(1/7) (Karras et al. 2022, equation 5)."""
    first, last = np.exp(-noisy / _KARRAS_RHO), np.exp(-clean / _KARRAS_RHO)
    return -_KARRAS_RHO * np.log(np.linspace(first, last, count))


def flow_levels(noisy: float, clean: float, count: int) -> np.ndarray:
    """Even in σ / (α + σ), the time of rectified flow (Liu et al. 2023)."""
    first, last = 1 / (1 + np.exp(noisy)), 1 / (1 + np.exp(clean))
    time = np.linspace(first, last, count)
    return np.log1p(-time) - np.log(time)


#: Number of steps T, count N → N of the steps 0 … T-1, increasing.
STEP_SPACINGS: dict[str, Callable[[int, int], list[int]]] = {
    "even": even_steps,
    "leading": leading_steps,
    "trailing": trailing_steps,
}
#: λ of the noisiest and of the cleanest level, count N → N values of λ, increasing, both ends included.
LEVEL_SPACINGS: dict[str, Callable[[float, float, int], np.ndarray]] = {
    "flow": flow_levels,
    "log_snr": log_snr_levels,
    "karras": karras_levels,
}
SPACINGS = (*STEP_SPACINGS, *LEVEL_SPACINGS)
TIME_SPACINGS = ("even", *LEVEL_SPACINGS)  # of a process in continuous time, which has no steps to count
_DEFAULTS = {"linear": "log_snr", "flow": "even"}  # by schedule; see the table in README.md


def default_spacing(noise_schedule: str) -> str:
    """The spacing of a schedule of SCHEDULES, unless another is asked for."""
    return _DEFAULTS.get(noise_schedule, "flow")


def check_spacing(spacing: str, respacing: str) -> None:
    """InputError for an unknown spacing, and for one of steps that are not a number to space."""
    lookup(dict.fromkeys(SPACINGS), spacing, "spacing")
    if not respacing.strip().isdecimal():
        steps = f"{named('timestep_respacing')} {respacing!r} says itself which steps to take"
        raise InputError(
            Fault("spacing", f"is {spacing}, but {steps}: set that to a number of steps, or leave this out")
        )


def spaced_steps(alphas_cumprod: np.ndarray, count: int, spacing: str) -> list[int]:
    """``count`` of the T steps with levels ᾱ [T], increasing, by a spacing of SPACINGS. count: from 1 to T."""
    total = len(alphas_cumprod)
    if spacing in STEP_SPACINGS:
        return STEP_SPACINGS[spacing](total, count)
    with np.errstate(divide="ignore"):
        levels = 0.5 * (np.log(alphas_cumprod) - np.log1p(-alphas_cumprod))
    wanted = LEVEL_SPACINGS[spacing](levels[np.isfinite(levels)].min(), levels[0], count)[::-1]
    steps, index = np.abs(levels[:, None] - wanted).argmin(0), np.arange(count)
    steps[-1] = total - 1  # also where its λ is infinite, without any signal
    steps = np.maximum.accumulate(steps - index) + index  # each at least one above the one before
    return np.minimum(steps, total - count + index).tolist()
