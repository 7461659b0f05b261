"""What the table for GPUs trains: networks of full size with their tasks and batches, and their published forms.

Trained without dropout where nothing else is said, since published forms have none here. Networks are built on torch's
default device: the initial values of a billion parameters take a CPU as long as some rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from diff_dalle.batch import Batch, Conditioning
from diff_dalle.diffusion.augmentation import Degradation
from diff_dalle.diffusion.diffusion_config import DiffusionConfig, create_gaussian_diffusion
from diff_dalle.diffusion.log_snr import LogSnrProcess
from diff_dalle.diffusion.log_snr_config import LogSnrConfig
from diff_dalle.diffusion.resample import ContrastiveConfig, DenoisingConfig
from diff_dalle.distributed.world import ALONE
from diff_dalle.models.generator import Generator, GeneratorConfig, LowResConfig
from diff_dalle.models.latent.config import LatentUnetConfig
from diff_dalle.models.latent.stages import (
    STAGE_B_SIZES,
    STAGE_C_SIZES,
    StageB,
    StageBConfig,
    StageC,
    StageCConfig,
    zero_inputs,
)
from diff_dalle.models.latent.unet import LatentUnet
from diff_dalle.models.layers import to_channels_last
from diff_dalle.models.noised_clip import NoisedClip, NoisedClipConfig
from diff_dalle.models.text_encoder import TextEncoderConfig
from diff_dalle.models.transformer import DenoiserConfig
from diff_dalle.randomness import Draw
from diff_dalle.tasks.contrastive import ContrastiveTask
from diff_dalle.tasks.denoising import DenoisingTask, UpsamplingTask
from diff_dalle.tasks.latent import LatentConfig, LatentTask
from diff_dalle.training.task import Task

from .baseline_latent import BaselineLatentUnet
from .baseline_unet import BaselineUNet
from .train_step import config_of

VOCABULARY = 50  # few words: their embeddings should not count
NO_TEXT = TextEncoderConfig(enc_attn_dim=0)


@dataclass(frozen=True)
class Subject(ABC):
    """name: in the table; batch_size: images per step, if they fit; config: of the network."""

    name: str
    batch_size: int
    config: Any

    @abstractmethod
    def network(self) -> nn.Module:
        """Ours."""

    @abstractmethod
    def task(self, network: nn.Module) -> Task:
        """What either of them is trained on."""

    @abstractmethod
    def batch(self, count: int) -> Batch: ...

    def with_config(self, **changed: Any) -> Subject:
        return replace(self, config=replace(self.config, **changed))


@cache
def flops_per_image(subject: Subject) -> int:
    """FLOPs of our forward and backward pass, nothing computed twice; a multiply-add counts as two."""
    with torch.device("meta"):
        network, batch = subject.network(), subject.batch(1)
    task = subject.task(network)
    with FlopCounterMode(display=False) as counter:
        task.losses(batch, Draw(0, batch.index, "meta"))["loss"].sum().backward()
    return counter.get_total_flops()


def _images(count: int, channels: int, size: int) -> Tensor:
    return torch.rand(count, channels, size, size) * 2 - 1


def _index(count: int) -> Tensor:
    return torch.arange(count, device="cpu")


# -------------------------------------------------------------------------------------------------------------- pixels


class _Published(nn.Module):
    """Guided-Diffusion's network, which sees a low-resolution image beside the noisy one."""

    def __init__(self, config: DenoiserConfig, in_channels: int):
        super().__init__()
        self.unet = BaselineUNet(config, in_channels)

    def forward(self, x: Tensor, t: Tensor, cond: Conditioning) -> Tensor:
        if cond.low_res is not None:
            x = torch.cat([x, F.interpolate(cond.low_res, x.shape[2:], mode="bilinear")], dim=1)
        return self.unet(x, t)


