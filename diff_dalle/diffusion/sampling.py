"""From seeds and conditions to samples: process, guided denoiser and sampler combined.

So are the previews of a generator in training. Their guidance is in its checkpoint, and is that of all sampling from it
unless told otherwise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..batch import SELF_COND, Conditioning, moved
from ..config import Fault, InputError, faults_of, named, option, section, settings
from ..config.bounds import MAX_BATCH, MAX_STEPS
from ..images.signal import Signal
from ..randomness import Draw, check_seeds
from .diffusion_config import DiffusionConfig, create_gaussian_diffusion
from .editing import Edit, EditConfig, edited_steps, shortened
from .guidance import ClassifierGuidance, GuidanceConfig, guidance_interval, guided_denoiser, thresholding
from .log_snr import LogSnrProcess, LogSnrSteps
from .parametrization import VARIANCES
from .process import Process
from .samplers import SAMPLERS, TWICE, Denoise, Model, Prediction, Step, is_random
from .spacing import SPACINGS, default_spacing, sections_of


def with_steps(recorded: Mapping, flag: Callable[[str], str]) -> Mapping:
    """``SamplerConfig.earlier`` of a section in which ``flag`` gives the names of the settings, each possibly with a
    list of values."""
    old, new = flag("timestep_respacing"), flag("steps")
    is_complete = {old, flag("sampler"), flag("eta")} <= recorded.keys() and new not in recorded
    found = recorded.get(old) if is_complete else None
    several = found if isinstance(found, list) else [found]
    if not all(isinstance(each, (str, int)) and (not each or str(each).strip().isdecimal()) for each in several):
        return recorded
    numbers = [int(each or 0) for each in several]
    rest = {name: value for name, value in recorded.items() if name != old}
    return rest | {new: numbers if isinstance(found, list) else numbers[0]}


DEFAULT_SAMPLER, DEFAULT_STEPS = "dpm++2m", 30
RESPACED_SAMPLER = "ancestral"  # that of Guided-Diffusion, for steps in its form
OWN_SETTINGS = {"eta": "ddim"}  # settings that are 0 for all samplers but one
_RESPACING = "timestep_respacing"
_OUR_STEPS = ("steps", "spacing")


@settings
class SamplerConfig:
    """Sampler"""

    sampler: str | None = option(
        None,
        f"sampling algorithm; none = {DEFAULT_SAMPLER}, with timestep_respacing {RESPACED_SAMPLER}",
        choices=SAMPLERS,
        free=True,
    )
    steps: int | None = option(
        None,
        f"number of sampling steps; 0 = all steps of the process, none = {DEFAULT_STEPS}, or all if fewer",
        free=True,
        least=0,
        most=MAX_STEPS,
    )
    eta: float = option(0.0, "randomness of ddim; 0 = deterministic, 1 = as random as ancestral", free=True, least=0)
    spacing: str | None = option(
        None,
        "spacing of the steps: even from first to last, leading or trailing with a constant stride from the clean or "
        "noise end, even in log_snr or in rectified-flow time, or karras (rho 7); none = log_snr for the noise "
        "schedule linear, even for flow, else flow",
        choices=SPACINGS,
        free=True,
    )
    timestep_respacing: str | None = option(
        None,
        "steps in Guided-Diffusion's notation, in place of steps and spacing: 250, or 10,15,20 for the number in "
        "each third of the process, or ddim25 for a constant stride, or fast27",
        free=True,
    )

    def faults(self) -> Iterator[Fault]:
        steps: object = self.steps
        if steps is not None and not isinstance(steps, int):
            yield Fault.of(self, "steps", f"must be a whole number: give sections with {named(_RESPACING)}")
        if self.timestep_respacing is not None:
            for name in _OUR_STEPS:
                if getattr(self, name) is not None:
                    rule = f"and {named(_RESPACING)} exclude each other: leave one of them out"
                    yield Fault(name, rule)
            yield from faults_of(lambda: sections_of(self.timestep_respacing or "1"), _RESPACING)
        for name, sampler in OWN_SETTINGS.items():
            if getattr(self, name) and self.algorithm != sampler:
                yield Fault.of(self, name, f"only the {named('sampler')} {sampler} has it, not {self.algorithm}")

    @staticmethod
    def earlier(recorded: Mapping) -> Mapping:
        """A complete section of a version in which ``timestep_respacing`` was also a number of steps to space, ""
        meant all steps, and there was no ``steps``; any other mapping as it is."""
        return with_steps(recorded, str)

    @property
    def algorithm(self) -> str:
        """The sampler, of SAMPLERS."""
        return self.sampler or (DEFAULT_SAMPLER if self.timestep_respacing is None else RESPACED_SAMPLER)

    @property
    def evaluations(self) -> int:
        """Evaluations of the denoiser per step, at most."""
        return 2 if self.algorithm in TWICE else 1

    def in_steps(self, count: int) -> SamplerConfig:
        """The same algorithm in another number of steps, spaced as is usual: not every spacing has every number."""
        return replace(self, sampler=self.algorithm, steps=count, spacing=None, timestep_respacing=None)

    def changed(self, **settings) -> SamplerConfig:
        """The same with some settings changed; of ``OWN_SETTINGS``, another sampler has only those given too.

        ``timestep_respacing`` takes the place of sampler, steps and spacing that are not given too; steps or spacing
        take its place.
        """
        if settings.get(_RESPACING) is not None:
            settings = {"sampler": None, "steps": None, "spacing": None, **settings}
        elif any(settings.get(name) is not None for name in _OUR_STEPS):
            settings = {_RESPACING: None, **settings}
        algorithm = replace(self, **dict.fromkeys(OWN_SETTINGS, 0.0) | settings).algorithm
        others = {name: 0.0 for name, sampler in OWN_SETTINGS.items() if sampler != algorithm}
        return replace(self, **others | settings)

    def count(self, total: int) -> int:
        """The number of steps to take of a process with ``total`` steps. InputError for more than those."""
        count = min(DEFAULT_STEPS, total) if self.steps is None else self.steps or total
        if count > total:
            raise InputError(Fault("steps", f"must be at most {total}, the steps of the process", count))
        return count

    def process(self, diffusion: DiffusionConfig) -> Process:
        """The process with the steps to take. InputError if it has no such steps."""
        if diffusion.is_flow:
            spacing = self.spacing or default_spacing(diffusion.noise_schedule)
            return self.steps_of(LogSnrProcess(diffusion.flow), spacing, variance=VARIANCES[diffusion.variance])
        if self.timestep_respacing is not None:
            return create_gaussian_diffusion(diffusion, self.timestep_respacing)
        spacing = self.spacing or default_spacing(diffusion.noise_schedule)
        return create_gaussian_diffusion(diffusion, str(self.count(diffusion.diffusion_steps)), spacing)

    def steps_of(self, process: LogSnrProcess, spacing: str = "even", **options: Any) -> LogSnrSteps:
        """The steps to take of a process in continuous time. spacing: if none is set; options: of
        ``LogSnrProcess.steps``. InputError for steps that it does not have."""
        if (sections := self.timestep_respacing) is not None:
            rule = f"a process in log-SNR has no steps to choose from: set {named('steps')} to their number"
            raise InputError(Fault(_RESPACING, rule, sections))
        count = DEFAULT_STEPS if self.steps is None else self.steps
        return process.steps(count, spacing=self.spacing or spacing, **options)

    def check_edit(self, edit: EditConfig) -> None:
        """InputError if this sampler cannot perform the edit."""
        if edit.variation is not None and (is_random(self.algorithm) or self.eta):
            used = f"ddim with eta {self.eta:g}" if self.eta else self.algorithm
            names = ", ".join(name for name in SAMPLERS if not is_random(name))
            rule = f"requires a deterministic {named('sampler')} ({names}) without {named('eta')}, not {used}"
            raise InputError(Fault("variation", rule))


def preview_share_option(needs: Sequence[str] = ()) -> Any:
    """The setting that all previews share."""
    return option(
        0.05,
        "maximum share of the run for all previews, in forward passes (three per sample in a training step): in "
        "short runs they have fewer images and sampling steps, at least one; none = no limit",
        free=True,
        needs=needs,
        above=0,
    )


@settings
class PreviewConfig:
    """Preview grids"""

    sample_interval: int = option(
        5000, "steps between preview grids, with another at the last step; 0 = no previews", free=True, least=0
    )
    preview_samples: int = option(
        16,
        "images in a preview grid, of the first captions of val_data_dir, or else of data_dir",
        free=True,
        needs=("sample_interval",),
        most=MAX_BATCH,
    )
    preview_share: float | None = preview_share_option(needs=("sample_interval",))
    sampler: SamplerConfig = section(SamplerConfig, needs=("sample_interval",), called={"steps": "preview_steps"})
    guidance: GuidanceConfig = section(GuidanceConfig)

    def faults(self) -> Iterator[Fault]:
        if self.preview_samples < 1:
            off = f"{named('sample_interval')} 0 turns previews off"
            yield Fault.of(self, "preview_samples", f"must be at least 1 ({off})")

    def check(self, diffusion: DiffusionConfig, signal: Signal, conditional: bool) -> None:
        """InputError for previews that cannot be sampled, before training instead of at the first preview.

        conditional: whether the generator has captions or classes.
        """
        self.guidance.scales(conditional)
        if self.sample_interval:
            self.sampler.process(diffusion)
            thresholding(self.guidance, signal.value_range)


@dataclass(frozen=True, eq=False)
class SampleBatch:
    """N samples to draw.

    signal: their channels and value range.
    size:   their height and width.
    seeds:  N; all noise of a sample follows from its seed, so it is the same in any batch.
    cond:   their conditions.
    null:   their negative conditions in classifier-free guidance; None = unconditional, or not guided.
    edit:   N images of that size to edit; another seed gives another edit.
    stage:  index of the generator in its cascade: each draws its own noise.
    control_interval: part of the process in which ``cond.control`` has an effect, as fractions of it: 0 = image, 1 =
            noise.
    """

    signal: Signal
    size: tuple[int, int]
    seeds: Sequence[int]
    cond: Conditioning
    null: Conditioning | None = None
    edit: Edit | None = None
    stage: int = 0
    control_interval: tuple[float, ...] = (0.0, 1.0)

    @property
    def shape(self) -> tuple[int, int, int]:
        """[C, H, W] of one sample."""
        return (self.signal.channels, *self.size)


def sample_steps(
    generator: nn.Module,
    process: Process,
    batch: SampleBatch,
    sampler: SamplerConfig,
    guidance: GuidanceConfig,
    classifier: ClassifierGuidance | None = None,
) -> Iterator[Step]:
    """Every sampling step; the last step's ``x`` is [N, C, H, W], not clipped. An edit repeats steps (see editing.py).

    generator:  the network: called as ``generator(x, t, cond=…)``, with an ``encode_text(cond)`` that is called once;
                with an attribute ``self_conditioned`` that is True, it is shown its latest x_start.
    process:    with the steps to take.
    classifier: guides towards these N samples' captions.

    Raises InputError for guidance of unconditional samples, thresholding of a signal without value range, an edit whose
    images are not N of that size, and an edit that the sampler cannot perform.
    """
    device = next(generator.parameters()).device
    edit, seeds = batch.edit, batch.seeds
    if edit is not None:
        sampler.check_edit(edit.config)
        expected = (len(seeds), *batch.shape)
        if edit.images.shape != expected:
            raise InputError(f"images to edit have shape {list(edit.images.shape)}, but must have {list(expected)}")
        process, edit = shortened(process, edit.strength), edit.to(device)
    encode_text = cast("Callable[[Conditioning], Conditioning]", generator.encode_text)
    draw = seeds_draw(seeds, batch.stage, device)
    given = {"cond": batch.cond, "null": batch.null or Conditioning()}
    names = {f"{part} {name}": value for part, each in given.items() for name, value in each.present().items()}
    there = moved({"seeds": draw.index, **names}, device)  # in one copy
    draw.positions = there.pop("seeds")

    def encoded(part: str) -> Conditioning:
        values = {name.removeprefix(f"{part} "): value for name, value in there.items() if name.startswith(f"{part} ")}
        return encode_text(Conditioning.of(values))

    cond, null = encoded("cond"), None if batch.null is None else encoded("null")
    if edit is not None and edit.seen:
        cond, null = replace(cond, known=edit.known), null and replace(null, known=edit.known)

    def guided(null: Conditioning | None, guidance: GuidanceConfig, classifier=None) -> Denoise:
        controlled = denoiser(cond, null, guidance, classifier)
        low, high = batch.control_interval
        if (low, high) == (0.0, 1.0):
            return controlled
        plain = denoiser(cond.without_control(), null and null.without_control(), guidance, classifier)
        return guidance_interval(process, controlled, plain, low, high)

    def denoiser(cond: Conditioning, null: Conditioning | None, guidance: GuidanceConfig, classifier) -> Denoise:
        network = SelfConditioned(generator) if getattr(generator, "self_conditioned", False) else generator
        value_range = batch.signal.value_range
        denoise = guided_denoiser(process, network, cond, null, guidance, classifier, value_range)
        return network.watch(denoise) if isinstance(network, SelfConditioned) else denoise

    denoise = guided(null, guidance, classifier)

    def noise(name: str) -> Tensor:
        return draw.normal(name, batch.shape)

    options = {"eta": sampler.eta} if sampler.algorithm == "ddim" else {}
    walk = functools.partial(SAMPLERS[sampler.algorithm], **options)
    if edit is None:
        yield from walk(process, denoise, noise("sampling start"), lambda t: noise(f"sampling step {t}"))
    else:
        unguided = guided(None, guidance.off())
        yield from edited_steps(process, walk, denoise, unguided, edit, noise)


class SelfConditioned:
    """A network that is shown its latest expected x_start (Chen et al. 2022); nothing at first.

    That is the x_start after guidance and thresholding, of which both halves of a guided batch see the same.
    """

    def __init__(self, network: Model):
        self.network = network
        self.latest: Tensor | None = None

    def __call__(self, x: Tensor, t: Tensor, cond: Conditioning) -> Tensor:
        if self.latest is not None:
            copies = [len(x) // len(self.latest)] + [1] * (x.dim() - 1)
            cond = replace(cond, extra={**cond.extra, SELF_COND: self.latest.repeat(copies)})
        return self.network(x, t, cond=cond)

    def watch(self, denoise: Denoise) -> Denoise:
        """``denoise``, whose x_start the network is shown next."""

        def watched(x: Tensor, t: int) -> Prediction:
            prediction = denoise(x, t)
            self.latest = prediction.x_start
            return prediction

        return watched


def step_count(process: Process, edit: Edit | None = None) -> int:
    """The number of steps that ``sample_steps`` takes. InputError as ``shortened``."""
    if edit is None:
        return process.num_timesteps
    return edit.passes * shortened(process, edit.strength).num_timesteps


def seeds_draw(seeds: Sequence[int], stage: int, device: torch.device) -> Draw:
    """All random numbers of samples with these seeds, at a stage of a cascade. InputError as ``check_seeds``."""
    check_seeds(seeds)
    return Draw(stage, torch.tensor(list(seeds), dtype=torch.int64), device)


@torch.no_grad()
def sample_batch(
    generator: nn.Module,
    process: Process,
    batch: SampleBatch,
    sampler: SamplerConfig,
    guidance: GuidanceConfig,
    classifier: ClassifierGuidance | None = None,
    watch: Callable[[Step], object] | None = None,
) -> Tensor:
    """The samples at the end of ``sample_steps``, with the same arguments: [N, C, H, W] on the generator's device.

    watch: called with every step; what it raises ends the sampling.
    """
    for step in sample_steps(generator, process, batch, sampler, guidance, classifier):
        x = step.x
        if watch is not None:
            watch(step)
    return x
