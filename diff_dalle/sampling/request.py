"""Records of a sampling run: the images to sample, the images to start from, and the settings of each stage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from ..config import faults_of, option, settings
from ..diffusion.editing import Edit, EditConfig
from ..diffusion.guidance import GuidanceConfig
from ..diffusion.samplers import SAMPLERS
from ..diffusion.sampling import SamplerConfig
from ..diffusion.spacing import SPACINGS
from ..errors import Fault, InputError, named, quantity, spelled
from ..images.files import check_mask, fit_image, fit_mask
from ..images.pixels import check_pixels
from ..images.signal import Signal
from ..randomness import check_seeds
from .classifier import Guide
from .control import Control
from .image_prompts import ImagePrompts

_PREFIX = "upsampler_"


@dataclass(frozen=True, eq=False)
class Request:
    """N images to sample.

    prompts:            N captions.
    seeds:              N integers from 0 to 2^63 - 1; all noise of an image follows from its seed.
    labels:             N classes, for class-conditional generators and classifiers of classes; None = no classes.
    negative_prompt:    the negative condition of classifier-free guidance; empty = no caption.
    classifier_prompts: N captions for the classifier; None = the prompts.
    size:               height and width of the last stage's images, which the networks must divide; None = as trained,
                        or as ``low_res`` upsampled.
    low_res:            N images for upsamplers without a base generator, uint8 [N, h, w, 3].
    edit:               the images to edit; None = sample from noise.
    embeddings:         N image embeddings for decoders, float32 [N, E].
    text_states:        N text encodings for decoders, float32 [N, L, D], with their mask, bool [N, L]: True = a real
                        token.
    images:             the pictures whose embeddings a decoder or stage C is given, in place of ``embeddings``.
    control:            pictures that control the samples of the base generator or stage C, by a ControlNet.
    reconstruct:        pictures, uint8 [H, W, 3] of any size, that stages B and A make again from their semantic
                        latents: scaled to cover ``size`` and center-cropped, used in turn.

    Raises InputError for lists and arrays of the wrong length or type, for seeds out of range, and for images together
    with embeddings.
    """

    prompts: Sequence[str]
    seeds: Sequence[int]
    labels: Sequence[int] | None = None
    negative_prompt: str = ""
    classifier_prompts: Sequence[str] | None = None
    size: tuple[int, int] | None = None
    low_res: np.ndarray | None = None
    edit: ImageEdit | None = None
    embeddings: np.ndarray | None = None
    text_states: tuple[np.ndarray, np.ndarray] | None = None
    images: ImagePrompts | None = None
    reconstruct: Sequence[np.ndarray] | None = None
    control: Control | None = None

    def __len__(self) -> int:
        return len(self.prompts)

    def __post_init__(self):
        count = quantity(len(self), "prompt")
        for name in ("seeds", "labels", "classifier_prompts"):
            given = getattr(self, name)
            if given is not None and len(given) != len(self):
                raise InputError(Fault(name, f"has {quantity(len(given), 'value')} for {count}: give one for each"))
        check_seeds(self.seeds)
        if self.low_res is not None:
            check_pixels("low_res", self.low_res, "[N, h, w, 3]")
            if len(self.low_res) != len(self):
                images = quantity(len(self.low_res), "image")
                raise InputError(f"low_res has {images} for {count}: give one for each")
        if self.reconstruct is not None and (self.low_res is not None or not len(self.reconstruct)):
            problem = "has no picture" if self.low_res is None else "is given beside low_res"
            raise InputError(Fault("reconstruct", f"{problem}: it takes at least one, and no low_res beside it"))
        if self.embeddings is not None:
            if self.images is not None:
                raise InputError(
                    f"{named('images')} and {named('embeddings')} exclude each other: leave one of them out"
                )
            check_floats("embeddings", self.embeddings, "[N, E]", len(self))
        if self.text_states is not None:
            states, mask = self.text_states
            check_floats("text_states", states, "[N, L, D]", len(self))
            if mask.dtype != np.bool_ or mask.shape != states.shape[:2]:
                raise InputError(
                    f"the mask of text_states is {mask.dtype} of shape {list(mask.shape)}, but must be bool "
                    f"{list(states.shape[:2])}"
                )


@dataclass(frozen=True, eq=False)
class ImageEdit:
    """Images to edit, of any size: scaled to cover the generated size and center-cropped.

    images: uint8 [H, W, 3] each, used in turn.
    masks:  bool [H, W] each, True where new content is generated: one for all, or one for each; None = everywhere.

    Raises InputError for no image, an image of the wrong type, a mask whose size differs from its image's, too few or
    too many masks, and masks together with a variation.
    """

    images: Sequence[np.ndarray]
    masks: Sequence[np.ndarray] | None = None
    config: EditConfig = field(default_factory=EditConfig)

    def __post_init__(self):
        count = len(self.images)
        if not count:
            raise InputError(f"there is no image to edit: give at least one ({named('init_image')})")
        for image in self.images:
            check_pixels("an image to edit", image, "[H, W, 3]")
        if self.masks is None:
            return
        if self.config.variation is not None:
            raise InputError(f"{named('mask')} and {named('variation')} exclude each other: leave one of them out")
        if len(self.masks) not in (1, count):
            counts = f"{len(self.masks)} masks ({named('mask')}) for {quantity(count, 'image')}"
            raise InputError(f"there are {counts}: give one for all, or one for each")
        for i, image in enumerate(self.images):
            number = f" (number {i + 1})" if len(self.masks) > 1 else ""
            check_mask(self.masks[i % len(self.masks)], image, named("mask") + number)

    def at(self, index: Sequence[int], size: tuple[int, int], signal: Signal) -> Edit:
        """The edit of the images with these indices, in a stage's signal of this height and width."""
        pixels = (signal.scale * size[0], signal.scale * size[1])
        images = [fit_image(self.images[i % len(self.images)], pixels) for i in index]
        unknown = None
        if self.masks is not None:
            masks = [fit_mask(self.masks[i % len(self.masks)], size) for i in index]
            unknown = torch.from_numpy(np.stack(masks))[:, None]
        return Edit(signal.from_pixels(np.stack(images)), unknown, self.config)

    def for_upsampling(self) -> ImageEdit | None:
        """The edit of the upsamplers: known pixels stay known. No resampling: the low-resolution image fits already."""
        if self.masks is None:
            return None
        return replace(self, config=replace(self.config, strength=None, inpaint_resamples=1))


