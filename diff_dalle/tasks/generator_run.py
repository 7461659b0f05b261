"""Everything that a run training a generator is set by, and what is built from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..config import section
from ..data.loader import DataConfig, Loader
from ..diffusion.diffusion_config import DiffusionConfig, create_gaussian_diffusion
from ..distributed import DistributedConfig, World
from ..models.generator import Generator, GeneratorConfig
from ..text.tokenizer import Tokenizer, TokenizerConfig
from ..tracking.trackers import TrackingConfig
from ..training.loop import TrainingConfig
from ..training.optim import OptimConfig
from ..training.trainee import Trainee
from .denoising import DenoisingConfig, DenoisingTask
from .previews import PreviewConfig, Previews
from .training_run import TrainingRun


@dataclass(frozen=True)
class GeneratorRun(TrainingRun):
    """Settings of ``train_generator.py``; sampling later needs ``model``, ``diffusion`` and ``tokenizer`` only."""

    kind: ClassVar[str] = "generator"

    data: DataConfig = section(DataConfig)
    model: GeneratorConfig = section(GeneratorConfig)
    tokenizer: TokenizerConfig = section(TokenizerConfig)
    diffusion: DiffusionConfig = section(DiffusionConfig)
    denoising: DenoisingConfig = section(DenoisingConfig)
    optim: OptimConfig = section(OptimConfig)
    training: TrainingConfig = section(TrainingConfig)
    preview: PreviewConfig = section(PreviewConfig)
    tracking: TrackingConfig = section(TrackingConfig)
    distributed: DistributedConfig = section(DistributedConfig)

    def __post_init__(self):
        self.check_annealing(self.optim)
        if self.sample_interval:  # refused now rather than at the first preview
            create_gaussian_diffusion(self.diffusion, self.preview.sampler.timestep_respacing)

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
    def sample_interval(self) -> int:
        return self.preview.sample_interval

    def build_trainees(self, tokenizer: Tokenizer | None, shown: Loader, world: World) -> list[Trainee]:
        process, previews = create_gaussian_diffusion(self.diffusion), self.build_previews(tokenizer, shown)
        task = DenoisingTask(self.build_model(tokenizer), process, self.denoising, self.num_classes, previews)
        return [Trainee(task, self.optim, self.training.precision, world)]

    def build_model(self, tokenizer: Tokenizer | None) -> Generator:
        """The network with its initial weights, the same for the same seed on every rank."""
        torch.manual_seed(self.training.seed)
        return Generator(self.model, tokenizer.vocab_size if tokenizer else 0, self.diffusion.out_channels)

    def build_previews(self, tokenizer: Tokenizer | None, data: Loader) -> Previews | None:
        """Previews of the first conditions of ``data``; None when the run wants none."""
        if not self.sample_interval:
            return None
        count = self.preview.preview_samples
        cond = data.batch_at(range(count)).cond.to("cpu")
        if tokenizer:
            captions = [tokenizer.decode(row) for row in cond.tokens.tolist()]
        else:
            captions = [""] * count if cond.labels is None else [str(label) for label in cond.labels.tolist()]
        size = (self.image_size, self.image_size)
        return Previews(self.preview, self.diffusion, cond, captions, size, self.num_classes)
