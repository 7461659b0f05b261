"""Image editing: image to image, inpainting, variations.

Nothing here replaces a sampler: each works unchanged on a truncated process, under a denoiser that knows some pixels
already, or from a start computed from the given image.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..config import Fault, InputError, named, option, settings
from .process import Process
from .samplers import Denoise, Prediction, Sampler, Step, ddim_inversion

NamedNoise = Callable[[str], Tensor]
RESAMPLES = 4  # passes where the network does not see the known pixels


@settings
class EditConfig:
    """Editing"""

    strength: float | None = option(
        None,
        "fraction of the process repeated on the given images, above 0, at most 1; small values preserve them, "
        "1 ignores them (without mask and variation); none = 0.75, or 1 with a mask or variation",
        free=True,
        above=0,
        most=1,
    )
    variation: float | None = option(
        None,
        "strength of variations of the given images, 0–1; 0 = reconstruction, 1 = nothing in common but the caption "
        "(and what strength preserves); none = no variations",
        free=True,
        least=0,
        most=1,
    )
    inpaint_resamples: int | None = option(
        None,
        "inpainting: passes through each part of the process, to harmonize new and given pixels; time is proportional; "
        "1 = no resampling; none = 1 for an inpainting network, which sees the given pixels, 4 for others",
        free=True,
        needs=("mask",),
        least=1,
        most=1_000,
    )
    inpaint_jump: int = option(
        5,
        "inpainting: length of such a part in sampling steps; not used with inpaint_resamples 1",
        free=True,
        needs=("mask",),
        least=1,
        most=1_000,
    )


@dataclass(frozen=True, eq=False)
class Edit:
    """Images to edit, in the form in which they are denoised.

    images:  [N, C, H, W] float.
    unknown: [N, 1, H, W] bool, True where new content is generated, False where ``images`` stay; None = everywhere
             True, without any constraint.
    seen:    whether the network sees the known pixels.

    Raises InputError for a mask of the wrong shape or type, or together with a variation.
    """

    images: Tensor
    unknown: Tensor | None = None
    config: EditConfig = EditConfig()
    seen: bool = False

    def __post_init__(self):
        if self.unknown is None:
            return
        if self.config.variation is not None:
            raise InputError(f"a mask and {named('variation')} exclude each other: leave one of them out")
        n, _, height, width = self.images.shape
        if self.unknown.dtype != torch.bool or self.unknown.shape != (n, 1, height, width):
            raise InputError(
                f"the mask is {self.unknown.dtype} of shape {list(self.unknown.shape)}, but images of shape "
                f"{list(self.images.shape)} require torch.bool of shape {[n, 1, height, width]}"
            )

    @property
    def strength(self) -> float:
        """``config.strength``, or its default for this kind of edit."""
        if self.config.strength is not None:
            return self.config.strength
        return 0.75 if self.unknown is None and self.config.variation is None else 1.0

    @property
    def passes(self) -> int:
        """Passes through each part of the process: ``config.inpaint_resamples``, or its default for this network."""
        if self.unknown is None:
            return 1
        return self.config.inpaint_resamples or (1 if self.seen else RESAMPLES)

    @property
    def known(self) -> Tensor | None:
        """What an inpainting network sees: ``Conditioning.known``; None without a mask."""
        return None if self.unknown is None else known_part(self.images, self.unknown)

    def to(self, device) -> Edit:
        unknown = None if self.unknown is None else self.unknown.to(device)
        return replace(self, images=self.images.to(device), unknown=unknown)

    def select(self, index) -> Edit:
        """The images selected by ``index`` (a slice, a list or an index tensor), in its order."""
        return replace(self, images=self.images[index], unknown=None if self.unknown is None else self.unknown[index])


def known_part(images: Tensor, unknown: Tensor) -> Tensor:
    """``Conditioning.known`` [N, C + 1, H, W] of images [N, C, H, W] and where they are unknown, [N, 1, H, W] bool."""
    return torch.cat([images.masked_fill(unknown, 0.0), (~unknown).to(images.dtype)], 1)


def shortened(process: Process, strength: float) -> Process:
    """The steps of ``process`` in the least noisy ``strength`` of the original process (SDEdit, Meng et al. 2022).

    strength: in (0, 1]. Steps keep their numbers. Raises InputError if no step is left.
    """
    count = sum(process.fraction(t) < strength for t in range(process.num_timesteps))
    if not count:
        first = f"whose first is at {process.fraction(0):g} of the process"
        rule = f"{strength:g} leaves no step of {named('steps')}, {first}: raise it"
        raise InputError(Fault("strength", rule))
    return process.truncated(count)


def edited_steps(
    process: Process, sampler: Sampler, denoise: Denoise, unguided: Denoise, edit: Edit, noise: NamedNoise
) -> Iterator[Step]:
    """Every step from the images of ``edit`` to the edited ones [N, C, H, W]; known pixels end at their given values.

    process:  as ``shortened`` by the edit's strength.
    sampler:  of SAMPLERS; deterministic for a variation.
    denoise:  the guided denoiser.
    unguided: the same without guidance, for the inversion of a variation.
    noise:    a name → standard normal noise of the images' shape, the same for the same name.

    The network is evaluated as often as the sampler does on ``process``: times ``edit.passes``, plus
    T - 1 times before the first step for a variation.
    """
    x = edit_start(process, unguided, edit, noise("editing start"))
    if edit.unknown is not None:
        denoise = keep_known(process, denoise, edit.images, edit.unknown)
    yield from resampled_steps(process, sampler, denoise, x, noise, edit.passes, edit.config.inpaint_jump)


def edit_start(process: Process, unguided: Denoise, edit: Edit, fresh: Tensor) -> Tensor:
    """The noisy images from which the last step of ``process`` starts.

    They are ``sqrt(ᾱ) image + sqrt(1 − ᾱ) fresh``; at strength 1 ``fresh`` alone, as in sampling from noise, because
    the little signal that remains at the end of a process shows in color and brightness. Known pixels keep theirs.

    A variation starts from the noise found by ``ddim_inversion`` (Song et al. 2021, section 4.3), rotated towards
    ``fresh`` by variation · π/2, which preserves its variance.
    """
    last = process.num_timesteps - 1
    noised = process.q_sample(edit.images, last, fresh)
    if edit.strength < 1:
        signal, x = math.sqrt(process.alphas_cumprod[last]) * edit.images, noised
    else:
        signal, x = torch.zeros_like(fresh), fresh
    if edit.config.variation is not None:
        inverted = edit.images
        for step in ddim_inversion(process, unguided, edit.images):
            inverted = step.x
        angle = edit.config.variation * math.pi / 2
        x = signal + math.cos(angle) * (inverted - signal) + math.sin(angle) * (x - signal)
    return x if edit.unknown is None else torch.where(edit.unknown, x, noised)


def keep_known(process: Process, denoise: Denoise, images: Tensor, unknown: Tensor) -> Denoise:
    """``denoise`` with ``images`` [N, C, H, W] as its expected image wherever ``unknown`` [N, 1, H, W] is False.

    There every step follows the posterior of the known image, with the noise that x_t already contains, so that any
    sampler ends exactly at the image.
    """
    share = unknown.to(images.dtype)

    def known(x: Tensor, t: int) -> Prediction:
        p = denoise(x, t)
        alpha_bar = float(process.alphas_cumprod[t])
        signal, sigma = math.sqrt(alpha_bar), math.sqrt(1 - alpha_bar)
        variance = float(process.posterior_log_variance_clipped[t])
        return Prediction(
            x_start=torch.where(unknown, p.x_start, images),
            eps=torch.where(unknown, p.eps, (x - signal * images) / sigma),
            mean=torch.where(unknown, p.mean, process.posterior_mean(images, x, t)),
            log_variance=variance + share * (p.log_variance - variance),  # p's may be a float
        )

    return known


def resampled_steps(
    process: Process, sampler: Sampler, denoise: Denoise, x: Tensor, noise: NamedNoise, passes: int, jump: int
) -> Iterator[Step]:
    """``sampler`` down ``process`` from x in segments of ``jump`` steps, with ``passes`` consecutive passes of each.

    Before every further pass the sample is noised again, to the start of the segment (RePaint, Lugmayr et al. 2022,
    algorithm 1), which gives new content several attempts to match the known pixels. ``passes`` × T steps; a multistep
    sampler restarts in each segment. One pass is the plain sampler.
    """
    levels = [*process.alphas_cumprod.tolist(), 1.0]  # by step; the last is [-1], the clean image
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
    # Not the names of plain sampling: an image sampled with the same seed contains that noise, and editing it would
    # add the same noise again.
    return noise(f"editing step {t}, pass {number}")
