"""One generator of a cascade: what its checkpoint says about it, and the pictures it makes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ..batch import Conditioning
from ..checkpoints.loading import open_network
from ..diffusion.augmentation import AugmentationConfig, augment
from ..diffusion.diffusion_config import DiffusionConfig, create_gaussian_diffusion
from ..diffusion.editing import shortened
from ..diffusion.sampling import sample_images, seeds_draw
from ..diffusion.tiling import Tiled, check_tiles
from ..distributed.devices import pick_device
from ..errors import InputError
from ..images.pixels import from_uint8
from ..models.generator import Generator, GeneratorConfig
from ..text.tokenizer import Tokenizer
from ..training.precision import autocast, resolve_precision
from .classifier import Classifier, load_classifier
from .request import Request, StageSettings


class Stage:
    """A generator with all that sampling needs. Made by ``load_stage``.

    config, diffusion, augmentation, tokenizer: settings of the network, its process and its training images, and its
                      tokenizer (None without text).
    read_network:     loads the network with its weights onto ``device``.
    keep:             leave the network in memory once it has been used.
    step, samples:    how long it was trained. path: where it is from, for messages.
    bpe_path:         where the vocabulary of classifiers is, if it was a file that has moved.
    """

    def __init__(
        self,
        config: GeneratorConfig,
        diffusion: DiffusionConfig,
        augmentation: AugmentationConfig,
        tokenizer: Tokenizer | None,
        precision: str,
        device: torch.device,
        read_network: Callable[[], Generator],
        keep: bool = True,
        step: int = 0,
        samples: int = 0,
        path: str = "the generator",
        bpe_path: str = "",
    ):
        self.config, self.diffusion, self.augmentation, self.tokenizer = config, diffusion, augmentation, tokenizer
        self.precision, self.device, self.keep = precision, device, keep
        self.step, self.samples, self.path, self.bpe_path = step, samples, path, bpe_path
        self._read_network, self._network = read_network, None

    @property
    def image_size(self) -> int:
        """Side in pixels of the pictures it was trained on."""
        return self.config.unet.image_size

    def network(self) -> Generator:
        """The network with its weights, read unless it was kept."""
        network = self._network or self._read_network()
        self._network = network if self.keep else None
        return network

    def conditioning(self, prompts: Sequence[str], labels: Sequence[int] | None = None) -> Conditioning:
        """Those of prompts and classes that the network reads, as it takes them, on the CPU. InputError when it needs
        classes and there are none, or impossible ones."""
        classes, tokens, mask = self.config.unet.num_classes, None, None
        if self.tokenizer is not None:
            tokens, mask = self.tokenizer(list(prompts), self.config.text.text_length)
        if not classes:
            return Conditioning(tokens=tokens, mask=mask)
        if labels is None:
            raise InputError(f"this generator is conditioned on classes: give labels from 0 to {classes - 1}")
        if not all(0 <= label <= classes for label in labels):
            raise InputError(f"labels must lie between 0 and {classes - 1} ({classes} = no class), not {list(labels)}")
        return Conditioning(tokens=tokens, mask=mask, labels=torch.tensor(list(labels)))

    def null(self, cond: Conditioning, negative_prompt: str) -> Conditioning:
        """What guidance leads away from: no caption and no class, or a negative prompt."""
        if not cond.droppable:
            return cond
        count = next((len(value) for value in cond.present().values()), 0)
        null = cond.drop(torch.ones(count, dtype=torch.bool), self.config.unet.num_classes)
        if not negative_prompt or self.tokenizer is None:
            return null
        return self.conditioning([negative_prompt] * count, null.labels.tolist() if null.labels is not None else None)

    def check(self, request: Request, settings: StageSettings, size: tuple[int, int]) -> None:
        """InputError for what ``sample`` could not do, before anything is computed."""
        unet = self.config.unet
        unet.check_size(*size)
        self.conditioning(request.prompts, request.labels)
        process = create_gaussian_diffusion(self.diffusion, settings.sampler.timestep_respacing)
        if settings.batch_size < 1:
            raise InputError(f"batch_size is {settings.batch_size}, but must be at least 1")
        if self.config.is_upsampler:
            self.augmentation.check_levels(settings.noise_level, settings.blur_level)
            if settings.tile_size:
                check_tiles(settings.tile_size, settings.tile_overlap, unet.divisor)
        elif settings.noise_level or settings.blur_level or settings.tile_size:
            raise InputError("noise_level, blur_level and tile_size are for up-samplers, not for a base generator")
        if request.edit is not None:
            settings.sampler.check_edit(request.edit.config)
            for i in range(len(request.edit.pictures)):  # one at a time: there may be many
                shortened(process, request.edit.at([i], size).strength)
        classifier = self._classifier(settings)
        if classifier is not None:
            classifier.check_fits(size, self.diffusion, self.tokenizer)
            if settings.classifier_gradient == "x_t" and not classifier.noised:
                raise InputError("the classifier was trained with --noised False, so it cannot judge noisy images: set "
                                 "classifier_gradient to x_start")  # fmt: skip

    def sample(self, request: Request, index: Sequence[int], settings: StageSettings, size: tuple[int, int],
               low_res: np.ndarray | None = None, number: int = 0, report: Callable[[int], object] = int
               ) -> np.ndarray:  # fmt: skip
        """The pictures of these numbers: uint8 [len(index), height, width, 3].

        low_res: what an up-sampler enlarges, uint8 [len(index), h, w, 3].
        number:  of the stage in its cascade; each has noise of its own.
        report:  told how many pictures have just been made.
        """
        try:
            with autocast(self.precision, self.device):
                return self._sample(request, index, settings, size, low_res, number, report)
        finally:
            if self.device.type == "cuda" and not self.keep:
                torch.cuda.empty_cache()  # what this stage used must be there for the next one

    def _sample(self, request: Request, index: Sequence[int], settings: StageSettings, size: tuple[int, int],
                low_res: np.ndarray | None, number: int, report: Callable[[int], object]) -> np.ndarray:  # fmt: skip
        cond = self.conditioning(request.prompts, request.labels)
        null, model, classifier = self.null(cond, request.negative_prompt), self.network(), self._classifier(settings)
        if settings.tile_size:
            model = Tiled(model, settings.tile_size, settings.tile_overlap, self.config.unet.divisor)
        images = np.empty((len(index), *size, 3), dtype=np.uint8)
        for start in range(0, len(index), settings.batch_size):
            part = index[start : start + settings.batch_size]
            rows = slice(start, start + len(part))
            seeds = [request.seeds[i] if settings.seed is None else settings.seed + i for i in part]
            both = [cond.select(part), null.select(part)]
            if low_res is not None:
                degraded = self._degraded(low_res[rows], seeds, settings, number)
                both = [replace(each, **degraded) for each in both]
            guide = None
            if classifier is not None:
                towards = request.prompts if request.classifier_prompts is None else request.classifier_prompts
                guide = classifier.guidance(
                    [towards[i] for i in part], settings.classifier_scale, settings.classifier_gradient
                )
            edit = request.edit.at(part, size) if request.edit else None
            images[rows] = sample_images(
                model, self.diffusion, *both, size, seeds, settings.sampler, settings.guidance, guide, edit,
                stage=number,
            )  # fmt: skip
            report(len(part))
        return images

    def _classifier(self, settings: StageSettings) -> Classifier | None:
        if isinstance(settings.classifier, str):
            return load_classifier(settings.classifier, str(self.device), self.precision, self.bpe_path)
        return settings.classifier

    def _degraded(
        self, low_res: np.ndarray, seeds: Sequence[int], settings: StageSettings, number: int
    ) -> dict[str, Tensor]:
        """The conditions that say what is enlarged, and how it was noised and blurred."""
        images = from_uint8(low_res).to(self.device)
        level, sigma = (torch.full((len(images),), float(value), device=self.device)
                        for value in (settings.noise_level, settings.blur_level))  # fmt: skip
        noise = seeds_draw(seeds, number, self.device).normal("low-resolution noise", images.shape[1:])
        return {"low_res": augment(images, sigma, level, noise), "low_res_level": level, "low_res_blur": sigma}


def load_stage(path: str, device: str | torch.device = "auto", precision: str = "auto", bpe_path: str = "",
               keep: bool = True) -> Stage:  # fmt: skip
    """A generator, base or up-sampler, from its checkpoint; arguments and errors as for ``pipeline.load``.

    keep: False = the weights are read when they are needed and forgotten afterwards.
    """
    saved, place = open_network(path, "generator", bpe_path), pick_device(device)
    settings = saved.settings
    return Stage(
        settings.model, settings.diffusion, settings.augmentation, saved.tokenizer, resolve_precision(precision, place),
        place, lambda: saved.load(place), keep, saved.step, saved.samples, path, bpe_path,
    )  # fmt: skip
