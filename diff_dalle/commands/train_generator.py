"""Settings of ``train_generator.py``, and the trainee built from them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

import torch

from ..checkpoints.kinds import find_kind
from ..config import faults_of, section, settings
from ..data.loader import DataConfig, Loader
from ..diffusion.augmentation import AugmentationConfig, area_downsample
from ..diffusion.diffusion_config import DiffusionConfig, create_gaussian_diffusion
from ..diffusion.preview_config import PreviewConfig
from ..diffusion.resample import DenoisingConfig
from ..distributed.launch import DistributedConfig
from ..distributed.world import World
from ..errors import Fault, named
from ..images.signal import Signal
from ..images.transforms import Window
from ..models.generator import GeneratorConfig
from ..tasks.denoising import DenoisingTask
from ..tasks.previews import Previews
from ..tasks.upsampling import UpsamplingTask
from ..text.tokenizer import Tokenizer, TokenizerConfig
from ..tracking.trackers import TrackingConfig
from ..training.optim_config import OptimConfig
from ..training.settings import TrainingConfig
from ..training.trainee import Trainee
from .training import TrainingRun


@settings
class GeneratorRun(TrainingRun):
    """Settings of ``train_generator.py``: of a base generator or, with ``small_size``, an upsampler."""

    kind: ClassVar[str] = "generator"

    data: DataConfig = section(DataConfig)
    model: GeneratorConfig = section(GeneratorConfig)
    tokenizer: TokenizerConfig = section(TokenizerConfig)
    diffusion: DiffusionConfig = section(DiffusionConfig)
    denoising: DenoisingConfig = section(DenoisingConfig)
    augmentation: AugmentationConfig = section(AugmentationConfig)
    optim: OptimConfig = section(OptimConfig)
    training: TrainingConfig = section(TrainingConfig)
    preview: PreviewConfig = section(PreviewConfig)
    tracking: TrackingConfig = section(TrackingConfig)
    distributed: DistributedConfig = section(DistributedConfig)

    def faults(self) -> Iterator[Fault]:
        model, aspect, crop = self.model, self.data.aspect, self.augmentation.crop_size
        yield from self.wrong_annealing(self.optim)
        if not model.is_upsampler and self.augmentation != AugmentationConfig():
            names = f"{named('gaussian_blur')}, {named('noise_augmentation')} and {named('crop_size')}"
            remedy = f"set {named('small_size')}, or leave them out"
            yield Fault("", f"{names} are for upsamplers, but this is a base generator: {remedy}")
        if model.low_res.low_res_skip and self.diffusion.prediction != "x_start":
            found = f"but prediction is {self.diffusion.prediction}: set {named('prediction')} x_start"
            rule = f"adds the upsampled input to a prediction of x_start, {found}, or leave it out"
            yield Fault("model.low_res.low_res_skip", rule)
        if crop > self.image_size or crop % model.factor:
            most = f"at most {named('image_size')} ({self.image_size})"
            rule = f"must be {most} and a multiple of the upsampling factor ({model.factor})"
            yield Fault.of(self, "augmentation.crop_size", rule)
        if crop % model.unet.divisor:
            rule = f"must be a multiple of {model.unet.divisor}, the network's downsampling factor"
            yield Fault.of(self, "augmentation.crop_size", rule)
        multiple = math.lcm(model.unet.divisor, model.factor)
        if aspect.multi_aspect_ratio and aspect.bucket_factor % multiple:
            rule = f"must be a multiple of {multiple}, as the sizes of the network's images are"
            yield Fault.of(self, "data.aspect.bucket_factor", rule)
        is_conditional = self.has_text or self.num_classes > 0
        yield from faults_of(lambda: self.preview.check(self.diffusion, self.signal, is_conditional))

    @property
    def image_size(self) -> int:
        return self.model.unet.image_size

    @property
    def image_channels(self) -> int:
        return self.model.channels

    @property
    def text_length(self) -> int:
        return self.model.text.text_length

    @property
    def has_text(self) -> bool:
        return self.model.text.enc_attn_dim > 0

    @property
    def num_classes(self) -> int:
        return self.model.unet.num_classes

    @property
    def window(self) -> Window | None:
        crop = self.augmentation.crop_size
        return Window(crop, self.model.factor) if crop else None

    @property
    def signal(self) -> Signal:
        return find_kind(self.network_kind).of_run(self).signal

    @property
    def sample_interval(self) -> int:
        return self.preview.sample_interval

    def build_trainees(self, tokenizer: Tokenizer | None, shown: Loader, world: World) -> list[Trainee]:
        process, previews = create_gaussian_diffusion(self.diffusion), self.build_previews(tokenizer, shown)
        model = self.build_model(tokenizer, world)
        if self.model.is_upsampler:
            extra = self.model.factor, self.augmentation.degradation
            task: DenoisingTask = UpsamplingTask(model, process, self.denoising, *extra, self.num_classes, previews)
        else:
            task = DenoisingTask(model, process, self.denoising, self.num_classes, previews)
        return [Trainee(task, self.optim, self.training.precision, world)]

    def build_previews(self, tokenizer: Tokenizer | None, data: Loader) -> Previews | None:
        """Previews of the first conditions of ``data``; None at sample_interval 0."""
        if not self.sample_interval:
            return None
        count = self.preview.preview_samples
        batch = data.first(count)
        cond, images = batch.cond.to("cpu"), batch.images.cpu()
        if tokenizer:
            captions = [tokenizer.decode(row) for row in cond.caption[0].tolist()]
        else:
            captions = [""] * count if cond.labels is None else [str(label) for label in cond.labels.tolist()]
        inputs = originals = None
        if self.model.is_upsampler:
            low_res, zero = area_downsample(images, self.model.factor), torch.zeros(count)
            cond = replace(cond, low_res=low_res, low_res_level=zero, low_res_blur=zero)
            upsampled = low_res.repeat_interleave(self.model.factor, 2).repeat_interleave(self.model.factor, 3)
            inputs, originals = self.signal.to_pixels(upsampled), self.signal.to_pixels(images)
        size, batch_size = (images.shape[2], images.shape[3]), self.training.microbatch or self.training.batch_size
        shown = self.preview, self.diffusion, self.signal, cond, captions, size, batch_size
        return Previews(*shown, self.num_classes, inputs, originals)