def in_turn(values: Sequence | np.ndarray, count: int) -> Any:
    """``count`` of the values, used in turn; an array of an array."""
    index = [i % len(values) for i in range(count)]
    return values[index] if isinstance(values, np.ndarray) else [values[i] for i in index]


def check_floats(name: str, values: np.ndarray, shape: str, count: int) -> None:
    """InputError unless ``values`` is float32 of a shape like ``shape``, "[N, E]", for N = ``count``, and finite."""
    if values.dtype != np.float32 or values.ndim != shape.count(",") + 1:
        raise InputError(f"{name} is {values.dtype} of shape {list(values.shape)}, but must be float32 {shape}")
    if len(values) != count:
        raise InputError(
            f"{name} has {quantity(len(values), 'row')} for {quantity(count, 'prompt')}: give one for each"
        )
    if not np.isfinite(values).all():
        raise InputError(f"{name} has values that are not finite: compute it again")


@dataclass(frozen=True)
class StageSettings:
    """Sampling settings of one stage.

    classifier:          guides too: a noised CLIP or a classifier of classes, or the path of one to load for this stage
                         only.
    classifier_scale:    scale of classifier guidance; 0 = off, 1 = Bayes' rule.
    classifier_gradient: "x_t", or "x_start" through the generator (see ``ClassifierGuidance``).
    batch_size:          images per batch and process; guidance doubles their memory.
    seed:                image i has seed + i at this stage; None = its own seed.
    noise_level:         upsamplers: level of the noise added to the low-resolution image, 0–1.
    blur_level:          upsamplers: standard deviation of its blur, in its pixels.
    tile_size:           upsamplers: width and height in pixels of overlapping tiles, which the network processes one
                         after another; 0 = the whole image.
    tile_overlap:        pixels shared by neighboring tiles.
    shift:               stages B and C of a latent cascade: α/σ is divided by this, beside the shift of training; above
                         1 = more of the steps at high noise.
    t_start, t_end:      stages B and C: the steps are evenly spaced in time from t_start (1 = noise) to t_end (0 =
                         clean), of which the last one leads to the clean sample.
    """

    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    guidance: GuidanceConfig = field(default_factory=GuidanceConfig)
    classifier: Guide | str | None = None
    classifier_scale: float = 1.0
    classifier_gradient: str = "x_t"
    batch_size: int = 16
    seed: int | None = None
    noise_level: float = 0.0
    blur_level: float = 0.0
    tile_size: int = 0
    tile_overlap: int = 32
    shift: float = 1.0
    t_start: float = 1.0
    t_end: float = 0.0


def combined(
    default: StageSettings, given: Mapping[str, Any], prefix: str, about: str = "", with_sampler: bool = True
) -> StageSettings:
    """The settings with those that are given, by their names here, in SamplerConfig and in GuidanceConfig.

    prefix:       of their names where they are given, for messages. about: what their messages end with.
    with_sampler: False = leave those of the sampler.

    Raises InputError for impossible ones.
    """
    own = dict(given)
    sampler, guidance = (
        {field.name: own.pop(field.name) for field in fields(kind) if field.name in own}
        for kind in (SamplerConfig, GuidanceConfig)
    )
    try:
        changed = default.sampler.changed(**sampler) if with_sampler else default.sampler
        return replace(default, sampler=changed, guidance=replace(default.guidance, **guidance), **own)
    except InputError as error:
        faults = []
        for fault in error.faults:
            rule = spelled(fault.rule, lambda name: named(prefix + name)) + about
            setting, rule = (prefix + fault.setting, rule) if fault.setting else ("", f"the {prefix} settings: {rule}")
            faults.append(replace(fault, setting=setting, rule=rule))
        raise InputError(*faults) from None


