"""One generator of a cascade: its properties, read from its checkpoint, and sampling with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..batch import Conditioning
from ..checkpoints.loading import SavedNetwork, open_network
from ..diffusion.diffusion_config import create_gaussian_diffusion
from ..diffusion.editing import shortened
from ..diffusion.guidance import thresholding
from ..diffusion.process import SamplingProcess
from ..diffusion.sampling import SampleBatch, SamplerConfig, sample_batch, seeds_draw
from ..diffusion.tiling import Tiled, check_tiles
from ..distributed.devices import use_device
from ..errors import InputError
from ..images.signal import Signal
from ..models.precision import autocast, for_inference, resolve_precision
from ..randomness import check_seeds
from ..text.tokenizer import Tokenizer
from .classifier import Classifier, load_classifier
from .request import Request, StageSettings


@dataclass(frozen=True)
class StageJob:
    """A request and one stage's settings for it.

    size:  height and width of the stage's signal.
    index: of the stage in its cascade, from which its noise follows: 0 = base, 1 = first upsampler, …
    """

    request: Request
    settings: StageSettings
    size: tuple[int, int]
    index: int = 0


class Stage:
    """A generator ready to sample. Made by ``load_stage``.

    saved:     its checkpoint.
    precision: fp32, bf16 or fp16; of the arithmetic and, where it has it, of the stored weights.
    bpe_path:  the merge file of its classifiers' tokenizers, for files that do not hold theirs.
    keep:      keep the weights in memory after use.
    """

    def __init__(
        self, saved: SavedNetwork, device: torch.device, precision: str = "fp32", bpe_path: str = "", keep: bool = True
    ):
        self.saved, self.device, self.precision, self.bpe_path, self.keep = saved, device, precision, bpe_path, keep
        self.config, self.diffusion = saved.settings.model, saved.settings.diffusion
        self.degradation = saved.settings.augmentation.degradation
        self.signal: Signal = saved.kind.signal(saved.settings)
        self._network: nn.Module | None = None
        self._classifiers: dict[str, Classifier] = {}

    @property
    def path(self) -> str:
        """Its checkpoint's path, for messages."""
        return self.saved.path

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None for a generator without text."""
        return self.saved.tokenizer

    @property
    def num_classes(self) -> int:
        """0 for a generator without classes."""
        return self.config.unet.num_classes

    @property
    def image_size(self) -> int:
        """Width and height of the signal in training."""
        return self.config.unet.image_size

    @property
    def small_size(self) -> int:
        """Width and height of the low-resolution signal in training; 0 = a base generator."""
        return self.config.low_res.small_size

    @property
    def is_upsampler(self) -> bool:
        return self.config.is_upsampler

    @property
    def factor(self) -> int:
        """The upsampling factor; 1 for a base generator."""
        return self.config.factor

    @property
    def divisor(self) -> int:
        """Required divisor of height and width."""
        return self.config.unet.divisor

    def network(self) -> nn.Module:
        """The network with its weights, loaded unless kept."""
        network = self._network or for_inference(self.saved.load(self.device), self.precision)
        self._network = network if self.keep else None
        return network

    def process(self, sampler: SamplerConfig) -> SamplingProcess:
        """The process with the sampling steps."""
        return create_gaussian_diffusion(self.diffusion, sampler.timestep_respacing)

    def conditioning(self, request: Request, index: Sequence[int]) -> Conditioning:
        """The network's conditions of the request's images with these indices, on the CPU, except for those of the
        low-resolution image.

        Stages with further conditions (text states or image embeddings from other networks) add them here; guidance and
        batching then include them. Raises InputError for missing or impossible classes.
        """
        cond = self._text([request.prompts[i] for i in index])
        if not self.num_classes:
            return cond
        labels = self._labels(request)
        return replace(cond, labels=torch.tensor([labels[i] for i in index]))

    def _labels(self, request: Request) -> Sequence[int]:
        last = self.num_classes - 1
        if request.labels is None:
            raise InputError(f"this generator is class-conditional: give labels from 0 to {last}")
        if not all(0 <= label <= self.num_classes for label in request.labels):
            raise InputError(
                f"labels must lie between 0 and {last} ({self.num_classes} = no class), not {list(request.labels)}"
            )
        return request.labels

    def negative_conditioning(self, cond: Conditioning, negative_prompt: str) -> Conditioning | None:
        """The negative condition of classifier-free guidance: ``cond`` with caption, class and image embedding dropped,
        or with the negative prompt as its caption. None for an unconditional generator."""
        if not cond.droppable:
            return None
        count = len(next(iter(cond.present().values())))
        null = cond.drop(torch.ones(count, dtype=torch.bool), self.num_classes)
        if negative_prompt and self.tokenizer is not None:
            text = self._text([negative_prompt] * count)
            null = replace(null, tokens=text.tokens, mask=text.mask)
        return null

    def _text(self, prompts: Sequence[str]) -> Conditioning:
        if self.tokenizer is None:
            return Conditioning()
        tokens, mask = self.tokenizer(list(prompts), self.config.text.text_length)
        return Conditioning(tokens=tokens, mask=mask)

    def check(self, job: StageJob) -> None:
        """InputError for a job that ``sample_batches`` cannot do, before any weights are loaded."""
        request, settings = job.request, job.settings
        self.config.unet.check_size(*job.size)
        settings.guidance.scale(self.conditioning(request, range(len(request))[:1]).droppable)
        thresholding(settings.guidance, self.signal.value_range)
        process = self.process(settings.sampler)
        if settings.seed is not None:
            check_seeds([settings.seed, settings.seed + len(request) - 1], "upsampler_seed")
        if settings.batch_size < 1:
            raise InputError(f"batch_size is {settings.batch_size}, but must be at least 1")
        if self.is_upsampler:
            self.degradation.check_levels(settings.noise_level, settings.blur_level)
            if settings.tile_size:
                check_tiles(settings.tile_size, settings.tile_overlap, self.divisor)
        elif settings.noise_level or settings.blur_level or settings.tile_size:
            raise InputError("noise_level, blur_level and tile_size are for upsamplers, not for a base generator")
        if request.edit is not None:
            settings.sampler.check_edit(request.edit.config)
            for i in range(len(request.edit.images)):  # one at a time to save memory
                edit = request.edit.at([i], job.size, self.signal)
            shortened(process, edit.strength)
        classifier = self._classifier(settings)
        if classifier is not None:
            classifier.check_fits(job.size, self.signal, self.diffusion, self.tokenizer)
            classifier.check_gradient(settings.classifier_gradient)

    def sample_batches(
        self, job: StageJob, index: Sequence[int], low_res: Tensor | None, emit: Callable[[Tensor], object]
    ) -> None:
        """Sample the request's images with these indices; call ``emit`` with each batch in the order of ``index``, as
        the next stage reads it: [n, C, *job.size] float32 on the CPU.

        low_res: an upsampler's input, [len(index), C, h, w], from the stage before it.
        """
        try:
            with autocast(self.precision, self.device):
                self._sample_batches(job, index, low_res, emit)
        finally:
            if not self.keep:
                self._classifiers.clear()
                if self.device.type == "cuda":
                    torch.cuda.empty_cache()  # this stage's memory, for the next one

    def _sample_batches(
        self, job: StageJob, index: Sequence[int], low_res: Tensor | None, emit: Callable[[Tensor], object]
    ) -> None:
        request, settings = job.request, job.settings
        network, process, classifier = self.network(), self.process(settings.sampler), self._classifier(settings)
        if settings.tile_size:
            network = Tiled(network, settings.tile_size, settings.tile_overlap, self.divisor)
        for start in range(0, len(index), settings.batch_size):
            part = index[start : start + settings.batch_size]
            seeds = [request.seeds[i] if settings.seed is None else settings.seed + i for i in part]
            degraded: dict[str, Any] = {}
            if low_res is not None:
                degraded = self._degraded(low_res[start : start + len(part)], seeds, job)
            cond, null = self.conditioning(request, part), None
            if settings.guidance.scale(cond.droppable) != 1:
                null = self.negative_conditioning(cond, request.negative_prompt)
            batch = SampleBatch(
                self.signal,
                job.size,
                seeds,
                replace(cond, **degraded),
                None if null is None else replace(null, **degraded),
                request.edit.at(part, job.size, self.signal) if request.edit else None,
                job.index,
            )
            guide = None
            if classifier is not None:
                prompts = request.prompts if request.classifier_prompts is None else request.classifier_prompts
                guide = classifier.guidance(
                    [prompts[i] for i in part], settings.classifier_scale, settings.classifier_gradient
                )
            x = sample_batch(network, process, batch, settings.sampler, settings.guidance, guide)
            emit(self.signal.finish(x.cpu()))

    def _classifier(self, settings: StageSettings) -> Classifier | None:
        """The classifier that guides this stage, or None."""
        path = settings.classifier
        if settings.classifier_scale == 0:
            return None
        if not isinstance(path, str):
            return path
        if path not in self._classifiers:
            self._classifiers[path] = load_classifier(path, self.device, self.precision, self.bpe_path)
        return self._classifiers[path]

    def _degraded(self, low_res: Tensor, seeds: Sequence[int], job: StageJob) -> dict[str, Any]:
        """The conditions of the low-resolution image, blurred and noised as the settings say."""
        images = low_res.to(self.device, memory_format=torch.channels_last)  # the networks' format
        levels = (float(value) for value in (job.settings.noise_level, job.settings.blur_level))
        level, sigma = (torch.full((len(images),), value, device=self.device) for value in levels)
        noise = seeds_draw(seeds, job.index, self.device).normal("low-resolution noise", images.shape[1:])
        return self.degradation.apply(images, sigma, level, noise)


def load_stage(
    path: str, device: str | torch.device = "auto", precision: str = "auto", bpe_path: str = "", keep: bool = True
) -> Stage:
    """A generator, base or upsampler, from its checkpoint; arguments and errors as for ``pipeline.load``.

    keep: False = load the weights for each use and free them afterwards.
    """
    saved, resolved = open_network(path, "generator", bpe_path), use_device(device)
    return Stage(saved, resolved, resolve_precision(precision, resolved), bpe_path, keep)
