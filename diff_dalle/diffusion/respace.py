"""Respacing: a process on a subset of another process's steps."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from torch import Tensor

from ..config import Fault, InputError
from .forward_process import ForwardProcess
from .gaussian_diffusion import GaussianDiffusion
from .spacing import even_steps

_NAMED_SECTIONS = {"fast27": "10,10,3,2,2"}  # of GLIDE (Nichol et al. 2021), for few steps of its upsampler


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


class SpacedDiffusion(GaussianDiffusion):
    """A process on some steps of another. The model's time input is still that of the original process.

    use_timesteps: the steps to keep, each in 0 … T-1, else InputError.
    kwargs:        arguments of the original process, as for GaussianDiffusion.
    """

    def __init__(self, use_timesteps: Collection[int], **kwargs):
        original = ForwardProcess(kwargs["betas"])
        self.use_timesteps = set(use_timesteps)
        self.original_num_steps = original.num_timesteps
        self.timestep_map = sorted(self.use_timesteps)
        if not self.use_timesteps or not self.use_timesteps <= set(range(self.original_num_steps)):
            raise InputError(f"the steps to keep must be some of 0 to {self.original_num_steps - 1}")
        self._settings = kwargs
        kept = original.alphas_cumprod[self.timestep_map]
        super().__init__(**{**kwargs, "betas": 1 - kept / np.append(1.0, kept[:-1])})

    def truncated(self, count: int) -> SpacedDiffusion:
        return SpacedDiffusion(self.timestep_map[:count], **self._settings)

    def fraction(self, t: int) -> float:
        return self.timestep_map[t] / self.original_num_steps

    def _scale_timesteps(self, t: Tensor) -> Tensor:
        t = self._table("timestep_map", t.device)[t]
        return t.float() * (1000.0 / self.original_num_steps) if self.rescale_timesteps else t
