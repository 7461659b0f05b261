"""What is asked of a pipeline: what its pictures are to show, what they start from, and how each stage makes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np
import torch

from ..config import option
from ..diffusion.editing import Edit, EditConfig
from ..diffusion.guidance import GuidanceConfig
from ..diffusion.samplers import SAMPLERS
from ..diffusion.sampling import SamplerConfig
from ..errors import InputError, quantity
from ..images.files import check_mask, fit_mask, fit_picture
from ..images.pixels import from_uint8
from .classifier import Classifier


@dataclass(frozen=True)
class Request:
    """What the pictures are to show, one entry a picture.

    seeds:              all of a picture's noise follows from its own.
    labels:             classes, for class-conditional generators; None = there are none.
    negative_prompt:    what guidance leads away from; empty = no caption.
    classifier_prompts: what a classifier steers towards; None = the prompts.
    edit:               the pictures that are changed; None = they are made from nothing.
    """

    prompts: Sequence[str]
    seeds: Sequence[int]
    labels: Sequence[int] | None = None
    negative_prompt: str = ""
    classifier_prompts: Sequence[str] | None = None
    edit: PictureEdit | None = None

    def __len__(self) -> int:
        return len(self.prompts)

    def __post_init__(self):
        parts = (self.seeds, self.labels, self.classifier_prompts)
        if any(part is not None and len(part) != len(self) for part in parts):
            raise InputError(f"{len(self)} prompts need as many seeds, labels and classifier_prompts")


@dataclass(frozen=True)
class PictureEdit:
    """Pictures to start from, of any size: they are scaled to cover what is made, and its middle is taken.

    pictures: uint8 [H, W, 3] each, taken in turn.
    masks:    bool [H, W] each, True where new content is to be painted: one for all, or one for each; None =
              everywhere.

    Raises InputError for no picture, one of another type, a mask of another size than its picture, too few or too many
    masks, and masks together with a variation.
    """

    pictures: Sequence[np.ndarray]
    masks: Sequence[np.ndarray] | None = None
    config: EditConfig = field(default_factory=EditConfig)

    def __post_init__(self):
        count = len(self.pictures)
        if not count:
            raise InputError("there is no picture to start from: give at least one (--init_image)")
        for picture in self.pictures:
            check_pixels("a picture to start from", picture, "[H, W, 3]")
        if self.masks is None:
            return
        if self.config.variation is not None:
            raise InputError("a mask (--mask) and --variation exclude each other; leave one of them out")
        if len(self.masks) not in (1, count):
            raise InputError(f"there are {len(self.masks)} masks (--mask) for {quantity(count, 'picture')}: give one "
                             "for all, or one for each")  # fmt: skip
        for i, picture in enumerate(self.pictures):
            which = f"--mask (number {i + 1})" if len(self.masks) > 1 else "--mask"
            check_mask(self.masks[i % len(self.masks)], picture, which)

    def at(self, index: Sequence[int], size: tuple[int, int]) -> Edit:
        """For the pictures of these numbers, at a stage's size."""
        images = [fit_picture(self.pictures[i % len(self.pictures)], size) for i in index]
        unknown = None
        if self.masks is not None:
            masks = [fit_mask(self.masks[i % len(self.masks)], size) for i in index]
            unknown = torch.from_numpy(np.stack(masks))[:, None]
        return Edit(from_uint8(np.stack(images)), unknown, self.config)

    def for_upsampling(self) -> PictureEdit | None:
        """What is left of it above the base: what is known stays known, and nothing has to fit to it anew."""
        if self.masks is None:
            return None
        return replace(self, config=replace(self.config, strength=None, inpaint_resamples=1))


def check_pixels(what: str, images: np.ndarray, shape: str) -> None:
    """InputError unless ``images`` is uint8 of a shape like ``shape``: "[H, W, 3]", or "[N, h, w, 3]"."""
    if images.dtype != np.uint8 or images.ndim != shape.count(",") + 1 or images.shape[-1] != 3:
        raise InputError(f"{what} is {images.dtype} of shape {list(images.shape)}, but must be uint8 {shape}")