@settings
class UpsamplersConfig:
    """Upsamplers (each setting: one value for all, or a list with one for each; none = as the checkpoint says)"""

    upsampler_paths: tuple[str, ...] = option((), "upsampler checkpoints, in order of increasing resolution")
    upsampler_sampler: tuple[str, ...] = option(
        (), "sampling algorithm; none = dpm++2m for a generator", choices=SAMPLERS
    )
    upsampler_timestep_respacing: tuple[str, ...] = option((), "sampling steps; none = 20 for a generator")
    upsampler_spacing: tuple[str, ...] = option(
        (), "spacing of the steps; none = log_snr on the noise schedule linear, else even", choices=SPACINGS
    )
    upsampler_eta: tuple[float, ...] = option((), "randomness of ddim; 0 = deterministic", least=0)
    upsampler_guidance_scale: tuple[float, ...] = option((), "scale of classifier-free guidance; 1 = off; none = 1")
    upsampler_classifier_paths: tuple[str, ...] = option((), "noised CLIP checkpoints; `none` in a list = none")
    upsampler_classifier_scale: tuple[float, ...] = option((), "scale of classifier guidance; 0 = off; none = 1")
    upsampler_seed: tuple[int, ...] = option(
        (), "seed of the upsampling noise: image i uses seed + i; none = as base", least=0
    )
    upsampler_batch_size: tuple[int, ...] = option((), "images per batch and process; none = 4", least=1)
    noise_level: tuple[float, ...] = option(
        (),
        "noise level of the low-resolution image, 0–1; higher values hide artifacts and generate more new detail; none "
        "= 0 for a generator",
    )
    blur_level: tuple[float, ...] = option(
        (), "standard deviation of the blur of the low-resolution image, in its pixels; none or 0 = no blur"
    )
    tile_size: tuple[int, ...] = option(
        (),
        "width and height in pixels of overlapping tiles that the network processes one after another to save memory; "
        "none or 0 = the whole image",
    )
    tile_overlap: tuple[int, ...] = option(
        (), f"pixels shared by neighboring tiles; none = {StageSettings.tile_overlap}"
    )

    def faults(self) -> Iterator[Fault]:
        count = len(self.upsampler_paths) or max(len(values) for values in self._given.values())
        yield from self._counts(count)
        for i in range(count):
            # Without a sampler or spacing, what goes with it depends on the checkpoint's.
            if self.upsampler_sampler:
                yield from faults_of(partial(self._setting, i, StageSettings(), ("sampler", "eta")))
            if self.upsampler_spacing:
                yield from faults_of(partial(self._setting, i, StageSettings(), ("spacing", "timestep_respacing")))
        if not self.upsampler_classifier_paths and set(self.upsampler_classifier_scale) - {0.0, 1.0}:
            remedy = f"give its checkpoint with {named('upsampler_classifier_paths')}"
            yield Fault("upsampler_classifier_scale", f"is set, but there is no classifier: {remedy}")
        if not any(self.tile_size) and self.tile_overlap:
            yield Fault("tile_overlap", f"is set, but there are no tiles: set {named('tile_size')}")

    @property
    def _given(self) -> dict[str, Sequence]:
        """The values of each setting of upsamplers."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "upsampler_paths"}

    def _counts(self, count: int) -> Iterator[Fault]:
        for name, values in self._given.items():
            if len(values) not in (0, 1, count):
                counts = f"{quantity(len(values), 'value')} for {quantity(count, 'upsampler')}"
                yield Fault(name, f"has {counts}: give one for all, or one for each")

    def settings(self, defaults: Sequence[StageSettings]) -> list[StageSettings]:
        """The settings of all upsamplers, whose checkpoints say ``defaults``. InputError for another number of values
        than there are upsamplers, and for settings without any."""
        if not defaults and self != UpsamplersConfig():
            paths = named("upsampler_paths")
            raise InputError(f"upsampler settings are given, but no upsampler: give it with {paths}")
        InputError.check(self._counts(len(defaults)))
        return [self._setting(i, default) for i, default in enumerate(defaults)]

    def _setting(self, i: int, default: StageSettings, names: Sequence[str] = ()) -> StageSettings:
        """Of upsampler ``i``. names: of the only settings to look at, without their prefix; none = all."""
        own = {
            name.removeprefix(_PREFIX): values[i if len(values) > 1 else 0]  # one for all, or one for each
            for name, values in self._given.items()
            if values and (not names or name.removeprefix(_PREFIX) in names)
        }
        if path := own.pop("classifier_paths", None):
            own["classifier"] = None if path == "none" else path
        about = self.upsampler_paths[i] if i < len(self.upsampler_paths) else f"upsampler {i + 1}"
        return combined(default, own, _PREFIX, f" ({about})")
