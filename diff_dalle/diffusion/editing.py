"""New pictures from given ones: going through part of the process again, painting what a mask leaves open, variations.

Nothing here replaces a sampler: all of them work unchanged on a process that was cut short, under a denoiser that knows
some pixels already, or from a start that was made of the given picture.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..config import option
from ..errors import InputError
from .gaussian_diffusion import GaussianDiffusion
from .respace import SpacedDiffusion
from .samplers import Denoise, Prediction, Sampler, Step, ddim_inversion

NamedNoise = Callable[[str], Tensor]


@dataclass(frozen=True)
class EditConfig:
    """Editing"""

    strength: float | None = option(
        None, "fraction of the process that given pictures go through again, above 0 to 1: low keeps them, 1 forgets "
        "them (unless masked or varied); none = 0.75, or 1 with a mask or variation", free=True)  # fmt: skip
    variation: float | None = option(
        None, "make variations of given pictures, 0 to 1: 0 gives them back, 1 shares nothing with them but the "
        "caption (and what strength keeps); none = no variations", free=True)  # fmt: skip
    inpaint_resamples: int = option(
        4, "times that every part of the process is gone through when painting in, so that new and given pixels agree; "
        "the time grows with it; 1 = once", free=True)  # fmt: skip
    inpaint_jump: int = option(
        5, "steps (of those that timestep_respacing keeps) in such a part; not used at inpaint_resamples 1", free=True
    )

    def __post_init__(self):
        if self.strength is not None and not 0 < self.strength <= 1:
            raise InputError(f"--strength is {self.strength:g}, but must be above 0 and at most 1")
        if self.variation is not None and not 0 <= self.variation <= 1:
            raise InputError(f"--variation is {self.variation:g}, but must lie between 0 and 1")
        for name in ("inpaint_resamples", "inpaint_jump"):
            if getattr(self, name) < 1:
                raise InputError(f"--{name} is {getattr(self, name)}, but must be at least 1")


@dataclass(frozen=True)
class Edit:
    """Pictures to start from, and what is to become of them.

    images:  [N, C, H, W] float in [-1, 1].
    unknown: [N, 1, H, W] bool, True where new content is to be painted, all else stays; None = everywhere, nothing has
             to stay.

    Raises InputError for a mask of another shape or type, or together with a variation.
    """

    images: Tensor
    unknown: Tensor | None = None
    config: EditConfig = EditConfig()

    def __post_init__(self):
        if self.unknown is None:
            return
        if self.config.variation is not None:
            raise InputError("a mask and --variation exclude each other; leave one of them out")
        n, _, height, width = self.images.shape
        if self.unknown.dtype != torch.bool or self.unknown.shape != (n, 1, height, width):
            raise InputError(
                f"the mask is {self.unknown.dtype} of shape {list(self.unknown.shape)}, but pictures of shape "
                f"{list(self.images.shape)} need torch.bool of shape {[n, 1, height, width]}"
            )

    @property
    def strength(self) -> float:
        """``config.strength``, or its default for this kind of edit."""
        if self.config.strength is not None:
            return self.config.strength
        return 0.75 if self.unknown is None and self.config.variation is None else 1.0

    def to(self, device) -> Edit:
        unknown = None if self.unknown is None else self.unknown.to(device)
        return replace(self, images=self.images.to(device), unknown=unknown)

    def select(self, index) -> Edit:
        """The pictures that ``index`` (a slice, a list or an index tensor) picks, in its order."""
        return replace(self, images=self.images[index], unknown=None if self.unknown is None else self.unknown[index])


def shortened(process: SpacedDiffusion, strength: float) -> SpacedDiffusion:
    """The steps of ``process`` in the least noisy ``strength`` of the original process (SDEdit, Meng et al. 2022).

    strength: in (0, 1]. Steps keep their numbers. Raises InputError when there is no step so low.
    """
    kept = sum(process.fraction(t) < strength for t in range(process.num_timesteps))
    if not kept:
        raise InputError(
            f"--strength {strength:g} leaves no step of timestep_respacing, whose first is at "
            f"{process.fraction(0):g} of the process; raise strength"
        )
    return process.truncated(kept)


def edited_steps(
    process: SpacedDiffusion, sampler: Sampler, denoise: Denoise, unguided: Denoise, edit: Edit, noise: NamedNoise
) -> Iterator[Step]:
    """Every step from the pictures of ``edit`` to the edited ones [N, C, H, W]; known pixels end as they were given.

    process:  as ``shortened`` by the edit's strength.
    sampler:  of SAMPLERS; deterministic for a variation.
    denoise:  what leads to the edited pictures.
    unguided: the same without guidance, by which a variation goes up to the noise.
    noise:    a name → standard normal numbers of the pictures' shape, the same for the same name.

    The network is evaluated as often as the sampler does on ``process``: times ``inpaint_resamples`` with a mask, and
    T - 1 times more, before the first step, for a variation.
    """
    x, passes = edit_start(process, unguided, edit, noise("editing start")), 1
    if edit.unknown is not None:
        denoise, passes = keep_known(process, denoise, edit.images, edit.unknown), edit.config.inpaint_resamples
    yield from resampled_steps(process, sampler, denoise, x, noise, passes, edit.config.inpaint_jump)


def edit_start(process: GaussianDiffusion, unguided: Denoise, edit: Edit, fresh: Tensor) -> Tensor:
    """The noisy pictures from which the last step of ``process`` begins.

    They are ``sqrt(ᾱ) image + sqrt(1 − ᾱ) fresh``; at strength 1 ``fresh`` alone, as in sampling from nothing, because
    the little signal that a process leaves at its end still shows in colour and brightness. Known pixels keep it.

    A variation takes instead the noise that ``ddim_inversion`` finds (Song et al. 2021, section 4.3), turned towards
    ``fresh`` by variation · π/2, which keeps its variance.
    """
    last = process.num_timesteps - 1
    noised = process.q_sample(edit.images, last, fresh)
    if edit.strength < 1:
        signal, x = process.at("sqrt_alphas_cumprod", last, fresh) * edit.images, noised
    else:
        signal, x = torch.zeros_like(fresh), fresh
    if edit.config.variation is not None:
        found = edit.images
        for step in ddim_inversion(process, unguided, edit.images):
            found = step.x
        angle = edit.config.variation * math.pi / 2
        x = signal + math.cos(angle) * (found - signal) + math.sin(angle) * (x - signal)
    return x if edit.unknown is None else torch.where(edit.unknown, x, noised)


def keep_known(process: GaussianDiffusion, denoise: Denoise, images: Tensor, unknown: Tensor) -> Denoise:
    """``denoise`` that expects ``images`` [N, C, H, W] wherever ``unknown`` [N, 1, H, W] is False.

    There x_t is drawn, step by step, from what leads to the known image, with the noise that x_t has already; any
    sampler ends exactly at it.
    """
    share = unknown.to(images.dtype)

    def known(x: Tensor, t: int) -> Prediction:
        p = denoise(x, t)
        signal, sigma = (process.at(name, t, x) for name in ("sqrt_alphas_cumprod", "sqrt_one_minus_alphas_cumprod"))
        variance = process.at("posterior_log_variance_clipped", t, x)
        return Prediction(
            x_start=torch.where(unknown, p.x_start, images),
            eps=torch.where(unknown, p.eps, (x - signal * images) / sigma),
            mean=torch.where(unknown, p.mean, process.posterior_mean(images, x, t)),
            log_variance=variance + share * (p.log_variance - variance),  # both may be floats
        )

    return known


def resampled_steps(
    process: SpacedDiffusion, sampler: Sampler, denoise: Denoise, x: Tensor, noise: NamedNoise, passes: int, jump: int
) -> Iterator[Step]:
    """``sampler`` down ``process`` from x, ``jump`` steps at a time, each such segment ``passes`` times in a row.

    Before every further pass the sample is noised again, to where the segment began (RePaint, Lugmayr et al. 2022,
    algorithm 1): so what is painted has several tries to agree with what is known. ``passes`` × T steps; a multistep
    sampler starts anew in each segment. One pass is the plain sampler.
    """
    levels = [*process.alphas_cumprod.tolist(), 1.0]  # by step; the last is [-1], the image itself
    jump = jump if passes > 1 else process.num_timesteps
    for top in range(process.num_timesteps - 1, -1, -jump):
        bottom = max(top - jump, -1)
        segment = process.truncated(top + 1)
        for number in range(passes):
            if number:
                keep = levels[top] / levels[bottom]
                again = noise(f"editing back to step {top}, pass {number}")
                x = math.sqrt(keep) * x + math.sqrt(1 - keep) * again
            steps = sampler(segment, denoise, x, functools.partial(_step_noise, noise, number))
            for step in itertools.islice(steps, top - bottom):
                x = step.x
                yield step


def _step_noise(noise: NamedNoise, number: int, t: int) -> Tensor:
    # Not the names of sampling from nothing: a picture made by its seed contains that noise, and an edit of it with the
    # same seed would add the same again.
    return noise(f"editing step {t}, pass {number}")
