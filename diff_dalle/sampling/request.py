"""Records of a sampling run: the images to sample, the images to start from, and the settings of each stage."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch

from ..config import option
from ..diffusion.editing import Edit, EditConfig
from ..diffusion.guidance import GuidanceConfig
from ..diffusion.samplers import SAMPLERS
from ..diffusion.sampling import SamplerConfig
from ..diffusion.spacing import SPACINGS, check_spacing
from ..errors import InputError, quantity
from ..images.files import check_mask, fit_image, fit_mask
from ..images.pixels import check_pixels
from ..images.signal import Signal
from ..randomness import check_seeds
from .classifier import Guide
from .control import Control
from .image_prompts import ImagePrompts


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
                raise InputError(f"{name} has {quantity(len(given), 'value')} for {count}: give one for each")
        check_seeds(self.seeds)
        if self.low_res is not None:
            check_pixels("low_res", self.low_res, "[N, h, w, 3]")
            if len(self.low_res) != len(self):
                raise InputError(f"low_res has {quantity(len(self.low_res), 'image')} for {count}: give one for each")
        if self.reconstruct is not None and (self.low_res is not None or not len(self.reconstruct)):
            problem = "there is no picture" if self.low_res is None else "low_res is given too"
            raise InputError(
                f"{problem}: reconstruct (--reconstruct) takes at least one picture, and no low_res beside it"
            )
        if self.embeddings is not None:
            if self.images is not None:
                raise InputError(
                    "images (--images) and embeddings (--embeddings) exclude each other: leave one of them out"
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
            raise InputError("there is no image to edit: give at least one (--init_image)")
        for image in self.images:
            check_pixels("an image to edit", image, "[H, W, 3]")
        if self.masks is None:
            return
        if self.config.variation is not None:
            raise InputError("a mask (--mask) and --variation exclude each other: leave one of them out")
        if len(self.masks) not in (1, count):
            raise InputError(
                f"there are {len(self.masks)} masks (--mask) for {quantity(count, 'image')}: give one for all, or one "
                "for each"
            )
        for i, image in enumerate(self.images):
            flag = f"--mask (number {i + 1})" if len(self.masks) > 1 else "--mask"
            check_mask(self.masks[i % len(self.masks)], image, flag)

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


def _of(values: Sequence, i: int) -> Any:
    """The value of upsampler ``i``: one for all, or one for each."""
    return values[i if len(values) > 1 else 0]


@dataclass(frozen=True)
class UpsamplersConfig:
    """Upsamplers (each setting: one value for all, or a list with one for each; none = as the checkpoint says)"""

    upsampler_paths: tuple[str, ...] = option((), "upsampler checkpoints, in order of increasing resolution")
    upsampler_sampler: tuple[str, ...] = option(
        (), f"sampling algorithm: {', '.join(SAMPLERS)}; none = dpm++2m for a generator"
    )
    upsampler_timestep_respacing: tuple[str, ...] = option((), "sampling steps; none = 20 for a generator")
    upsampler_spacing: tuple[str, ...] = option(
        (), f"spacing of the steps: {', '.join(SPACINGS)}; none = log_snr on the noise schedule linear, else even"
    )
    upsampler_eta: tuple[float, ...] = option((), "randomness of ddim; 0 = deterministic")
    upsampler_guidance_scale: tuple[float, ...] = option((), "scale of classifier-free guidance; 1 = off; none = 1")
    upsampler_classifier_paths: tuple[str, ...] = option((), "noised CLIP checkpoints; `none` in a list = none")
    upsampler_classifier_scale: tuple[float, ...] = option((), "scale of classifier guidance; 0 = off; none = 1")
    upsampler_seed: tuple[int, ...] = option((), "seed of the upsampling noise: image i uses seed + i; none = as base")
    upsampler_batch_size: tuple[int, ...] = option((), "images per batch and process; none = 4")
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

    def __post_init__(self):
        if self.upsampler_paths:
            self._check_counts(len(self.upsampler_paths))
        self._check_samplers()
        if not self.upsampler_classifier_paths and set(self.upsampler_classifier_scale) - {0.0, 1.0}:
            raise InputError(
                "upsampler_classifier_scale is set, but there is no classifier: give its checkpoint with "
                "--upsampler_classifier_paths"
            )
        if not any(self.tile_size) and self.tile_overlap:
            raise InputError("tile_overlap is set, but there are no tiles: set --tile_size")

    def _check_samplers(self) -> None:
        """InputError for unknown samplers and spacings and, where both are given, for those that have no eta, and for
        steps that are not spaced."""
        samplers, etas = self.upsampler_sampler, self.upsampler_eta or (0.0,)
        for i in range(max(len(samplers), len(etas)) if samplers else 0):
            with self._about(i):
                SamplerConfig(_of(samplers, i), eta=_of(etas, i))
        spacings = self.upsampler_spacing
        counts = self.upsampler_timestep_respacing or (SamplerConfig.timestep_respacing,)
        for i in range(max(len(spacings), len(counts)) if spacings else 0):
            with self._about(i):
                check_spacing(_of(spacings, i), _of(counts, i))

    @contextlib.contextmanager
    def _about(self, i: int) -> Iterator[None]:
        """Say in an InputError that it is about upsampler ``i``."""
        try:
            yield
        except InputError as error:
            name = self.upsampler_paths[i] if i < len(self.upsampler_paths) else f"upsampler {i + 1}"
            raise InputError(f"the upsampler_ settings of {name}: {error}") from None

    def _check_counts(self, count: int) -> None:
        for setting in fields(self):
            given = len(getattr(self, setting.name))
            if given not in (0, 1, count) and setting.name != "upsampler_paths":
                raise InputError(
                    f"{setting.name} has {quantity(given, 'value')} for {quantity(count, 'upsampler')}: give one for "
                    "all, or one for each"
                )

    def settings(self, defaults: Sequence[StageSettings]) -> list[StageSettings]:
        """The settings of all upsamplers, whose checkpoints say ``defaults``. InputError for another number of values
        than there are upsamplers, and for settings without any."""
        if not defaults and self != UpsamplersConfig():
            raise InputError("upsampler settings are given, but no upsampler: give it with --upsampler_paths")
        self._check_counts(len(defaults))
        found = []
        for i, default in enumerate(defaults):
            with self._about(i):
                found.append(self._setting(i, default))
        return found

    def _setting(self, i: int, default: StageSettings) -> StageSettings:
        def given(**values: Sequence) -> dict[str, Any]:
            """This upsampler's values of the settings that are set."""
            return {name: _of(each, i) for name, each in values.items() if each}

        own = given(
            classifier=self.upsampler_classifier_paths,
            classifier_scale=self.upsampler_classifier_scale,
            batch_size=self.upsampler_batch_size,
            seed=self.upsampler_seed,
            noise_level=self.noise_level,
            blur_level=self.blur_level,
            tile_size=self.tile_size,
            tile_overlap=self.tile_overlap,
        )
        sampler = given(
            sampler=self.upsampler_sampler,
            timestep_respacing=self.upsampler_timestep_respacing,
            spacing=self.upsampler_spacing,
            eta=self.upsampler_eta,
        )
        guidance = given(guidance_scale=self.upsampler_guidance_scale)
        if own.get("classifier") == "none":
            own["classifier"] = None
        return replace(
            default,
            sampler=default.sampler.changed(**sampler),
            guidance=replace(default.guidance, **guidance),
            **own,
        )
