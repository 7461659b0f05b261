"""Guidance and thresholding: wrappers of the denoiser, of which neither network nor sampler knows.

Two places to stand (the layers are at the top of samplers.py):

- around a network, where the channels can still be told apart: ``classifier_free`` has a network's call
  ``(x, t [N]) → output`` and can be given to any sampler, or to ``p_sample_loop`` as its model;
- around ``denoise(x, t int) → Prediction``: ``guidance_interval``.

``classifier_guided`` stands at both: it needs the network's output, and shifts the expected image that follows from it.
``thresholding`` gives the ``denoised_fn`` of a prediction. ``guided_denoiser`` puts them together as configured.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..batch import Conditioning
from ..config import lookup, option
from ..errors import InputError
from .forward_process import ForwardProcess, full_precision
from .gaussian_diffusion import GaussianDiffusion, Model
from .samplers import Denoise, Prediction

THRESHOLDING = ("none", "static", "dynamic")
GRADIENTS = ("x_t", "x_start")

Similarity = Callable[[Tensor, Tensor], Tensor]
_GRADIENT_UNIT = 2.0**6  # keeps a half-precision backward pass away from the smallest numbers; a power of two is exact


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


@dataclass(frozen=True)
class ClassifierGuidance:
    """Guidance by a classifier that knows what the image is to show.

    similarity: (x [N, C, H, W], t [N] as the network sees it) → [N], log p(caption | x) up to a constant.
    scale:      strength; 0 = off, 1 = what Bayes' rule asks for.
    gradient:   "x_t" = the classifier looks at the noisy image, at its level of noise; "x_start" = it looks at the
                expected image, at t = 0, and the gradient passes through the generator (slower).
    """

    similarity: Similarity
    scale: float
    gradient: str = "x_t"

    def __post_init__(self):
        lookup(dict.fromkeys(GRADIENTS), self.gradient, "classifier_gradient")


def similarity_gradient(similarity: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """∇_x of each sample's similarity, of x's shape."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return torch.autograd.grad(similarity(x).sum() * _GRADIENT_UNIT, x)[0] / _GRADIENT_UNIT


def classifier_guided(
    process: GaussianDiffusion, model: Model, classifier: ClassifierGuidance, limit: Callable[[Tensor], Tensor] | None
) -> Denoise:
    """``model`` as a denoiser whose score is shifted by scale × ∇ log p(caption | x_t).

    eps − σ·scale·∇ (Dhariwal & Nichol 2021, algorithm 2) is, for the expected image, x_start + (σ²/α)·scale·∇. In that
    form it holds for every prediction type and every sampler; ``limit`` applies to what comes out.
    """

    def denoise(x: Tensor, t: int) -> Prediction:
        steps = process.model_steps(x, t)
        if classifier.gradient == "x_t":
            output = model(x, steps)
            gradient = similarity_gradient(lambda noisy: classifier.similarity(noisy, steps), x)
        else:
            output, gradient = _through_model(x, t, steps)
        # σ²/α, and 0 where no signal is left: there nothing can be said about the image.
        gain = process.at("xstart_from_eps", t, x) * process.at("sqrt_one_minus_alphas_cumprod", t, x)
        shift = classifier.scale * gain * gradient

        def shifted(x_start: Tensor) -> Tensor:
            return x_start + shift if limit is None else limit(x_start + shift)

        p = process.predict(output, x, t, clip_denoised=False, denoised_fn=shifted)
        # A network that predicts the mean itself must have it follow x_start here, as it does with the others.
        return replace(p, mean=process.posterior_mean(p.x_start, x, t))

    def _through_model(x: Tensor, t: int, steps: Tensor) -> tuple[Tensor, Tensor]:
        """The model's output, and the gradient of its expected image's similarity. One evaluation of the model."""
        outputs = []

        def expected(noisy: Tensor) -> Tensor:
            outputs.append(model(noisy, steps))
            x_start = process.predict(outputs[0], noisy, t, clip_denoised=False).x_start
            if limit is not None:  # what the classifier sees is limited; the gradient passes as if it were not
                x_start = x_start + (limit(x_start) - x_start).detach()
            return classifier.similarity(x_start, torch.zeros_like(steps))

        gradient = similarity_gradient(expected, x)
        return outputs[0].detach(), gradient

    return denoise


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
    classifier: ClassifierGuidance | None = None,
) -> Denoise:
    """The denoiser of N samples under ``cond``, guided and thresholded as configured, for a sampler.

    null:       what to be guided away from; not used at scale 1, where the network is evaluated once.
    classifier: guides too, inside the same interval.

    Everything that does not depend on x is prepared here, once for a run. Raises InputError for classifier-free
    guidance without ``cond`` or ``null``.
    """
    limit = thresholding(config)
    network = functools.partial(model, cond=cond)
    plain = process.denoiser(network, clip_denoised=False, denoised_fn=limit)
    if config.guidance_scale != 1:
        if cond is None or null is None:
            raise InputError(
                f"guidance_scale is {config.guidance_scale}, but there is no caption or class to guide by: set it to 1"
            )
        network = classifier_free(model, cond, null, config.guidance_scale)
    if classifier is not None and classifier.scale != 0:
        guided = classifier_guided(process, network, classifier, limit)
    elif config.guidance_scale != 1:
        guided = process.denoiser(network, clip_denoised=False, denoised_fn=limit)
    else:
        return plain
    low, high = config.guidance_interval
    return guidance_interval(process, guided, plain, low, high)
