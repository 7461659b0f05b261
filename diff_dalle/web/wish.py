"""What a client asks for: read, checked against limits and models, and turned into work for the sampling thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..commands.serve import Limits
from ..config import option
from ..diffusion.editing import EditConfig
from ..diffusion.samplers import SAMPLERS
from ..errors import InputError
from ..images.files import INPAINTED
from ..randomness import check_seeds
from ..sampling.control import Control
from ..sampling.pipeline import Pipeline
from ..sampling.request import ImageEdit, Request, StageSettings
from ..sampling.stage import Watch
from .models import Models, Served
from .pictures import Pictures, Size
from .refusal import Refusal

BATCH = 4  # images of the model's own size that go through it at once; more are hardly faster on a CPU
BATCH_PIXELS = 1 << 18  # at most, of all images of a batch: four of 256 × 256
LARGEST_SCALE = 100.0  # of guidance and control: far beyond any that gives images, and finite in half precision


@dataclass(frozen=True)
class Wish:
    """Images to sample, as a client asks for them"""

    model: str = option("", "name of the model; empty = the first")
    prompt: str = option("", "what the images show")
    negative_prompt: str = option("", "what guidance leads away from")
    label: int | None = option(None, "class, for a class-conditional generator")
    seed: int = option(0, "random seed: image i has seed + i")
    num_images: int = option(1, "number of images")
    width: int = option(0, "width of the images in pixels; 0 = as trained")
    height: int = option(0, "height of the images in pixels; 0 = as trained")
    sampler: str | None = option(None, "sampling algorithm; null = as the checkpoint says", choices=tuple(SAMPLERS))
    steps: int | None = option(None, "sampling steps; null = as the checkpoint says")
    guidance_scale: float | None = option(None, "scale of classifier-free guidance; null = as the checkpoint says")
    classifier_scale: float = option(0.0, "scale of the classifier's guidance; 0 = off")
    lora: tuple[str, ...] = option((), "LoRAs of the model, each as NAME or NAME:FACTOR")
    control_scale: float = option(1.0, "strength of the control image")
    strength: float | None = option(None, "part of the process that edits the init image, above 0 to 1")
    variation: float | None = option(None, "strength of variations of the init image, 0–1")


@dataclass(frozen=True, eq=False)
class Result:
    """stages: every stage's images, uint8 [N, H, W, 3]; the last are those asked for.

    pictures: those of the wish, as they were used.
    """

    stages: list[np.ndarray] = field(default_factory=list)
    pictures: Pictures = field(default_factory=Pictures)

    @property
    def images(self) -> np.ndarray:
        return self.stages[-1]


def size_asked(wish: Wish, model: Served) -> Size:
    """Height and width of the images of a wish that was checked."""
    return (wish.height, wish.width) if wish.height else (model.size, model.size)


def batch_of(wish: Wish, model: Served) -> int:
    """How many images go through a network at once: few, so that between two looks at whether to stop, and in memory,
    there is never more than a few images of the model's own size, or one larger one."""
    height, width = size_asked(wish, model)
    most = min(BATCH * model.size**2, BATCH_PIXELS)
    return max(1, min(BATCH, most // (height * width)))


def work_of(wish: Wish, pictures: Pictures, models: Models, limits: Limits) -> Callable[[Watch], Result]:
    """What the sampling thread is to do. Raises Refusal as ``check_wish``; the work itself for what the networks do not
    support."""
    model = check_wish(wish, models, limits)
    loras = [_lora(text, model) for text in wish.lora]
    if len(loras) > len(model.loras):
        raise Refusal(400, f"lora has {len(loras)} values, but the model {model.name} has {len(model.loras)} LoRAs")
    if pictures.control_image is not None and not model.controlnet:
        raise Refusal(400, f"control_image is given, but the model {model.name} has no ControlNet: leave it out")

    def work(watch: Watch) -> Result:
        try:
            pipeline = models.pipeline(model.name, loras, pictures.control_image is not None)
            request = _request(wish, pictures)
            batch = batch_of(wish, model)
            settings = [
                replace(each, batch_size=min(batch, each.batch_size))
                for each in pipeline.stage_settings(_settings(wish, pipeline, model))
            ]
            return Result(pipeline.sample_stages(request, settings, progress=False, watch=watch), pictures)
        except InputError as error:
            raise Refusal(400, models.without_paths(str(error))) from None

    return work


def check_wish(wish: Wish, models: Models, limits: Limits) -> Served:
    """The model of a wish. Raises Refusal, at once, for what limits and model forbid."""
    model = models.find(wish.model)
    _check(wish, model, limits)
    return model


def _check(wish: Wish, model: Served, limits: Limits) -> None:
    for name in ("prompt", "negative_prompt"):
        length = len(getattr(wish, name))
        if length > limits.max_prompt:
            raise Refusal(400, f"{name} has {length} characters, but may have at most {limits.max_prompt}")
    if not wish.width and model.size > limits.max_size:
        raise Refusal(
            400, f"the model's images have {model.size} pixels a side, but may have {limits.max_size}: set width"
        )
    if bool(wish.width) != bool(wish.height):
        raise Refusal(400, "width and height belong together: give both, or neither")
    if wish.steps is None and model.steps > limits.max_steps:
        raise Refusal(
            400,
            f"the model {model.name} takes {model.steps} steps of its own accord, but may take at most "
            f"{limits.max_steps}: set steps",
        )
    side = limits.largest_side(model.size)
    for name, least, most in (
        ("num_images", 1, limits.max_images),
        ("steps", 1, limits.max_steps),
        ("width", 0, side),
        ("height", 0, side),
        ("guidance_scale", -LARGEST_SCALE, LARGEST_SCALE),
        ("classifier_scale", -LARGEST_SCALE, LARGEST_SCALE),
        ("control_scale", -LARGEST_SCALE, LARGEST_SCALE),
    ):
        value = getattr(wish, name)
        if value is not None and not least <= value <= most:
            raise Refusal(400, f"{name} is {value:g}, but must lie between {least:g} and {most:g}")
    (height, width), pixels = size_asked(wish, model), limits.request_pixels(model.size)
    if wish.num_images * height * width > pixels:
        raise Refusal(
            400,
            f"num_images is {wish.num_images}, but may be at most {pixels // (height * width)} for images of "
            f"{width}×{height}: ask for fewer or smaller ones",
        )
    try:
        check_seeds([wish.seed, wish.seed + wish.num_images - 1])
    except InputError as error:
        raise Refusal(400, str(error)) from None
    if wish.classifier_scale and not model.classifier:
        raise Refusal(
            400, f"classifier_scale is {wish.classifier_scale:g}, but the model {model.name} has no classifier"
        )
    if wish.label is not None and not 0 <= wish.label < max(model.num_classes, 1):
        raise Refusal(400, f"label is {wish.label}, but the model {model.name} has {model.num_classes} classes")


def _lora(text: str, model: Served) -> str:
    """NAME or NAME:FACTOR of a wish as the PATH:FACTOR that ``load`` takes."""
    name, colon, factor = text.rpartition(":")
    if not colon:
        name, factor = text, "1"
    try:
        if not abs(float(factor)) <= LARGEST_SCALE:
            raise ValueError
    except ValueError:
        raise Refusal(
            400, f"lora has {text[:80]!r}, but its factor must be a number of at most {LARGEST_SCALE:g}"
        ) from None
    if name not in model.loras:
        has = ", ".join(model.loras) or "none"
        raise Refusal(400, f"lora has {name[:80]!r}, but the LoRAs of the model {model.name} are: {has}")
    return f"{model.loras[name]}:{float(factor):g}"


def _request(wish: Wish, pictures: Pictures) -> Request:
    count, edit, control = wish.num_images, None, None
    config = EditConfig(strength=wish.strength, variation=wish.variation)
    if pictures.init_image is not None:
        masks = None if pictures.mask is None else [pictures.mask.max(2) >= INPAINTED]
        edit = ImageEdit([pictures.init_image], masks, config)
    elif pictures.mask is not None or config != EditConfig():
        raise InputError("mask, strength and variation are about an init_image, but there is none: give it")
    if pictures.control_image is not None:
        control = Control([pictures.control_image], scale=wish.control_scale)
    return Request(
        [wish.prompt] * count,
        [wish.seed + i for i in range(count)],
        None if wish.label is None else [wish.label] * count,
        wish.negative_prompt,
        size=(wish.height, wish.width) if wish.height else None,
        edit=edit,
        control=control,
    )


def _settings(wish: Wish, pipeline: Pipeline, model: Served) -> StageSettings:
    """Of the base generator: what is asked for, and else what its checkpoint says."""
    usual = pipeline.stages[0].defaults
    sampler = {"sampler": wish.sampler, "timestep_respacing": None if wish.steps is None else str(wish.steps)}
    scale: dict[str, Any] = {} if wish.guidance_scale is None else {"guidance_scale": wish.guidance_scale}
    return replace(
        usual,
        sampler=usual.sampler.changed(**{name: value for name, value in sampler.items() if value is not None}),
        guidance=replace(usual.guidance, **scale),
        classifier=model.classifier if wish.classifier_scale else None,
        classifier_scale=wish.classifier_scale,
    )
