"""Settings of ``train_generator.py``, and the trainee built from them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from ..checkpoints.kinds import find_kind
from ..config import section
from ..data.loader import DataConfig, Loader
from ..diffusion.augmentation import AugmentationConfig, area_downsample
from ..diffusion.diffusion_config import DiffusionConfig, create_gaussian_diffusion
from ..diffusion.preview_config import PreviewConfig
from ..diffusion.resample import DenoisingConfig
from ..distributed.launch import DistributedConfig
from ..distributed.world import World
from ..errors import InputError
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


@dataclass(frozen=True)
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

    def __post_init__(self):
        self.check_annealing(self.optim)
        self._check_upsampling()
        self.check_aspect(math.lcm(self.model.unet.divisor, self.model.factor))
        self.preview.check(self.diffusion, self.signal, self.has_text or self.num_classes > 0)

    def _check_upsampling(self) -> None:
        augmentation, crop = self.augmentation, self.augmentation.crop_size
        if not self.model.is_upsampler and augmentation != AugmentationConfig():
            raise InputError(
                "gaussian_blur, noise_augmentation and crop_size are for upsamplers, but this is a base "
                "generator: set --small_size, or leave them out"
            )
        if self.model.low_res.low_res_skip and self.diffusion.prediction != "x_start":
            raise InputError(
                f"low_res_skip adds the upsampled input to a prediction of x_start, but prediction is "
                f"{self.diffusion.prediction}: set --prediction x_start, or leave low_res_skip out"
            )
        if crop > self.image_size or crop % self.model.factor:
            raise InputError(
                f"crop_size is {crop}, but must be at most image_size ({self.image_size}) and a multiple "
                f"of the upsampling factor ({self.model.factor})"
            )
        if crop % self.model.unet.divisor:
            raise InputError(
                f"crop_size is {crop}, but must be a multiple of {self.model.unet.divisor}, the network's "
                "downsampling factor"
            )

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
        kind = find_kind(self.network_kind)
        return kind.signal(kind.settings_of(self))

    @property
    def sample_interval(self) -> int:
        return self.preview.sample_interval

    def build_trainees(self, tokenizer: Tokenizer | None, shown: Loader, world: World) -> list[Trainee]:
        process, previews = create_gaussian_diffusion(self.diffusion), self.build_previews(tokenizer, shown)
        model = self.build_model(tokenizer, world)
        if self.model.is_upsampler:
            task: DenoisingTask = UpsamplingTask(
                model,
                process,
                self.denoising,
                self.model.factor,
                self.augmentation.degradation,
                self.num_classes,
                previews,
            )
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
        size = (images.shape[2], images.shape[3])
        return Previews(
            self.preview,
            self.diffusion,
            self.signal,
            cond,
            captions,
            size,
            self.training.microbatch or self.training.batch_size,
            self.num_classes,
            inputs,
            originals,
        )
