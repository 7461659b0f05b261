"""What a client asks for: read, checked against limits and models, and turned into work for the sampling thread."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..commands.serve import Limits
from ..config import Fault, InputError, faults_of, leaves, option, settings
from ..config.bounds import MAX_BATCH, MAX_ROWS, MAX_SEED, MAX_SIDE, MAX_STEPS
from ..diffusion.editing import EditConfig
from ..images.files import INPAINTED
from ..randomness import check_seeds
from ..sampling.control import Control
from ..sampling.lora import with_factor
from ..sampling.request import ImageEdit, Request
from ..sampling.stage import Watch
from ..sampling.stage_settings import BASE, STAGE_B, UPSAMPLERS, StageFlags, check_kinds, settings_of_stages
from .models import Models, Served
from .pictures import Pictures, Size

BATCH = 4  # images of the model's own size that go through it at once; more are hardly faster on a CPU
BATCH_PIXELS = 1 << 18  # at most, of all images of a batch: four of 256 × 256
LARGEST_SCALE = 100.0  # of guidance and control: far beyond any that gives images, and finite in half precision
_OURS = ("classifier", "batch_size", "tile_size", "tile_overlap")  # settings that the server decides on


@settings
@STAGE_B.declare(without=_OURS)
@UPSAMPLERS.declare(without=(*_OURS, "classifier_scale", "classifier_gradient", "classifier_form"))
@BASE.declare(without=(*_OURS, "classifier_scale", "steps", "timestep_respacing"))
class Wish:
    """Images to sample, as a client asks for them; settings of sampling have the names of the flags"""

    model: str = option("", "name of the model; empty = the first")
    prompt: str = option("", "what the images show")
    negative_prompt: str = option("", "what guidance leads away from")
    label: int | None = option(None, "class, for a class-conditional generator", least=0, most=MAX_ROWS)
    seed: int = option(0, "random seed: image i has seed + i", least=0, most=MAX_SEED)
    num_images: int = option(1, "number of images", least=1, most=MAX_BATCH)
    width: int = option(0, "width of the images in pixels; 0 = as trained", least=0, most=MAX_SIDE)
    height: int = option(0, "height of the images in pixels; 0 = as trained", least=0, most=MAX_SIDE)
    steps: int | None = option(None, "sampling steps; null = as the checkpoint says", least=1, most=MAX_STEPS)
    classifier_scale: float = option(0.0, "scale of the classifier's guidance; 0 = off")
    lora: tuple[str, ...] = option((), "LoRAs of the model, each as NAME or NAME:FACTOR")
    control_scale: float = option(1.0, "strength of the control image")
    strength: float | None = option(None, "part of the process that edits the init image, above 0 to 1")
    variation: float | None = option(None, "strength of variations of the init image, 0–1")

    def faults(self) -> Iterator[Fault]:
        for name in LEAVES:
            value = getattr(self, name)
            several = value if isinstance(value, tuple) else (value,)
            if any(isinstance(each, float) and abs(each) > LARGEST_SCALE for each in several):
                yield Fault(name, f"must be at least -{LARGEST_SCALE:g} and at most {LARGEST_SCALE:g}", value)

    def of_base(self, classifier: str) -> dict[str, Any]:
        """What is asked of the base, by the names of StageSettings. classifier: path of the model's."""
        found = BASE.given(self)
        if self.steps is not None:
            found["steps"] = self.steps
        if self.classifier_scale:
            return found | {"classifier": classifier}
        return {name: value for name, value in found.items() if not name.startswith("classifier")}


LEAVES = {leaf.name: leaf for leaf in leaves(Wish)}


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
    """What the sampling thread is to do. Raises InputError as ``check_wish``; the work itself for what the networks do
    not support."""
    model = check_wish(wish, models, limits)
    loras = lora_paths(wish, model)
    if len(loras) > len(model.loras):
        count = len(model.loras)
        raise InputError(Fault("lora", f"has {len(loras)} values, but the model {model.name} has {count} LoRAs"))
    if pictures.control_image is not None and not model.controlnet:
        rule = f"is given, but the model {model.name} has no ControlNet: leave it out"
        raise InputError(Fault("control_image", rule))

    def work(watch: Watch) -> Result:
        try:
            pipeline = models.pipeline(model.name, loras, pictures.control_image is not None)
            request = _request(wish, pictures)
            batch = batch_of(wish, model)
            settings = [
                replace(each, batch_size=min(batch, each.batch_size))
                for each in settings_of_stages(pipeline.stages, wish, **wish.of_base(model.classifier))
            ]
            return Result(pipeline.sample_stages(request, settings, progress=False, watch=watch), pictures)
        except InputError as error:
            raise InputError(models.without_paths(str(error))) from None

    return work


