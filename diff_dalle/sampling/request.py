"""What to sample: one record, and the images to start from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from ..config import Fault, InputError, named, quantity
from ..diffusion.editing import Edit, EditConfig
from ..images.files import check_mask, fit_image, fit_mask
from ..images.signal import Signal, check_pixels
from ..randomness import check_seeds
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

    @classmethod
    def of(
        cls,
        prompts: str | Sequence[str] | None = None,
        seed: int = 0,
        *,
        num_samples: int = 0,
        seeds: Sequence[int] | None = None,
        images: ImagePrompts | Sequence[np.ndarray] | None = None,
        image_weights: Sequence[float] | None = None,
        interpolate: int = 0,
        **rest: Any,
    ) -> Request:
        """A request for one image per prompt, embedding or picture.

        prompts:       one caption, or a list; "" = no caption; None = none for any of the embeddings or pictures or,
                       without these, for a single image.
        seed:          image i has seed + i and depends on that alone, not on the batch or the other prompts; those of
                       one interpolation share a seed.
        num_samples:   number of images, with prompts, labels, embeddings and pictures used in turn; 0 = one of each.
        seeds:         one seed per image, instead of ``seed``.
        images:        pictures for a decoder or stage C, uint8 [H, W, 3] each, whose embeddings by its CLIP are used in
                       turn. For a decoder without these and ``embeddings``, those of the prompts stand in.
        image_weights: one number per picture: one embedding of all, their sum with these weights, of unit norm.
        interpolate:   number of embeddings from the first of two pictures to the second, both included.
        rest:          the other fields.

        Raises InputError as the class.
        """
        if images is None and (image_weights is not None or interpolate):
            raise InputError("image_weights and interpolate are about images, but there are none: give images")
        if images is not None and not isinstance(images, ImagePrompts):
            images = ImagePrompts(images, image_weights, interpolate)
        if prompts is None:
            prompts = [""] * (1 if rest.get("embeddings") is None else len(rest["embeddings"]))
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        for name in ("labels", "classifier_prompts", "embeddings") if num_samples else ():
            if rest.get(name) is not None:
                rest[name] = in_turn(rest[name], num_samples)
        control = rest.get("control")
        pictures = (images, rest.get("reconstruct"), None if control is None else control.images)
        count = num_samples or max(len(prompts), *(0 if each is None else len(each) for each in pictures))
        if seeds is None:
            seeds = images.seeds(seed, count) if images else list(range(seed, seed + count))
        return cls(in_turn(prompts, count), seeds, images=images, **rest)

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

    def at(self, index: Sequence[int], size: tuple[int, int], signal: Signal, seen: bool = False) -> Edit:
        """The edit of the images with these indices, in a stage's signal of this height and width; seen: as there."""
        pixels = (signal.scale * size[0], signal.scale * size[1])
        images = [fit_image(self.images[i % len(self.images)], pixels) for i in index]
        unknown = None
        if self.masks is not None:
            masks = [fit_mask(self.masks[i % len(self.masks)], size) for i in index]
            unknown = torch.from_numpy(np.stack(masks))[:, None]
        return Edit(signal.from_pixels(np.stack(images)), unknown, self.config, seen)

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
