"""What the stages of a cascade are about to do, for people: the settings that a checkpoint, defaults and what is given
resolve to, and classifiers that were trained on other noise."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence

from ..config import named, quantity, spelled
from ..diffusion.diffusion_config import FLOW, NoiseConfig
from ..diffusion.sampling import SamplerConfig
from ..diffusion.spacing import default_spacing
from .classifier import Guide
from .stage import Stage, StageJob

log = logging.getLogger(__name__)
_warn = functools.cache(log.warning)  # once in a process


def summary(stage: Stage, job: StageJob) -> str:
    """A line about a job that was checked: sampler, steps, spacing and guidance.

    Such as "ema.pt: ancestral, 250 steps (even), guidance scale 1, classifier scale 1 (mean)".
    """
    settings = job.settings
    start, end = settings.guidance.scales(stage.guidable(stage.conditioning(job.request, [0])))
    scale = f"{start:g}" if start == end else f"{start:g} to {end:g}"
    steps = quantity(stage.process(settings).num_timesteps, "step")
    eta = f" (eta {settings.sampler.eta:g})" if settings.sampler.eta else ""
    parts = [f"{settings.sampler.algorithm}{eta}", f"{steps} ({_spacing(stage, settings.sampler)})"]
    parts.append(f"guidance scale {scale}")
    if settings.guidance.perturbed_attention_scale:
        parts.append(f"perturbed attention scale {settings.guidance.perturbed_attention_scale:g}")
    if stage.classifier(settings) is not None:
        parts.append(f"classifier scale {settings.classifier_scale:g} ({settings.form})")
    return f"{stage.path}: {', '.join(parts)}"


def _spacing(stage: Stage, sampler: SamplerConfig) -> str:
    if sampler.timestep_respacing is not None:
        return sampler.timestep_respacing if not sampler.timestep_respacing.isdecimal() else "even"
    discrete = isinstance(stage.diffusion, NoiseConfig)
    return sampler.spacing or (default_spacing(stage.diffusion.noise_schedule) if discrete else "even")


def warn_of_other_noise(stages: Sequence[Stage], jobs: Sequence[StageJob]) -> None:
    """Say of each classifier that was trained on other noise than the generator that it guides."""
    for stage, job in zip(stages, jobs, strict=True):
        guide = stage.classifier(job.settings)
        for text in _other_noise(guide, stage) if guide is not None else ():
            _warn(text)


def _other_noise(guide: Guide, stage: Stage) -> Iterator[str]:
    own, other = ((each.noise_schedule, each.diffusion_steps) for each in (guide.diffusion, stage.diffusion))
    if own != other:
        trained = "{} schedule of {:,} steps"
        there = "straight path of a flow" if other[0] == FLOW else trained.format(*other)
        remedy = spelled(f"; one trained with {named('noise_schedule')} {other[0]} would fit better")
        yield (
            f"the classifier was trained on the {trained.format(*own)}, {stage.path} on the {there}: the classifier is "
            f"shown the steps with the nearest noise levels{remedy if other[0] not in (own[0], FLOW) else ''}"
        )