def check_wish(wish: Wish, models: Models, limits: Limits) -> Served:
    """The model of a wish. Raises InputError, at once, for what limits and model forbid."""
    model = models.find(wish.model)
    InputError.check(_forbidden(wish, model, limits))
    return model


def _forbidden(wish: Wish, model: Served, limits: Limits) -> Iterator[str | Fault]:
    for name in ("prompt", "negative_prompt"):
        length = len(getattr(wish, name))
        if length > limits.max_prompt:
            yield Fault(name, f"has {length} characters, but may have at most {limits.max_prompt}")
    if not wish.width and model.size > limits.max_size:
        yield f"the model's images have {model.size} pixels a side, but may have {limits.max_size}: set width"
    if bool(wish.width) != bool(wish.height):
        yield "width and height belong together: give both, or neither"
    if wish.steps is None and model.steps > limits.max_steps:
        yield (
            f"the model {model.name} takes {model.steps} steps of its own accord, but may take at most "
            f"{limits.max_steps}: set steps"
        )
    for kind in dict.fromkeys(model.kinds):
        yield from _wrong_steps(wish, kind, limits)
        count = model.kinds.count(kind)
        if faults := list(kind.counts(wish, count) if kind.each else ()):
            yield from faults
        else:
            for i in range(count):
                yield from kind.faults(wish, i)
    yield from faults_of(lambda: check_kinds(model.kinds, wish))
    side = limits.largest_side(model.size)
    most = {"num_images": limits.max_images, "width": side, "height": side}
    for name, limit in most.items():
        if (getattr(wish, name) or 0) > limit:
            yield Fault.of(wish, name, f"must be at most {limit}")
    (height, width), pixels = size_asked(wish, model), limits.request_pixels(model.size)
    if wish.num_images * height * width > pixels:
        images = f"{pixels // (height * width)} for images of {width}×{height}"
        yield Fault.of(wish, "num_images", f"may be at most {images}: ask for fewer or smaller ones")
    yield from faults_of(lambda: check_seeds([wish.seed + wish.num_images - 1]), "seed")
    if wish.classifier_scale and not model.classifier:
        yield Fault.of(wish, "classifier_scale", f"the model {model.name} has no classifier")
    if wish.label is not None and wish.label >= max(model.num_classes, 1):
        yield Fault.of(wish, "label", f"the model {model.name} has {model.num_classes} classes")


def _wrong_steps(wish: Wish, kind: StageFlags, limits: Limits) -> Iterator[Fault]:
    """What is wrong with the numbers of steps of a kind of stage, whatever form they have."""
    for name in ("steps", "timestep_respacing"):
        flag = kind.flag(name)
        values = getattr(wish, flag, None)
        for value in values if isinstance(values, tuple) else (values,):
            numbers = [int(number) for number in re.findall(r"\d{1,9}", str(value))]
            if value is not None and not 0 < sum(numbers) <= limits.max_steps:
                yield Fault(flag, f"must be a number of steps, at most {limits.max_steps}", value)


def lora_paths(wish: Wish, model: Served) -> list[str]:
    """The LoRAs of a wish as the PATH:FACTOR that ``load`` takes. InputError for those that the model does not have."""
    return [_lora_path(text, model) for text in wish.lora]


def _lora_path(text: str, model: Served) -> str:
    name, factor = with_factor(text)
    if abs(factor) > LARGEST_SCALE:
        rule = f"has {text[:80]!r}, but its factor must be a number of at most {LARGEST_SCALE:g}"
        raise InputError(Fault("lora", rule))
    if name not in model.loras:
        has = ", ".join(model.loras) or "none"
        raise InputError(Fault("lora", f"has {name[:80]!r}, but the LoRAs of the model {model.name} are: {has}"))
    return f"{model.loras[name]}:{factor:g}"


def _request(wish: Wish, pictures: Pictures) -> Request:
    edit, control = None, None
    config = EditConfig(strength=wish.strength, variation=wish.variation)
    if pictures.init_image is not None:
        masks = None if pictures.mask is None else [pictures.mask.max(2) >= INPAINTED]
        edit = ImageEdit([pictures.init_image], masks, config)
    elif pictures.mask is not None or config != EditConfig():
        raise InputError("mask, strength and variation are about an init_image, but there is none: give it")
    if pictures.control_image is not None:
        control = Control([pictures.control_image], scale=wish.control_scale)
    return Request.of(
        wish.prompt,
        wish.seed,
        num_samples=wish.num_images,
        labels=None if wish.label is None else [wish.label],
        negative_prompt=wish.negative_prompt,
        size=(wish.height, wish.width) if wish.height else None,
        edit=edit,
        control=control,
    )
