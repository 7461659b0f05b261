"""Guidance and thresholding: wrappers of the denoiser, of which neither network nor sampler knows.

Two places to stand (the layers are at the top of samplers.py):

- around a network, where the channels can still be told apart: ``classifier_free`` has a network's call
  ``(x, t [N]) → output`` and can be given to any sampler, or to ``p_sample_loop`` as its model;
- around ``denoise(x, t int) → Prediction``: ``guidance_interval`` here, and whatever shifts a prediction by a gradient.

``thresholding`` gives the ``denoised_fn`` of a prediction. ``guided_denoiser`` puts them together as configured.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..batch import Conditioning
from ..config import lookup, option
from ..errors import InputError
from .forward_process import ForwardProcess, full_precision
from .gaussian_diffusion import GaussianDiffusion, Model
from .samplers import Denoise, Prediction

THRESHOLDING = ("none", "static", "dynamic")


@dataclass(frozen=True)
class GuidanceConfig:
    """Guidance"""

    guidance_scale: float = option(
        3.0, "strength of classifier-free guidance: 1 = off, above 1 follows the caption more closely", free=True
    )
    guidance_interval: tuple[float, ...] = option(
        (0.0, 1.0), "part of the process that is guided, LOW,HIGH as fractions of T (0 = image, 1 = noise)", free=True
    )
    thresholding: str = option(
        "static", "limit the expected image: static clips it to [-1, 1]; dynamic divides it by its percentile, which "
        "suits guidance scales above about 5", choices=THRESHOLDING, free=True,
    )  # fmt: skip
    dynamic_percentile: float = option(0.995, "quantile of |x_start| that dynamic thresholding maps to 1", free=True)

    def __post_init__(self):
        lookup(dict.fromkeys(THRESHOLDING), self.thresholding, "thresholding")
        ends = self.guidance_interval
        if len(ends) != 2 or not 0 <= ends[0] <= ends[1] <= 1:
            raise InputError(f"guidance_interval is {ends}, but must be LOW,HIGH with 0 <= LOW <= HIGH <= 1")
        if not 0 < self.dynamic_percentile <= 1:
            raise InputError(f"dynamic_percentile is {self.dynamic_percentile}, but must be above 0 and at most 1")


def classifier_free(model: Model, cond: Conditioning, null: Conditioning, scale: float) -> Model:
    """A network ``(x, t) → null + scale × (cond − null)`` (Ho & Salimans 2022, with scale = w + 1).

    Both halves go through ``model`` as one batch. Only the C channels about the mean are guided; those of a learned
    variance are the conditional ones, because extrapolated they leave the range that they were trained in.

    cond, null: of N samples each, with the same fields; ``null`` holds a negative prompt or ``cond.drop(...)``.
    """
    both = Conditioning.concat([cond, null])

    def guided(x: Tensor, t: Tensor) -> Tensor:
        output, baseline = full_precision(model(torch.cat([x, x]), torch.cat([t, t]), cond=both)).chunk(2)
        mean, null_mean = output[:, : x.shape[1]], baseline[:, : x.shape[1]]
        return torch.cat([torch.lerp(null_mean, mean, scale), output[:, x.shape[1] :]], dim=1)

    return guided


def guidance_interval(process: ForwardProcess, inside: Denoise, outside: Denoise, low: float, high: float) -> Denoise:
    """``inside`` for steps at [low, high] of the original process, as fractions of T; ``outside`` for the others.

    Guidance harms at high noise and is idle at low noise (Kynkäänniemi et al. 2024).
    """

    def denoise(x: Tensor, t: int) -> Prediction:
        return (inside if low <= process.fraction(t) <= high else outside)(x, t)

    return denoise


def dynamic_threshold(x_start: Tensor, percentile: float) -> Tensor:
    """Clip each sample to [-s, s] and divide by s, its ``percentile`` of |x_start|, at least 1 (Saharia et al. 2022,
    section 2.3)."""
    size = x_start[0].numel()
    place = percentile * (size - 1)  # between the order statistics at floor(place) and the next, counted from 0
    below = min(int(place), size - 1)
    # topk, because torch.quantile refuses more than 16 million numbers
    top = x_start.abs().flatten(1).topk(size - below).values
    lower, upper = top[:, -1], top[:, max(size - below - 2, 0)]
    s = torch.lerp(lower, upper, place - below).clamp(min=1).view(-1, *[1] * (x_start.dim() - 1))
    return x_start.clamp(-s, s) / s


def thresholding(config: GuidanceConfig) -> Callable[[Tensor], Tensor] | None:
    """What ``config`` does to an expected image; None for nothing."""
    return {
        "none": None,
        "static": functools.partial(torch.clamp, min=-1, max=1),
        "dynamic": functools.partial(dynamic_threshold, percentile=config.dynamic_percentile),
    }[config.thresholding]


def guided_denoiser(
    process: GaussianDiffusion,
    model: Model,
    cond: Conditioning | None,
    null: Conditioning | None,
    config: GuidanceConfig,
) -> Denoise:
    """The denoiser of N samples under ``cond``, guided and thresholded as configured, for a sampler.

    null: what to be guided away from; not used at scale 1, where the network is evaluated once. Everything that does
    not depend on x is prepared here, once for a run. Raises InputError for guidance without it.
    """
    limit = thresholding(config)
    plain = process.denoiser(functools.partial(model, cond=cond), clip_denoised=False, denoised_fn=limit)
    if config.guidance_scale == 1:
        return plain
    if cond is None or null is None:
        raise InputError(
            f"guidance_scale is {config.guidance_scale}, but there is no caption or class to guide by: set it to 1"
        )
    guided = process.denoiser(
        classifier_free(model, cond, null, config.guidance_scale), clip_denoised=False, denoised_fn=limit
    )
    low, high = config.guidance_interval
    return guidance_interval(process, guided, plain, low, high)