@dataclass(frozen=True)
class StageSettings:
    """How a stage makes its pictures.

    classifier:  guides too: a noised CLIP, or the path of one that is loaded for this stage alone.
    batch_size:  pictures at a time, per process; guidance doubles the memory that takes.
    seed:        picture i has this + i here; None = its own seed.
    noise_level: up-samplers: noise put on the image to be enlarged, 0 to 1; blur_level: sigma of a blur, in its pixels.
    tile_size:   up-samplers: evaluate the network on overlapping squares of so many pixels, one after another, so that
                 memory follows these; 0 = on the whole image. tile_overlap: pixels they share.
    """

    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    guidance: GuidanceConfig = field(default_factory=GuidanceConfig)
    classifier: Classifier | str | None = None
    classifier_scale: float = 1.0
    classifier_gradient: str = "x_t"
    batch_size: int = 16
    seed: int | None = None
    noise_level: float = 0.0
    blur_level: float = 0.0
    tile_size: int = 0
    tile_overlap: int = 32


@dataclass(frozen=True)
class UpsamplersConfig:
    """Up-samplers (each setting: one value for all, or a list with one for each)"""

    upsampler_paths: tuple[str, ...] = option((), "checkpoints of up-samplers, in the order in which they enlarge")
    upsampler_sampler: tuple[str, ...] = option(("dpm++2m",), f"how they sample: {', '.join(SAMPLERS)}")
    upsampler_timestep_respacing: tuple[str, ...] = option(("20",), "steps that they take")
    upsampler_eta: tuple[float, ...] = option((0.0,), "randomness of ddim")
    upsampler_guidance_scale: tuple[float, ...] = option((1.0,), "strength of classifier-free guidance; 1 = off")
    upsampler_classifier_paths: tuple[str, ...] = option((), "noised CLIPs that guide them; `none` in a list = none")
    upsampler_classifier_scale: tuple[float, ...] = option((1.0,), "strength of that guidance; 0 = off")
    upsampler_seed: tuple[int, ...] = option((), "picture i's details follow from this + i; none = from its seed")
    upsampler_batch_size: tuple[int, ...] = option((4,), "pictures made at once by each process")
    noise_level: tuple[float, ...] = option((0.0,), "level of the noise put on what is enlarged, 0 to 1; it hides "
                                                    "flaws and invites new details")  # fmt: skip
    blur_level: tuple[float, ...] = option((0.0,), "sigma of a blur of what is enlarged, in its pixels")
    tile_size: tuple[int, ...] = option(
        (0,), "side in pixels of overlapping squares that the network sees one after another, so that memory follows "
        "these; 0 = the whole picture")  # fmt: skip
    tile_overlap: tuple[int, ...] = option((32,), "pixels that neighbouring squares share")

    def __post_init__(self):
        count = len(self.upsampler_paths)
        for each in fields(self):
            given = len(getattr(self, each.name))
            if not given and each.default:
                raise InputError(f"{each.name} is empty: give one value for all up-samplers, or one for each")
            if count and given not in (0, 1, count):
                raise InputError(f"{each.name} has {given} values for {quantity(count, 'up-sampler')}: give one for "
                                 "all, or one for each")  # fmt: skip
        if not self.upsampler_classifier_paths and set(self.upsampler_classifier_scale) - {0.0, 1.0}:
            raise InputError("upsampler_classifier_scale is given, but there is no classifier: give its checkpoint "
                             "with --upsampler_classifier_paths")  # fmt: skip
        if not any(self.tile_size) and self.tile_overlap != UpsamplersConfig.tile_overlap:
            raise InputError("tile_overlap is given, but there are no tiles: give their side with --tile_size")
        for i, path in enumerate(self.upsampler_paths):
            try:
                self.setting(i)
            except InputError as error:
                raise InputError(f"the upsampler_ settings of {path}: {error}") from None

    def settings(self) -> list[StageSettings]:
        """Of each up-sampler."""
        return [self.setting(i) for i in range(len(self.upsampler_paths))]

    def setting(self, i: int = 0) -> StageSettings:
        """Of up-sampler number i."""

        def at(values: tuple):
            return values[i if len(values) > 1 else 0] if values else None

        classifier = at(self.upsampler_classifier_paths)
        return StageSettings(
            SamplerConfig(at(self.upsampler_sampler), at(self.upsampler_timestep_respacing), at(self.upsampler_eta)),
            GuidanceConfig(guidance_scale=at(self.upsampler_guidance_scale)),
            classifier=None if classifier == "none" else classifier,
            classifier_scale=at(self.upsampler_classifier_scale),
            batch_size=at(self.upsampler_batch_size),
            seed=at(self.upsampler_seed),
            noise_level=at(self.noise_level),
            blur_level=at(self.blur_level),
            tile_size=at(self.tile_size),
            tile_overlap=at(self.tile_overlap),
        )
