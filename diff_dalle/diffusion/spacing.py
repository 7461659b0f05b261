"""Spacings: which noise levels of a process to sample at, for a number of steps or in Guided-Diffusion's notation.

Those in STEP_SPACINGS count the steps of training, as in Lin et al. 2024, table 2. Those in LEVEL_SPACINGS place levels
between the noisiest and the cleanest one, in λ = log(α/σ). A process in discrete steps then takes the trained step
nearest to each level: the network knows it, its time input is its own, and the samplers, which take any levels, compute
with exactly its ᾱ. Where a spacing wants several levels around one trained step, as near the image, the following steps
are taken as well. So there are always as many steps as asked for, each once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..config import Fault, InputError, lookup, named

_KARRAS_RHO = 7.0  # Karras et al. 2022, equation 5
_NAMED_SECTIONS = {"fast27": "10,10,3,2,2"}  # of GLIDE (Nichol et al. 2021), for few steps of its upsampler


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


def space_timesteps(num_timesteps: int, section_counts: str | Sequence[int]) -> set[int]:
    """The steps of a process to keep.

    section_counts: "N" for N evenly spaced steps from the first to the last; "10,15,20" (or a list of numbers) for the
                    number of steps in each of as many equal sections of the process, the least noisy section first;
                    "ddimN" for N steps with a constant integer stride from the first, as in the DDIM paper; "fast27"
                    for the sections of GLIDE's upsampler.

    Raises InputError if there is no such subset.
    """
    counts, is_stride = sections_of(section_counts)
    if is_stride:
        return _strided(num_timesteps, counts[0])
    steps: set[int] = set()
    start = 0
    for i, count in enumerate(counts):
        size = num_timesteps // len(counts) + (i < num_timesteps % len(counts))
        if size < count:
            raise _refused(section_counts, f"takes {count} steps from a section of only {size}: set fewer")
        steps.update(start + step for step in even_steps(size, count))
        start += size
    return steps


def sections_of(section_counts: str | Sequence[int]) -> tuple[list[int], bool]:
    """The numbers of a ``section_counts`` of ``space_timesteps``, and whether they are that of a constant stride.

    Raises InputError for a text in none of its forms, and for numbers that keep no step.
    """
    text, is_stride = section_counts, False
    if isinstance(text, str):
        is_stride, text = text.startswith("ddim"), _NAMED_SECTIONS.get(text, text)
        numbers = text.removeprefix("ddim").split(",")
        if not all(number.strip().isdecimal() for number in numbers) or (is_stride and len(numbers) > 1):
            raise _refused(section_counts, 'must look like "250", "10,15,20", "ddim25" or "fast27"')
        counts = [int(number) for number in numbers]
    else:
        counts = list(text)
    if min(counts, default=0) < 0 or sum(counts) < 1:
        raise _refused(section_counts, "keeps no step: set at least 1")
    return counts, is_stride


def _strided(num_timesteps: int, count: int) -> set[int]:
    for stride in range(1, num_timesteps + 1):
        steps = range(0, num_timesteps, stride)
        if len(steps) == count:
            return set(steps)
    missing = f"no integer stride gives exactly {count} of {num_timesteps} steps"
    raise _refused(f"ddim{count}", f"{missing}: set {count} without ddim, which works up to {num_timesteps}")


def _refused(section_counts: str | Sequence[int], rule: str) -> InputError:
    return InputError(Fault("timestep_respacing", rule, section_counts))
