"""How each stage of a system is sampled: one record, and the flags of every command by which a stage is given it.

A setting is one field, of StageSettings, SamplerConfig or GuidanceConfig. Every stage has it under the prefix of its
kind, except for those in ``ONLY``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, TypeVar

from ..config import (
    Fault,
    InputError,
    Leaf,
    add_optional,
    faults_of,
    leaves,
    named,
    option,
    overrides,
    quantity,
    section,
    settings,
    spelled,
)
from ..config.bounds import MAX_BATCH, MAX_SEED, MAX_SIDE
from ..diffusion.guidance import FORMS, GRADIENTS, GuidanceConfig
from ..diffusion.sampling import OWN_SETTINGS, RESPACED_SAMPLER, SamplerConfig, with_steps
from ..diffusion.spacing import TIME_SPACINGS
from .classifier import Guide

Class = TypeVar("Class")


@settings
class StageSettings:
    """Sampling settings of one stage"""

    sampler: SamplerConfig = section(SamplerConfig)
    guidance: GuidanceConfig = section(GuidanceConfig)
    classifier: str | Guide | None = option(
        None,
        "noised CLIP, or classifier of classes, that guides this stage too, or its checkpoint; `none` in a list = none",
    )
    classifier_scale: float = option(1.0, "scale of classifier guidance; 0 = off, 1 = Bayes' rule")
    classifier_gradient: str = option(
        GRADIENTS[0],
        "input of the classifier: the noisy image, or the predicted one (slower)",
        choices=GRADIENTS,
        needs=("classifier",),
    )
    classifier_form: str | None = option(
        None,
        "what the classifier shifts: the mean of an ancestral sampling step, as published, or the score, with any "
        "sampler; none = mean with ancestral, else score",
        choices=FORMS,
        needs=("classifier",),
    )
    batch_size: int = option(
        16,
        "images per batch and process; guidance doubles their memory; upsamplers and stage B: none = 4",
        least=1,
        most=MAX_BATCH,
    )
    seed: int | None = option(
        None, "seed of this stage's noise: image i uses seed + i; none = as the first stage", least=0, most=MAX_SEED
    )
    noise_level: float = option(
        0.0,
        "noise level of the low-resolution image, 0–1; higher values hide artifacts and generate more new detail",
    )
    blur_level: float = option(
        0.0, "standard deviation of the blur of the low-resolution image, in its pixels; 0 = no blur"
    )
    tile_size: int = option(
        0,
        "width and height in pixels of overlapping tiles that the network processes one after another to save memory; "
        "0 = the whole image",
        most=MAX_SIDE,
    )
    tile_overlap: int = option(32, "pixels shared by neighboring tiles; none = 32", needs=("tile_size",), most=MAX_SIDE)
    shift: float = option(
        1.0,
        "stages B and C: α/σ is divided by this, beside the shift of training; above 1 = more steps at high noise",
    )
    t_start: float = option(1.0, "stages B and C: time of the first step, 0–1; 1 = pure noise")
    t_end: float = option(
        0.0,
        "stages B and C: time up to which the steps are evenly spaced; the last one always leads to the clean sample",
    )

    def faults(self) -> Iterator[Fault]:
        if self.classifier_form == "mean" and self.sampler.algorithm != RESPACED_SAMPLER:
            rule = f"only the {named('sampler')} {RESPACED_SAMPLER} has it, not {self.sampler.algorithm}"
            yield Fault.of(self, "classifier_form", f"{rule}: set it to score, or leave it out")

    @property
    def form(self) -> str:
        """How a classifier guides, of FORMS."""
        return self.classifier_form or ("mean" if self.sampler.algorithm == RESPACED_SAMPLER else "score")

    def changed(self, **given: Any) -> StageSettings:
        """The same with other settings, by their names here, in SamplerConfig and in GuidanceConfig; None = as it is.

        ``sampler`` is that of SamplerConfig or a whole one. With ``timestep_respacing``, guidance that is not given is
        off: Guided-Diffusion, whose form of the steps that is, has none but that of a classifier. Raises InputError for
        impossible settings.
        """
        given = {name: value for name, value in given.items() if value is not None}
        usual = self.guidance
        if "timestep_respacing" in given:  # a setting of Guided-Diffusion, which has no guidance but a classifier's
            usual = replace(usual.off(), guidance_interval=(0.0, 1.0))
        sampler, guidance = given.pop("sampler", self.sampler), given.pop("guidance", usual)
        of_sampler = {} if isinstance(sampler, SamplerConfig) else {"sampler": sampler}
        sampler = self.sampler if of_sampler else sampler
        of_sampler |= _taken(given, SamplerConfig)
        guidance = replace(guidance, **_taken(given, GuidanceConfig))
        return replace(self, sampler=sampler.changed(**of_sampler), guidance=guidance, **given)


def _taken(given: dict[str, Any], config_class: type) -> dict[str, Any]:
    """What is given of a config class, taken out of ``given``."""
    return {each.name: given.pop(each.name) for each in fields(config_class) if each.name in given}


SETTINGS = {leaf.path[-1]: leaf for leaf in leaves(StageSettings)}
_IN_SECTIONS = [name for name, leaf in SETTINGS.items() if len(leaf.path) > 1]  # of sampler and guidance
_LOW_RES = ("noise_level", "blur_level")
_TILES = ("tile_size", "tile_overlap")
_TIMES = ("shift", "t_start", "t_end")
_OF_PIXELS = (
    "classifier",
    "classifier_scale",
    "classifier_gradient",
    "classifier_form",
    "thresholding",
    "dynamic_percentile",
)
#: Settings that some stages alone have, and which these are.
ONLY = {
    **dict.fromkeys(_LOW_RES, "upsamplers"),
    **dict.fromkeys(_TILES, "upsamplers and stage B"),
    **dict.fromkeys(_TIMES, "stages B and C of a latent cascade"),
}


@dataclass(frozen=True, eq=False)
class StageFlags:
    """What the settings of a kind of stage are called where several stages are given theirs.

    prefix:  of their names.
    has_no:  settings that it has no use for.
    other:   names that are not made by the prefix.
    missing: what is said about settings without such a stage.
    each:    there may be several such stages: a flag has one value for all, or one for each.
    needs:   the need of the flags.
    choices: of settings that have less of them here.
    was:     earlier names of settings here.
    """

    prefix: str
    has_no: tuple[str, ...]
    other: dict[str, str] = field(default_factory=dict)
    missing: str = ""
    each: bool = False
    needs: tuple[str, ...] = ()
    choices: dict[str, tuple[str, ...]] = field(default_factory=dict)
    was: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def flag(self, name: str) -> str:
        return self.other.get(name, self.prefix + name)

    @cached_property
    def flags(self) -> dict[str, Leaf]:
        """The settings by their flags."""
        return {self.flag(name): leaf for name, leaf in SETTINGS.items() if name not in self.has_no}

    def declare(self, without: Sequence[str] = ()) -> Callable[[type[Class]], type[Class]]:
        """Gives a config class a flag for each setting but those of ``without``; not given = as the checkpoint says."""

        def declared(config_class: type[Class]) -> type[Class]:
            for flag, leaf in self.flags.items():
                name = leaf.path[-1]
                if name in without:
                    continue
                text = f"as {name}" if self.prefix and name in BASE.flags and name != "batch_size" else leaf.help
                choices = self.choices.get(name, leaf.choices)
                needs = ((self.flag(need[0]), *need[1:]) for need in leaf.needs)
                was = self.was.get(name, leaf.was)
                declared_leaf = replace(leaf, path=(flag,), help=text, choices=choices, was=was)
                add_optional(config_class, declared_leaf, next(needs, self.needs), self.each)
            return config_class

        return declared

    def given(self, config: Any, i: int = 0) -> dict[str, Any]:
        """What a config gives the stage, of several the one of number ``i``, by the names of StageSettings."""
        found = {}
        for flag, leaf in self.flags.items():
            name, value = leaf.path[-1], getattr(config, flag, None)
            if self.each and value:
                values = _values(leaf, value)
                value = values[i if len(values) > 1 else 0]
            if value not in (None, ()) and not (name == "classifier" and value in ("", "none")):
                found[name] = value
        return found

    def changed(self, default: StageSettings, given: dict[str, Any], about: str = "") -> StageSettings:
        """``default`` with what is given. about: what messages end with. InputError for impossible settings."""
        try:
            return default.changed(**given)
        except InputError as error:
            faults = []
            for fault in error.faults:
                rule = spelled(fault.rule, lambda name: named(self.flag(name)))
                faults.append(replace(fault, setting=self.flag(fault.setting), rule=rule + about))
            raise InputError(*faults) from None

    def faults(self, config: Any, i: int = 0, about: str = "") -> Iterator[Fault]:
        """What is wrong with the settings that a config gives, whatever the checkpoint says."""
        found = self.given(config, i)
        if "sampler" not in found and "timestep_respacing" not in found:
            for name in (*OWN_SETTINGS, "classifier_form"):  # depend on the checkpoint's sampler
                found.pop(name, None)
        yield from faults_of(lambda: self.changed(StageSettings(), found, about))

    def counts(self, config: Any, count: int) -> Iterator[Fault]:
        """Faults of the flags with neither one value for all nor one for each of so many stages."""
        for flag, leaf in self.flags.items():
            values = _values(leaf, getattr(config, flag, ()))
            if len(values) not in (0, 1, count):
                counts = f"{quantity(len(values), 'value')} for {quantity(count, 'upsampler')}"
                yield Fault(flag, f"has {counts}: give one for all, or one for each")


def _values(leaf: Leaf, values: Sequence) -> Sequence:
    """The values of several stages; those of an interval are pairs."""
    if not isinstance(leaf.default, tuple):
        return values
    width = len(leaf.default)
    return [tuple(values[start : start + width]) for start in range(0, len(values), width)]


BASE = StageFlags(
    "",
    (*_LOW_RES, *_TILES, "seed"),
    {"classifier": "classifier_path"},
    "settings of a base generator's sampler, guidance, shift, t_start, t_end or classifier are given, but there is "
    "none: set the upsamplers' own (their flags begin with --upsampler_) or stage B's (--stage_b_)",
)
UPSAMPLERS = StageFlags(
    "upsampler_",
    _TIMES,
    {"classifier": "upsampler_classifier_paths", **{name: name for name in (*_LOW_RES, *_TILES)}},
    f"upsampler settings are given, but no upsampler: give it with {named('upsampler_paths')}",
    each=True,
)
STAGE_B = StageFlags(
    "stage_b_",
    (*_LOW_RES, *_OF_PIXELS, "timestep_respacing"),
    missing=f"settings of stage B are given, but there is none: give it with {named('stage_b')}",
    needs=("stage_b",),
    choices={"spacing": TIME_SPACINGS},
    was={"steps": ("stage_b_timestep_respacing",)},
)
KINDS = (BASE, UPSAMPLERS, STAGE_B)


def check_kinds(present: Sequence[StageFlags], *configs: Any) -> None:
    """InputError for settings that configs give to a kind of stage that is not present."""
    for kind in KINDS:
        if kind not in present and any(kind.given(config) for config in configs):
            raise InputError(kind.missing)


def settings_of_stages(
    stages: Sequence[Any], *configs: Any, defaults: Sequence[StageSettings] = (), **base: Any
) -> list[StageSettings]:
    """The settings of the stages of a pipeline: what their checkpoints say, but for what configs give.

    defaults: what takes the place of the checkpoints' settings.
    base:     further settings of the base generator, if there is one, as for ``StageSettings.changed``.

    Raises InputError for impossible settings, and for another number of values than there are upsamplers.
    """
    for config in configs:
        InputError.check(UPSAMPLERS.counts(config, sum(stage.flags.each for stage in stages)))
    found, number = [], 0
    for stage, default in zip(stages, defaults or [stage.defaults for stage in stages], strict=True):
        flags: StageFlags = stage.flags
        given = {name: value for config in configs for name, value in flags.given(config, number).items()}
        given |= base if flags is BASE else {}
        found.append(flags.changed(default, given, f" ({stage.path})" if flags.each else ""))
        number += flags.each
    return found


GivenSampler = overrides(
    SamplerConfig,
    "Sampler (none = as the checkpoint says; a generator: dpm++2m with 30 steps and eta 0, with a classifier ancestral "
    "with all steps)",
)
GivenGuidance = overrides(GuidanceConfig, "Guidance (none = as the checkpoint says; a generator: as in its previews)")


@settings
@UPSAMPLERS.declare()
class UpsamplersConfig:
    """Upsamplers (each setting: one value for all, or a list with one for each; none = as the checkpoint says)"""

    upsampler_paths: tuple[str, ...] = option(
        (),
        "upsampler checkpoints, in order of increasing resolution; defaults of generators: dpm++2m, 20 steps, eta 0, "
        "guidance_scale 1, no noise",
    )

    @staticmethod
    def earlier(recorded: Mapping) -> Mapping:
        """As of SamplerConfig."""
        return with_steps(recorded, UPSAMPLERS.flag)

    def faults(self) -> Iterator[Fault]:
        longest = max(len(_values(leaf, getattr(self, flag))) for flag, leaf in UPSAMPLERS.flags.items())
        count = len(self.upsampler_paths) or longest
        if counts := list(UPSAMPLERS.counts(self, count)):
            yield from counts
            return
        for i in range(count):
            path = self.upsampler_paths[i] if self.upsampler_paths else f"upsampler {i + 1}"
            yield from UPSAMPLERS.faults(self, i, f" ({path})")
        found = [UPSAMPLERS.given(self, i) for i in range(count)]
        is_scaled = any(each.get("classifier_scale", 1.0) not in (0.0, 1.0) for each in found)
        if is_scaled and not any("classifier" in each for each in found):
            remedy = f"give its checkpoint with {named('upsampler_classifier_paths')}"
            yield Fault("upsampler_classifier_scale", f"is set, but there is no classifier: {remedy}")


@settings
@STAGE_B.declare()
@BASE.declare(
    without=(*_IN_SECTIONS, "classifier", "classifier_scale", "classifier_gradient", "classifier_form", "batch_size")
)
class LatentCascadeConfig:
    """Latent cascade (model_path is stage C, with the flags of a base generator; none = as the checkpoint says)"""

    stage_b: str = option("", "checkpoint of stage B, from semantic latents to stage A's")
    stage_a: str = option("", "checkpoint of stage A, which decodes stage B's latents", needs=STAGE_B.needs)
    semantic: str = option(
        "",
        "checkpoint of the training's semantic encoder, for init_image and reconstruct; without stage_b its "
        "previewer decodes stage C's latents",
    )

    @staticmethod
    def earlier(recorded: Mapping) -> Mapping:
        """As of SamplerConfig."""
        return with_steps(recorded, STAGE_B.flag)

    def faults(self) -> Iterator[Fault]:
        yield from STAGE_B.faults(self)
