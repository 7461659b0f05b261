"""Guidance and thresholding: wrappers of the denoiser, independent of network and sampler.

They wrap one of two layers (see the top of samplers.py):

- the network, whose mean and variance channels are still separate: ``extrapolated`` has a network's call
  ``(x, t [N]) → output`` and works with any sampler, or as the model of ``p_sample_loop``;
- ``denoise(x, t int) → Prediction``: ``guidance_interval``.

``classifier_guided`` needs both: it reads the network's output, and shifts the expected image that follows from it.
``thresholding`` returns the ``denoised_fn`` of a prediction. ``guided_denoiser`` combines them as configured.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..batch import Conditioning
from ..config import Fault, InputError, lookup, named, option, settings
from .process import Process, at_least_float32
from .samplers import Denoise, Model, Prediction

GRADIENTS = ("x_t", "x_start")
FORMS = ("mean", "score")
DEFAULT_SCALE = 3.0  # of classifier-free guidance, where there is a condition

Similarity = Callable[[Tensor, Tensor], Tensor]
Range = tuple[float, float]
_LEAST_DEVIATION = 1e-9
_GRADIENT_SCALE = 2.0**6  # keeps half-precision gradients clear of underflow; a power of two is exact


@settings
class GuidanceConfig:
    """Guidance"""

    guidance_scale: float | None = option(
        None,
        "scale of classifier-free guidance; 1 = off, larger values follow the caption more closely; "
        f"none = {DEFAULT_SCALE:g} for a conditional generator, else 1",
        free=True,
    )
    guidance_scale_end: float | None = option(
        None,
        "scale at the image end of the process, reached linearly in time from guidance_scale at the noise end; none "
        "= constant",
        free=True,
    )
    guidance_rescale: float = option(
        0.0,
        "share of the guided prediction rescaled to the conditional one's standard deviation, 0–1, against excess "
        "contrast at large scales; 0 = off",
        free=True,
        least=0,
        most=1,
    )
    guidance_interval: tuple[float, ...] = option(
        (0.0, 1.0), "guided part of the process, LOW,HIGH as fractions of T; 0 = image, 1 = noise", free=True
    )
    perturbed_attention_scale: float = option(
        0.0,
        "scale of perturbed-attention guidance, away from the prediction in which each position attends only to "
        "itself, so that distant parts of the image agree; 0 = off",
        free=True,
    )
    perturbed_attention_interval: tuple[float, ...] = option(
        (0.0, 1.0), "part of the process with perturbed-attention guidance, as guidance_interval", free=True
    )
    thresholding: str = option(
        "static",
        "limit of the predicted image: static clips it to the valid range, dynamic rescales it by its percentile "
        "(for guidance scales above about 5)",
        choices=("none", "static", "dynamic"),
        free=True,
    )
    dynamic_percentile: float = option(
        0.995,
        "percentile of |x_start|, as a fraction, that dynamic thresholding maps to the limit",
        free=True,
        needs=("thresholding", "dynamic"),
        above=0,
        most=1,
    )

    def faults(self) -> Iterator[Fault]:
        for name in ("guidance_interval", "perturbed_attention_interval"):
            ends = getattr(self, name)
            if len(ends) != 2 or not 0 <= ends[0] <= ends[1] <= 1:
                yield Fault.of(self, name, "must be LOW,HIGH with 0 <= LOW <= HIGH <= 1")

    def scales(self, conditional: bool) -> tuple[float, float]:
        """The scales of classifier-free guidance at the noise end and at the image end of the process; 1 = off.

        conditional: whether there is a caption, class or image embedding to guide by. Without one, a scale other than 1
                     raises InputError.
        """
        default = DEFAULT_SCALE if conditional else 1.0
        start = default if self.guidance_scale is None else self.guidance_scale
        end = start if self.guidance_scale_end is None else self.guidance_scale_end
        for name, scale in (("guidance_scale", start), ("guidance_scale_end", end)):
            if scale != 1 and not conditional:
                rule = "there is no caption, class or image embedding to guide by: set it to 1, or leave it out"
                raise InputError(Fault(name, rule, scale))
        return start, end

    def passes(self, conditional: bool) -> int:
        """Forward passes of the network per sample and evaluation, at most: 1, and 1 for each guidance."""
        return 1 + (self.scales(conditional) != (1, 1)) + (self.perturbed_attention_scale != 0)

    def at_scale(self, scale: float) -> GuidanceConfig:
        """The same with a constant scale."""
        return replace(self, guidance_scale=scale, guidance_scale_end=None)

    def off(self) -> GuidanceConfig:
        """The same without guidance."""
        return replace(self.at_scale(1.0), perturbed_attention_scale=0.0)


def _joined(cond: Conditioning, null: Conditioning | None, perturbed: Tensor | None) -> Conditioning:
    """The conditions that ``extrapolated`` reads; perturbed: N times False, to add samples with perturbed attention."""
    parts = [_with_embedding_mask(cond)]
    if null is not None:
        parts.append(_with_embedding_mask(null))
    if perturbed is not None:
        parts = [replace(part, perturbed=perturbed) for part in parts]
        parts.append(replace(parts[0], perturbed=~perturbed))
    return parts[0] if len(parts) == 1 else Conditioning.concat(parts)


def extrapolated(model: Model, joined: Conditioning, scale: float, perturbed_scale: float, rescale: float) -> Model:
    """A network ``(x, t) → null + scale × (cond − null) + perturbed_scale × (cond − perturbed)``.

    The first difference is classifier-free guidance (Ho & Salimans 2022, with scale = w + 1); the second is
    perturbed-attention guidance (Ahn et al. 2024), for which the network is evaluated with self-attention from every
    position to itself alone. All parts go through ``model`` as one batch. Only the C mean channels are guided; those of
    a learned variance are the conditional ones, because extrapolation takes them out of the range of training.

    joined: 2N or 3N conditions: the N given ones, the N null ones unless scale is 1, and the given ones with
            ``perturbed`` set unless perturbed_scale is 0.
    rescale: share of the result that is scaled, for each sample, to the standard deviation of the conditional part (Lin
            et al. 2023, equation 16).
    """
    parts = 1 + (scale != 1) + (perturbed_scale != 0)

    def guided(x: Tensor, t: Tensor) -> Tensor:
        outputs = at_least_float32(model(torch.cat([x] * parts), torch.cat([t] * parts), cond=joined)).chunk(parts)
        means = [output[:, : x.shape[1]] for output in outputs]
        mean = means[0] if scale == 1 else torch.lerp(means[1], means[0], scale)
        if perturbed_scale:
            mean = mean + perturbed_scale * (means[0] - means[-1])
        if rescale:
            ratio = _deviation(means[0]) / _deviation(mean).clamp(min=_LEAST_DEVIATION)
            mean = mean * (1 + rescale * (ratio - 1))
        return torch.cat([mean, outputs[0][:, x.shape[1] :]], dim=1)

    return guided


def _deviation(values: Tensor) -> Tensor:
    """The standard deviation of each sample, [N, 1, …]."""
    return values.std(tuple(range(1, values.dim())), keepdim=True)


def _with_embedding_mask(cond: Conditioning) -> Conditioning:
    """``cond`` with an explicit ``embedding_mask``, because both halves must have the same fields."""
    if cond.image_embedding is None or cond.embedding_mask is not None:
        return cond
    count, device = len(cond.image_embedding), cond.image_embedding.device
    return replace(cond, embedding_mask=torch.ones(count, dtype=torch.bool, device=device))


@dataclass(frozen=True)
class ClassifierGuidance:
    """Guidance by a classifier.

    similarity: (x [N, C, H, W], t [N] as the network's time input) → [N], log p(caption | x) up to a constant.
    scale:      0 = off, 1 = Bayes' rule.
    gradient:   "x_t" = of the similarity of the noisy image, at its noise level; "x_start" = of the predicted image, at
                t = 0, backpropagated through the generator (slower).
    form:       "score" = the score is shifted, for every sampler (Dhariwal & Nichol 2021, algorithm 2); "mean" = the
                mean of x_{t-1} is, for ``ancestral`` alone (algorithm 1).
    limit_first: limit the expected image before the score is shifted and not after it, as Guided-Diffusion does.
    process:    the noise that the classifier was trained on: it is shown the step of it with the nearest level; None =
                the generator's.
    """

    similarity: Similarity
    scale: float
    gradient: str = "x_t"
    form: str = "score"
    limit_first: bool = False
    process: Process | None = None

    def __post_init__(self):
        lookup(dict.fromkeys(FORMS), self.form, "classifier_form")
        lookup(dict.fromkeys(GRADIENTS), self.gradient, "classifier_gradient")


def similarity_gradient(similarity: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """∇_x of each sample's similarity, of x's shape."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return torch.autograd.grad(similarity(x).sum() * _GRADIENT_SCALE, x)[0] / _GRADIENT_SCALE


def classifier_guided(
    process: Process, model: Model, classifier: ClassifierGuidance, limit: Callable[[Tensor], Tensor] | None
) -> Denoise:
    """``model`` as a denoiser guided by scale × ∇ log p(caption | x_t).

    In the form "mean", the mean of x_{t-1} is shifted by its variance × scale·∇ (Dhariwal & Nichol 2021, algorithm 1).
    In the form "score", eps − σ·scale·∇ (algorithm 2), which is equivalent to x_start + (σ²/α)·scale·∇: so it works for
    every prediction type and every sampler. ``limit`` applies to x_start: in the form "mean" as the network predicts
    it, in the form "score" to the shifted one, unless ``limit_first``.
    """
    shown = classifier.process or process

    def denoise(x: Tensor, t: int) -> Prediction:
        alpha_bar = float(process.alphas_cumprod[t])
        level = t if shown is process else shown.nearest_step(alpha_bar)
        steps, noise = process.model_steps(x, t), shown.model_steps(x, level)
        if classifier.gradient == "x_t":
            output = model(process.model_input(x, t), steps)
            gradient = similarity_gradient(lambda noisy: classifier.similarity(noisy, noise), x)
        else:
            output, gradient = _through_model(x, t, steps, noise)
        shift = classifier.scale * gradient
        if classifier.form == "mean":
            p = process.predict(output, x, t, clip_denoised=False, denoised_fn=limit)
            assert p.variance is not None
            return replace(p, mean=p.mean + p.variance * shift)

        def shifted(x_start: Tensor) -> Tensor:
            x_start = limit(x_start) if limit and classifier.limit_first else x_start
            x_start = x_start + _gain(alpha_bar) * shift
            return limit(x_start) if limit and not classifier.limit_first else x_start

        p = process.predict(output, x, t, clip_denoised=False, denoised_fn=shifted)
        # The mean of a network that predicts the mean itself must follow x_start too, as with the other predictions.
        return replace(p, mean=process.posterior_mean(p.x_start, x, t))

    def _through_model(x: Tensor, t: int, steps: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """The model's output, and the gradient of its predicted image's similarity. One evaluation of the model."""
        outputs = []

        def expected(noisy: Tensor) -> Tensor:
            outputs.append(model(process.model_input(noisy, t), steps))
            x_start = process.predict(outputs[0], noisy, t, clip_denoised=False).x_start
            if limit is not None:  # straight-through: the classifier's input is limited, the gradient ignores the limit
                x_start = x_start + (limit(x_start) - x_start).detach()
            return classifier.similarity(x_start, torch.zeros_like(noise))

        gradient = similarity_gradient(expected, x)
        return outputs[0].detach(), gradient

    return denoise


def _gain(alpha_bar: float) -> float:
    """σ²/α; 0 without any signal, where nothing is known about the image."""
    return math.sqrt(1 / alpha_bar - 1) * math.sqrt(1 - alpha_bar) if alpha_bar > 0 else 0.0


def guidance_interval(process: Process, inside: Denoise, outside: Denoise, low: float, high: float) -> Denoise:
    """``inside`` for steps in [low, high] of the original process, as fractions of T; ``outside`` for the others.

    Guidance harms at high noise and has no effect at low noise (Kynkäänniemi et al. 2024).
    """

    def denoise(x: Tensor, t: int) -> Prediction:
        return (inside if low <= process.fraction(t) <= high else outside)(x, t)

    return denoise


def dynamic_threshold(x_start: Tensor, percentile: float) -> Tensor:
    """Clip each sample to [-s, s] and divide by s, its ``percentile`` of |x_start|, at least 1 (Saharia et al. 2022,
    section 2.3)."""
    size = x_start[0].numel()
    rank = percentile * (size - 1)  # between the order statistics floor(rank) and floor(rank) + 1, counted from 0
    below = min(int(rank), size - 1)
    # topk, because torch.quantile is limited to 16 million elements
    top = x_start.abs().flatten(1).topk(size - below).values
    lower, upper = top[:, -1], top[:, max(size - below - 2, 0)]
    s = torch.lerp(lower, upper, rank - below).clamp(min=1).view(-1, *[1] * (x_start.dim() - 1))
    return x_start.clamp(-s, s) / s


def thresholding(config: GuidanceConfig, value_range: Range | None) -> Callable[[Tensor], Tensor] | None:
    """The thresholding of an expected image, or None.

    value_range: smallest and largest valid value; None = unbounded, as for latents, for which any thresholding raises
                 InputError.
    """
    if config.thresholding == "none":
        return None
    if value_range is None:
        rule = f"is {config.thresholding}, but the generator's values have no limits: set it to none"
        raise InputError(Fault("thresholding", rule))
    low, high = value_range
    if config.thresholding == "static":
        return functools.partial(torch.clamp, min=low, max=high)
    limit = functools.partial(dynamic_threshold, percentile=config.dynamic_percentile)
    if (low, high) == (-1, 1):
        return limit
    middle, half = (low + high) / 2, (high - low) / 2
    return lambda x_start: limit((x_start - middle) / half) * half + middle


def guided_denoiser(
    process: Process,
    model: Model,
    cond: Conditioning | None,
    null: Conditioning | None,
    config: GuidanceConfig,
    classifier: ClassifierGuidance | None = None,
    value_range: Range | None = (-1.0, 1.0),
) -> Denoise:
    """The denoiser of N samples under ``cond``, guided and thresholded as configured, for a sampler.

    null:        the negative condition of classifier-free guidance; not used at scale 1.
    classifier:  guides too, in the interval of classifier-free guidance.
    value_range: of valid images; None = unbounded.

    Where neither classifier-free nor perturbed-attention guidance applies, the network is evaluated for the N samples
    alone. Everything that does not depend on x is computed once. Raises InputError for classifier-free guidance without
    a condition or ``null``, and for thresholding of unbounded values.
    """
    limit = thresholding(config, value_range)
    start, end = config.scales(cond is not None and cond.droppable)
    if null is None and (start, end) != (1.0, 1.0):
        rule = f"null is missing: give it, or set the scale to 1 (and leave out {named('guidance_scale_end')})"
        raise InputError(Fault("guidance_scale", rule, start))
    by_class = classifier if classifier is not None and classifier.scale != 0 else None
    (low, high), (first, last) = config.guidance_interval, config.perturbed_attention_interval

    @functools.cache
    def joined(free: bool, perturbed: bool, count: int, device: torch.device) -> Conditioning:
        nowhere = torch.zeros(count, dtype=torch.bool, device=device) if perturbed else None
        return _joined(cond or Conditioning(), null if free else None, nowhere)

    def denoise(x: Tensor, t: int) -> Prediction:
        here = process.fraction(t)
        inside = low <= here <= high
        scale = end + (start - end) * here if inside else 1.0
        perturbed_scale = config.perturbed_attention_scale if first <= here <= last else 0.0
        network: Model = functools.partial(model, cond=cond)
        if scale != 1 or perturbed_scale:
            conds = joined(scale != 1, perturbed_scale != 0, len(x), x.device)
            network = extrapolated(model, conds, scale, perturbed_scale, config.guidance_rescale)
        if by_class is not None and inside:
            return classifier_guided(process, network, by_class, limit)(x, t)
        return process.denoiser(network, clip_denoised=False, denoised_fn=limit)(x, t)

    return denoise
