"""Pipelines as objects: called by diffusers' names, moved to a device, saved, shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from typing_extensions import Self

from .. import storage
from ..checkpoints.model_folder import TABLE
from ..checkpoints.model_writing import write_model
from ..config import Fault, InputError
from .stage import Stage, Watch

OUTPUT_TYPES = ("pil", "np", "pt")


@dataclass(frozen=True)
class Output:
    """What calling a pipeline returns. images: a list of PIL images, an array or a tensor, as its ``output_type``
    says."""

    images: Any


@dataclass(frozen=True)
class Loaded:
    """What a pipeline was loaded from: by which function with which arguments, and files by the settings that take
    them."""

    load: Callable[..., Any]
    arguments: Mapping[str, Any]
    paths: Mapping[str, Sequence[str]]


class Calls:
    """What a pipeline does beside sampling. loaded: None for one that was made of stages."""

    stages: list[Stage]
    sample: Callable[..., np.ndarray]
    loaded: Loaded | None = None

    def __repr__(self) -> str:
        """The networks, their image sizes and where they compute."""
        networks = (f"  {each.path}: {each.saved.settings.title}, {each.image_size} pixels" for each in self.stages)
        first = self.stages[0]
        return "\n".join([f"Pipeline on {first.device} in {first.precision}:", *networks])

    def to(self, device: str | torch.device) -> Self:
        """Change the device, where the weights are loaded at their next use. Returns itself.

        Raises InputError for a device that is not there, and for a pipeline that ``load`` did not make.
        """
        loaded = self._as_loaded
        self.__dict__.update(loaded.load(**{**loaded.arguments, "device": device}).__dict__)
        return self

    @property
    def _as_loaded(self) -> Loaded:
        if self.loaded is None:
            raise InputError("this pipeline was made of stages: move and save those, or make it by load")
        return self.loaded

    def save(self, path: str, precision: str = "fp16") -> None:
        """Write a model folder with the networks' weights, as safetensors; ``load`` takes it, share.py adds a card.

        path: the folder, local or remote, without a model. precision: fp16 or fp32.

        Raises InputError for a place that cannot be written or holds a model already, for LoRAs and a ControlNet, which
        have files of their own, and for a pipeline that ``load`` did not make.
        """
        loaded = self._as_loaded
        if adapters := [name for name in ("lora", "controlnet") if loaded.arguments[name]]:
            raise InputError(f"{' and '.join(adapters)} would not be saved: load the pipeline without, or merge a LoRA")
        if storage.exists(storage.join(path, TABLE)):
            raise InputError(f"{path} holds a model already: give another folder, or remove it")
        write_model(path, loaded.paths, precision)

    def __call__(
        self,
        prompt: str | Sequence[str] | None = None,
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        negative_prompt: str = "",
        num_images_per_prompt: int = 1,
        *,
        height: int | None = None,
        width: int | None = None,
        generator: torch.Generator | None = None,
        seed: int | None = None,
        output_type: str = "pil",
        callback: Watch | None = None,
        **options: Any,
    ) -> Output:
        """``sample`` by the names of diffusers' pipelines.

        num_images_per_prompt: images of each prompt, one after another.
        height, width: of the images in pixels; both, or neither for those of training.
        generator: draws the seed; or give ``seed``. Neither = 0.
        output_type: pil = a list of PIL images, np = uint8 [N, height, width, 3], pt = float32 [N, 3, height, width]
                   from 0 to 1.
        callback:  ``watch`` of ``sample``.
        options:   more of ``sample``'s.

        Raises InputError as ``sample``, for one of height and width alone, and for a generator beside a seed.
        """
        if output_type not in OUTPUT_TYPES:
            raise InputError(Fault("output_type", f"must be one of {', '.join(OUTPUT_TYPES)}", output_type))
        if (height is None) != (width is None):
            raise InputError("height and width are given together, or neither")
        if generator is not None and seed is not None:
            raise InputError("generator and seed exclude each other: give one of them")
        if generator is not None:
            seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
        prompts = [prompt] if prompt is None or isinstance(prompt, str) else list(prompt)
        repeated = [each or "" for each in prompts for _ in range(num_images_per_prompt)]
        named_here = {"steps": num_inference_steps, "guidance_scale": guidance_scale}
        options |= {name: value for name, value in named_here.items() if value is not None}
        options |= {"size": (height, width)} if height is not None else {}
        options |= {"negative_prompt": negative_prompt} if negative_prompt else {}
        images = self.sample(repeated, seed or 0, watch=callback, **options)
        if output_type == "pt":
            return Output(torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255)
        return Output(images if output_type == "np" else [Image.fromarray(each) for each in images])
