"""Everything that a run training a generator is set by, and what is built from it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch

from ..config import section
from ..data.loader import DataConfig, Loader
from ..diffusion.augmentation import AugmentationConfig, downsample
from ..diffusion.diffusion_config import DiffusionConfig, create_gaussian_diffusion
from ..distributed.launch import DistributedConfig
from ..distributed.world import World
from ..errors import InputError
from ..images.pixels import to_uint8
from ..images.transforms import Window
from ..models.generator import GeneratorConfig
from ..tasks.denoising import DenoisingConfig, DenoisingTask
from ..tasks.previews import PreviewConfig, Previews
from ..tasks.upsampling import UpsamplingTask
from ..text.tokenizer import Tokenizer, TokenizerConfig
from ..tracking.trackers import TrackingConfig
from ..training.loop import TrainingConfig
from ..training.optim import OptimConfig
from ..training.trainee import Trainee
from .training import TrainingRun


@dataclass(frozen=True)
class GeneratorRun(TrainingRun):
    """Settings of ``train_generator.py``, for a base generator and, with ``small_size``, an up-sampler; sampling later
    needs ``model``, ``diffusion``, ``augmentation`` and ``tokenizer`` only."""

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
        if self.sample_interval:  # refused now rather than at the first preview
            create_gaussian_diffusion(self.diffusion, self.preview.sampler.timestep_respacing)

    def _check_upsampling(self) -> None:
        augmentation, crop = self.augmentation, self.augmentation.crop_size
        if not self.model.is_upsampler and augmentation != AugmentationConfig():
            raise InputError("gaussian_blur, noise_augmentation and crop_size are for up-samplers, but this is a base "
                             "generator: give --small_size, or leave them out")  # fmt: skip
        if self.model.low_res.low_res_skip and self.diffusion.prediction != "x_start":
            raise InputError(f"low_res_skip adds the enlarged image to what is predicted, but prediction is "
                             f"{self.diffusion.prediction}: set --prediction x_start, or leave it out")  # fmt: skip
        if crop > self.image_size or crop % self.model.factor:
            raise InputError(f"crop_size is {crop}, but must be at most image_size ({self.image_size}) and a multiple "
                             f"of the factor of enlargement ({self.model.factor})")  # fmt: skip
        if crop % self.model.unet.divisor:
            raise InputError(f"crop_size is {crop}, but must be a multiple of {self.model.unet.divisor}, by which the "
                             "network divides")  # fmt: skip

    @property
    def image_size(self) -> int:
        return self.model.unet.image_size

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
    def sample_interval(self) -> int:
        return self.preview.sample_interval

    def build_trainees(self, tokenizer: Tokenizer | None, shown: Loader, world: World) -> list[Trainee]:
        process, previews = create_gaussian_diffusion(self.diffusion), self.build_previews(tokenizer, shown)
        model = self.build_model(tokenizer)
        if self.model.is_upsampler:
            task = UpsamplingTask(model, process, self.denoising, self.model.factor, self.augmentation,
                                  self.num_classes, previews)  # fmt: skip
        else:
            task = DenoisingTask(model, process, self.denoising, self.num_classes, previews)
        return [Trainee(task, self.optim, self.training.precision, world)]

    def build_previews(self, tokenizer: Tokenizer | None, data: Loader) -> Previews | None:
        """Previews of the first conditions of ``data``; None when the run wants none."""
        if not self.sample_interval:
            return None
        count = self.preview.preview_samples
        batch = data.batch_at(range(count))
        cond, images = batch.cond.to("cpu"), batch.images.cpu()
        if tokenizer:
            captions = [tokenizer.decode(row) for row in cond.tokens.tolist()]
        else:
            captions = [""] * count if cond.labels is None else [str(label) for label in cond.labels.tolist()]
        beside: tuple[np.ndarray, ...] = ()
        if self.model.is_upsampler:
            low_res, none = downsample(images, self.model.factor), torch.zeros(count)
            cond = replace(cond, low_res=low_res, low_res_level=none, low_res_blur=none)
            enlarged = low_res.repeat_interleave(self.model.factor, 2).repeat_interleave(self.model.factor, 3)
            beside = tuple(to_uint8(pictures).numpy() for pictures in (enlarged, images))
        size = (images.shape[2], images.shape[3])
        return Previews(self.preview, self.diffusion, cond, captions, size, self.num_classes, beside)
