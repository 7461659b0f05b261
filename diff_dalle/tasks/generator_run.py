"""Everything that a run training a generator is set by, and what is built from it."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch

from ..config import section, to_dict
from ..data.loader import DataConfig, Loader
from ..diffusion.gaussian_diffusion import DiffusionConfig, create_gaussian_diffusion
from ..distributed import DistributedConfig, World
from ..errors import InputError
from ..models.generator import Generator, GeneratorConfig
from ..text.tokenizer import Tokenizer, TokenizerConfig, load_tokenizer
from ..tracking.trackers import TrackingConfig
from ..training.checkpoint import Identity
from ..training.loop import TrainingConfig
from ..training.optim import OptimConfig
from .denoising import DenoisingConfig, DenoisingTask
from .previews import PreviewConfig, Previews


@dataclass(frozen=True)
class GeneratorRun:
    """Settings of ``train_generator.py``; ``model``, ``diffusion`` and ``tokenizer`` are what sampling needs later."""

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
        if not self.model.text.enc_attn_dim and not self.model.unet.num_classes and self.denoising.caption_dropout:
            object.__setattr__(self, "denoising", replace(self.denoising, caption_dropout=0.0))