@dataclass(frozen=True)
class Pixels(Subject):
    """A generator, or with a ``factor`` an upsampler."""

    config: DenoiserConfig
    factor: int = 0
    text: TextEncoderConfig = NO_TEXT

    def network(self) -> Generator:
        low_res = LowResConfig(self.config.image_size // self.factor) if self.factor else LowResConfig()
        return to_channels_last(Generator(GeneratorConfig(self.config, self.text, low_res), VOCABULARY))

    def published(self) -> nn.Module:
        """The published form, which takes the same arguments."""
        return _Published(self.config, 6 if self.factor else 3)

    def task(self, network: nn.Module) -> DenoisingTask:
        process, settings = create_gaussian_diffusion(DiffusionConfig()), DenoisingConfig(caption_dropout=0.0)
        if self.factor:
            return UpsamplingTask(network, process, settings, self.factor, Degradation(max_level=0.5))
        return DenoisingTask(network, process, settings)

    def batch(self, count: int) -> Batch:
        return Batch(_images(count, 3, self.config.image_size), Conditioning(), _index(count))


# ------------------------------------------------------------------------------------------------------------- latents


class _LatentsTask(LatentTask):
    """The batch's images are latents, its conditions encoded: the loss without the frozen networks that make them."""

    def latents(self, batch: Batch) -> Tensor:
        return batch.images

    def condition(self, batch: Batch, draw: Draw | None = None) -> Conditioning:
        return batch.cond


@dataclass(frozen=True)
class Latents(Subject):
    """Stage B or C. side: of the latents."""

    config: LatentUnetConfig
    side: int

    def network(self) -> nn.Module:
        c = self.config
        network = StageB(c, VOCABULARY) if isinstance(c, StageBConfig) else StageC(cast(StageCConfig, c), VOCABULARY)
        return to_channels_last(network)

    def published(self) -> nn.Module:
        """As that of ``Pixels``."""
        return BaselineLatentUnet(self.config, VOCABULARY)

    def task(self, network: nn.Module) -> LatentTask:
        return _LatentsTask(cast(LatentUnet, network), LogSnrProcess(LogSnrConfig()), LatentConfig())

    def batch(self, count: int) -> Batch:
        x, _, cond = zero_inputs(self.config, count, self.side, self.side)
        return Batch(torch.randn_like(x), cond, _index(count))


def _without_dropout(config: LatentUnetConfig, **changed) -> LatentUnetConfig:
    return replace(config, dropout=(0.0,) * config.depth, **changed)


# ---------------------------------------------------------------------------------------------------------- classifier


@dataclass(frozen=True)
class Classifier(Subject):
    """A noised CLIP."""

    config: NoisedClipConfig

    def network(self) -> NoisedClip:
        return to_channels_last(NoisedClip(self.config, VOCABULARY))

    def task(self, network: nn.Module) -> ContrastiveTask:
        process = create_gaussian_diffusion(DiffusionConfig())
        return ContrastiveTask(cast(NoisedClip, network), process, ContrastiveConfig(), ALONE)

    def batch(self, count: int) -> Batch:
        tokens = torch.ones(count, self.config.text_length, dtype=torch.long)
        cond = Conditioning(tokens=tokens, mask=tokens > 0)
        return Batch(_images(count, 3, self.config.image_size), cond, _index(count))


# ----------------------------------------------------------------------------------------------------------- full size

#: Guided-Diffusion's at 64 pixels, and an upsampler to 256.
GENERATOR = Pixels("generator, 64 px", 64, DenoiserConfig(**vars(config_of(192))))
UPSAMPLER = Pixels(
    "upsampler, 256 px",
    8,
    DenoiserConfig(
        image_size=256,
        num_channels=192,
        num_res_blocks=2,
        channel_mult=(1, 1, 2, 2, 4, 4),
        attention_resolutions=(32, 16, 8),
        num_head_channels=64,
        resblock_updown=True,
    ),
    factor=4,
)
#: At the latents of 1,024 pixels. Stage B without the picture that its published form takes beside them.
STAGE_C = Latents("stage C 1B", 32, _without_dropout(STAGE_C_SIZES["1B"]), 24)
STAGE_C_LARGE = Latents("stage C 3.6B", 8, _without_dropout(STAGE_C_SIZES["3.6B"]), 24)
STAGE_B = Latents("stage B 700M", 4, _without_dropout(STAGE_B_SIZES["700M"], pixel_channels=0), 256)
#: The preset classifier_64.
CLASSIFIER = Classifier(
    "classifier, 64 px", 256, NoisedClipConfig(classifier_depth=4, classifier_enc_depth=12, classifier_enc_heads=8)
)
#: With text, for sampling.
SAMPLED = Pixels("64 px", 32, GENERATOR.config, text=TextEncoderConfig(enc_attn_dim=512, enc_depth=6, enc_heads=8))
