"""One network of a cascade: its properties, read from its checkpoint, and sampling with it."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..batch import Conditioning
from ..checkpoints.decoder import ClipConfig
from ..checkpoints.loading import SavedNetwork
from ..config import InputError, named
from ..diffusion.augmentation import Degradation
from ..diffusion.process import Process
from ..diffusion.samplers import Step
from ..diffusion.sampling import SampleBatch, sample_batch, seeds_draw, step_count
from ..diffusion.tiling import Tiled
from ..images.signal import Signal
from ..models.decoder.config import DecoderUnetConfig
from ..models.latent.config import LatentUnetConfig
from ..models.precision import autocast, for_inference
from ..models.unet import UNetConfig
from ..text.tokenizer import Tokenizer
from .classifier import Guide, load_guide
from .control import Steering
from .lora import Loras
from .request import Request
from .stage_settings import BASE, UPSAMPLERS, StageFlags, StageSettings


@dataclass(frozen=True, eq=False)
class Progress:
    """One sampling step of a batch of images, as ``Pipeline.sample`` reports it to its ``watch``.

    stage: that takes the step.
    index: of the batch's images in the request.
    step:  number of the step in this batch, from 1 to ``steps``.
    x_start: the expected images [n, C, h, w], in the stage's signal, on its device.
    """

    stage: Stage
    index: Sequence[int]
    step: int
    steps: int
    x_start: Tensor

    def pixels(self) -> np.ndarray | None:
        """The expected images, uint8 [n, H, W, 3]; None for latents, which take a network to decode."""
        if self.stage.decodes_apart:
            return None
        return self.stage.pixels(self.stage.signal.finish(self.x_start.cpu()))


Watch = Callable[[Progress], object]


@dataclass(frozen=True)
class StageJob:
    """A request and one stage's settings for it.

    size:  height and width of the stage's signal.
    index: of the stage in its cascade, from which its noise follows: 0 = base, 1 = first upsampler, …
    watch: called after every step.
    """

    request: Request
    settings: StageSettings
    size: tuple[int, int]
    index: int = 0
    watch: Watch | None = None


class Stage(ABC):
    """A denoising network ready to sample: one resolution of a cascade. Made by ``load_stages``.

    To add a kind of network: a subclass of this, which its ``NetworkKind`` names.

    saved:       its checkpoint.
    precision:   fp32, bf16 or fp16; of the arithmetic and, where it has it, of the stored weights.
    bpe_path:    the merge file of its classifiers' tokenizers, for files that do not hold theirs.
    keep:        keep the weights in memory after use.

    A subclass says of its network, in ``configure``:

    config:      its settings.
    unet:        those of its U-Net, which check the sizes it supports.
    image_size:  width and height of the signal in training.
    small_size:  those of the low-resolution signal; 0 = no upsampler.
    diffusion:   its process: DiffusionConfig, or LogSnrConfig of latents.
    degradation: of its low-resolution signals in training.
    defaults:    how to sample with it, unless told otherwise.
    num_classes: number of its classes; 0 = none.
    never_dropped: settings by which it was trained without dropping its conditions, so that classifier-free guidance
                   has nothing to guide by; empty = they were dropped.
    reads_embeddings, reads_text_states: whether it is conditioned on image embeddings, and on text encodings from
                   outside.
    clip:          the CLIP of these, as far as the checkpoint says.
    takes_embeddings: whether image embeddings, or the pictures that they are made of, have an effect.
    reconstructs:  whether, alone, it makes pictures again from what an encoder keeps of them.
    inpaints:      whether it sees the known part of the images that it inpaints.
    decodes_apart: whether ``pixels`` loads a network, for which the stage's own has to make room.
    """

    config: Any
    unet: UNetConfig | DecoderUnetConfig | LatentUnetConfig
    image_size: int
    small_size: int
    diffusion: Any
    degradation: Degradation
    defaults: StageSettings
    num_classes: int = 0
    never_dropped: str = ""
    reads_embeddings: bool = False
    reads_text_states: bool = False
    takes_embeddings: bool = False
    clip: ClipConfig | None = None
    reconstructs = False
    inpaints = False
    decodes_apart = False

    def __init__(
        self, saved: SavedNetwork, device: torch.device, precision: str = "fp32", bpe_path: str = "", keep: bool = True
    ):
        self.saved, self.device, self.precision, self.bpe_path, self.keep = saved, device, precision, bpe_path, keep
        self.signal: Signal = saved.settings.signal
        self._network: nn.Module | None = None
        self.steering: Steering | None = None  # by a ControlNet
        self.guide_loras = Loras()  # of its classifiers
        self._classifiers: dict[str, Guide] = {}
        self.configure(saved.settings)

    @abstractmethod
    def configure(self, settings: Any) -> None:
        """Take what the class says of its network from the settings of its checkpoint."""

    @abstractmethod
    def conditioning(self, request: Request, index: Sequence[int]) -> Conditioning:
        """The network's conditions of the request's images with these indices, on the CPU, except for those of the
        low-resolution image.

        Guidance and batching include whatever is there. Raises InputError for missing or impossible conditions.
        """

    @property
    def path(self) -> str:
        """Its checkpoint's path, for messages."""
        return self.saved.path

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None for a network without text of its own."""
        return self.saved.tokenizer

    @property
    def is_upsampler(self) -> bool:
        return self.small_size > 0

    @property
    def flags(self) -> StageFlags:
        """What its settings are called beside those of other stages."""
        return UPSAMPLERS if self.is_upsampler else BASE

    @property
    def has_no(self) -> tuple[str, ...]:
        """Settings of other kinds of stages."""
        own = () if self.is_upsampler else ("noise_level", "blur_level", "tile_size")
        return (*own, "shift", "t_start", "t_end")

    @property
    def tile_divisor(self) -> int:
        """Required divisor of the size of a tile, in the unit in which that is given."""
        return self.divisor

    @property
    def factor(self) -> int:
        """The upsampling factor; 1 if it is no upsampler."""
        return self.image_size // (self.small_size or self.image_size)

    @property
    def divisor(self) -> int:
        """Required divisor of height and width."""
        return self.unet.divisor

    @property
    def reads_text(self) -> bool:
        """Whether it is conditioned on prompts of its own accord, without ``text_states``."""
        return self.tokenizer is not None

    def check_after(self, before: Stage) -> None:
        """InputError if it cannot continue from the signal of the stage before it."""
        if not self.is_upsampler:
            raise InputError(
                f"{self.path} is a base generator, not an upsampler: only {named('model_path')} can be one"
            )
        if before.image_size != self.small_size:
            raise InputError(
                f"{before.path} generates {before.image_size}-pixel images, but {self.path} upsamples "
                f"{self.small_size}-pixel images (its small_size): give stages with matching sizes"
            )
        if before.signal.channels != self.signal.channels:
            raise InputError(
                f"{before.path} has {before.signal.channels} channels, but {self.path} has {self.signal.channels}: "
                "give stages with the same image_channels"
            )

    def size_before(self, size: tuple[int, int], before: Stage) -> tuple[int, int]:
        """Height and width of the signal of the stage before it, from which its own gets this size."""
        return size[0] // self.factor, size[1] // self.factor

    def divisor_after(self, divisor: int) -> int:
        """Required divisor of height and width, if that of the stage before it is ``divisor``."""
        return math.lcm(self.divisor, divisor * self.factor)

    def from_low_res(self, images: np.ndarray) -> Tensor:
        """Images without a base generator, uint8 [N, h, w, 3], as the signal that ``sample_batches`` continues from."""
        return self.signal.from_pixels(images)

    def pixels(self, x: Tensor) -> np.ndarray:
        """Its signal as pictures, uint8 [N, *picture_size, 3]."""
        return self.signal.to_pixels(x)

    def picture_size(self, size: tuple[int, int]) -> tuple[int, int]:
        """Height and width in pixels of a signal of this size."""
        return self.signal.scale * size[0], self.signal.scale * size[1]

    def check_last(self) -> None:  # noqa: B027  (optional)
        """InputError if its signal does not become pictures."""

    def release(self) -> None:  # noqa: B027  (optional)
        """Free what it loaded beside its network, unless that is kept."""

    def check_beside(self, other: Stage) -> None:  # noqa: B027  (optional)
        """InputError if it cannot work for the same request as another stage, before it in the cascade."""

    def network(self) -> nn.Module:
        """The network with its weights, loaded unless kept."""
        network = self._network or for_inference(self.saved.load(self.device), self.precision)
        self._network = network if self.keep else None
        return network

    def process(self, settings: StageSettings) -> Process:
        """The process with the sampling steps."""
        return settings.sampler.process(self.diffusion)

    def guidable(self, cond: Conditioning) -> bool:
        """Whether there is something to guide by, with these conditions beside the low-resolution image."""
        return cond.droppable

    def negative_conditioning(self, cond: Conditioning, negative_prompt: str) -> Conditioning | None:
        """The negative condition of classifier-free guidance: ``cond`` with caption, class and image embedding dropped,
        or with the negative prompt as its caption. None for an unconditional generator."""
        if not cond.droppable:
            return None
        count = len(next(iter(cond.present().values())))
        null = cond.drop(torch.ones(count, dtype=torch.bool), self.num_classes)
        if not negative_prompt or self.tokenizer is None:
            return null
        text = self.text([negative_prompt] * count)
        return replace(null, tokens=text.tokens, mask=text.mask)

    def text(self, prompts: Sequence[str]) -> Conditioning:
        """The prompts as its own text encoder reads them, without which there is none."""
        if self.tokenizer is None:
            return Conditioning()
        tokens, mask = self.tokenizer(list(prompts), self.config.text.text_length)
        return Conditioning(tokens=tokens, mask=mask)

    def tiled(self, network: nn.Module, settings: StageSettings) -> nn.Module:
        """The network on tiles."""
        return Tiled(network, settings.tile_size, settings.tile_overlap, self.divisor)

    def sample_batches(
        self, job: StageJob, index: Sequence[int], low_res: Tensor | None
    ) -> Generator[Tensor, None, None]:
        """Sample the request's images with these indices, in batches in the order of ``index``, as the next stage reads
        them: [n, C, *job.size] float32 on the CPU.

        low_res: an upsampler's input, [len(index), C, h, w], from the stage before it.
        """
        try:
            with autocast(self.precision, self.device):
                yield from self._sample_batches(job, index, low_res)
        finally:
            self.release()
            if not self.keep:
                self._classifiers.clear()
                if self.device.type == "cuda":
                    torch.cuda.empty_cache()  # this stage's memory, for the next one

    def _sample_batches(self, job: StageJob, index: Sequence[int], low_res: Tensor | None) -> Iterator[Tensor]:
        request, settings = job.request, job.settings
        network, process, classifier = self.network(), self.process(settings), self.classifier(settings)
        steering, control = self.steering, request.control
        if steering and control:
            network = steering.around(network, control.scale)
        if settings.tile_size:
            network = self.tiled(network, settings)
        for start in range(0, len(index), settings.batch_size):
            part = index[start : start + settings.batch_size]
            seeds = [request.seeds[i] if settings.seed is None else settings.seed + i for i in part]
            cond, null = self.conditioning(request, part), None
            if low_res is not None:
                cond = self.continued(cond, low_res[start : start + len(part)], seeds, job)
            if steering and control:
                cond = replace(cond, control=steering.controls(control, part, job.size, self.signal, seeds, job.index))
            if settings.guidance.scales(cond.droppable) != (1.0, 1.0):
                null = self.negative_conditioning(cond, request.negative_prompt)
            batch = SampleBatch(
                self.signal,
                job.size,
                seeds,
                cond,
                null,
                request.edit.at(part, job.size, self.signal, self.inpaints) if request.edit else None,
                job.index,
                control.interval if steering and control else (0.0, 1.0),
            )
            guide = None
            if classifier is not None:
                prompts = request.prompts if request.classifier_prompts is None else request.classifier_prompts
                guide = classifier.guide(
                    [prompts[i] for i in part],
                    None if request.labels is None else [request.labels[i] for i in part],
                    settings.classifier_scale,
                    settings.classifier_gradient,
                )
                own = None if classifier.has_noise_of(self.diffusion) else classifier.process
                first = settings.sampler.timestep_respacing is not None
                guide = replace(guide, form=settings.form, limit_first=first, process=own)
            watch = self._watched(job, part, step_count(process, batch.edit))
            x = sample_batch(network, process, batch, settings.sampler, settings.guidance, guide, watch)
            yield self.signal.finish(x.cpu())

    def _watched(self, job: StageJob, part: Sequence[int], steps: int) -> Callable[[Step], object] | None:
        """What is called with each step of the images ``part``, on behalf of the job's ``watch``."""
        if (watch := job.watch) is None:
            return None
        number = itertools.count(1)
        return lambda step: watch(Progress(self, part, next(number), steps, step.x_start))

    def classifier(self, settings: StageSettings) -> Guide | None:
        """The classifier that guides this stage, or None."""
        path = settings.classifier
        if settings.classifier_scale == 0:
            return None
        if not isinstance(path, str):
            return path
        if path not in self._classifiers:
            self._classifiers[path] = load_guide(path, self.device, self.precision, self.bpe_path, self.guide_loras)
        return self._classifiers[path]

    def continued(self, cond: Conditioning, low_res: Tensor, seeds: Sequence[int], job: StageJob) -> Conditioning:
        """``cond`` with the low-resolution image, blurred and noised as the settings say."""
        images = low_res.to(self.device, memory_format=torch.channels_last)  # the networks' format
        given = job.settings.noise_level, job.settings.blur_level
        level, sigma = (torch.full((len(images),), float(value), device=self.device) for value in given)
        noise = seeds_draw(seeds, job.index, self.device).normal("low-resolution noise", images.shape[1:])
        return replace(cond, **self.degradation.apply(images, sigma, level, noise))
