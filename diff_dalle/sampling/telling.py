"""What people are told about sampling: the settings that a checkpoint, defaults and what is given resolve to,
classifiers that were trained on other noise, and a stage's steps, as a progress bar."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Iterator, Sequence

from tqdm import tqdm

from ..config import named, quantity, spelled
from ..diffusion.diffusion_config import FLOW, NoiseConfig
from ..diffusion.sampling import OWN_SETTINGS, SamplerConfig
from ..diffusion.spacing import default_spacing
from .classifier import Guide
from .stage import Progress, Stage, StageJob, Watch

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
    own = {name: getattr(settings.sampler, name) for name in OWN_SETTINGS}
    given = ", ".join(f"{name} {value:g}" for name, value in own.items() if value)
    algorithm = settings.sampler.algorithm + (f" ({given})" if given else "")
    parts = [algorithm, f"{steps} ({_spacing(stage, settings.sampler)})"]
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


class StepsBar:
    """A bar on stderr where that is a terminal or a notebook's.

    images:  that all processes make. batches: of this process, of which each takes the same number of steps.
    shown:   False = no bar anywhere. watch: called after every step too.
    """

    def __init__(self, title: str, images: int, batches: int, shown: bool, watch: Watch | None = None):
        self.watch, self.images, self.batches, self.made, self.finished, self.steps = watch, images, batches, 0, 0, 1
        visible = shown and (sys.stderr.isatty() or "ipykernel" in sys.modules)
        self.bar = tqdm(total=batches, desc=title, unit="step", dynamic_ncols=True, disable=not visible)
        self._tell()

    def __enter__(self) -> StepsBar:
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.close()

    def step(self, progress: Progress) -> None:
        """After each step of a batch; stages without steps take one for each batch."""
        self.steps, self.bar.total = progress.steps, self.batches * progress.steps
        self.bar.update(min(self.finished * self.steps + progress.step, self.bar.total) - self.bar.n)
        if self.watch:
            self.watch(progress)

    def batch(self, images: int) -> None:
        """After each batch, of so many images of all processes together."""
        self.made, self.finished = min(self.made + images, self.images), self.finished + 1
        self._tell()
        self.bar.update(self.finished * self.steps - self.bar.n)

    def _tell(self) -> None:
        self.bar.set_postfix_str(f"{self.made} of {self.images} images", refresh=False)
