"""The kinds of networks that see pixels: generators with their upsamplers, classifiers, and decoders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..batch import Conditioning
from ..config import section, settings
from ..diffusion.augmentation import AugmentationConfig
from ..diffusion.diffusion_config import DiffusionConfig, NoiseConfig
from ..diffusion.resample import ContrastiveConfig, DenoisingConfig
from ..diffusion.sampling import PreviewConfig
from ..images.signal import PixelSignal, Signal
from ..models.decoder.unet import DecoderUnet
from ..models.generator import Generator, GeneratorConfig
from ..models.noised_clip import NoisedClip, NoisedClipConfig, NoisyClassifier, NoisyClassifierConfig
from ..models.vit_clip import VitClip, VitClipConfig
from ..text.tokenizer import TokenizerConfig
from .decoder import DecoderConfig
from .kind import NetworkKind, empty_images, empty_text


@settings
class GeneratorSettings(NetworkKind):
    """A base generator, or an upsampler."""

    name = "generator"
    network = Generator
    title = "generator"
    does = "text-to-image"
    stage = "pixel_stages.GeneratorStage"
    checkpoint_flag = "use_checkpoint"
    checkpointing = "model.unet.use_checkpoint"

    model: GeneratorConfig = section(GeneratorConfig)
    tokenizer: TokenizerConfig = section(TokenizerConfig)
    diffusion: DiffusionConfig = section(DiffusionConfig)
    denoising: DenoisingConfig = section(DenoisingConfig)
    augmentation: AugmentationConfig = section(AugmentationConfig)
    preview: PreviewConfig = section(PreviewConfig)

    def build(self, vocab_size: int = 0, trainee: str = "") -> Generator:
        return Generator(self.model, vocab_size, self.diffusion.variance_is_learned)

    def sizes(self, trainee: str) -> tuple[int, int]:
        size = self.model.unet.image_size
        return size, self.augmentation.crop_size or size

    def forward(self, network: nn.Module, images: int, side: int, trainee: str) -> Tensor:
        model, t = self.model, torch.zeros(images, dtype=torch.int64)
        found: dict[str, Any] = {}
        if model.text.enc_attn_dim:
            found = empty_text(images, model.text.text_length)
        if model.unet.num_classes:
            found["labels"] = t
        if model.is_upsampler:
            found["low_res"] = empty_images(images, model.channels, side // model.factor)
            found |= dict.fromkeys(("low_res_level", "low_res_blur"), torch.zeros(images))
        return network(empty_images(images, model.channels, side), t, Conditioning(**found))

    @property
    def signal(self) -> Signal:
        return PixelSignal(self.model.channels)

    @property
    def described(self) -> tuple[str, str]:
        model = self.model
        inpainting = "inpainting " if model.inpaint else ""
        if model.is_upsampler:
            size = model.low_res.small_size
            return f"{inpainting}upsampler of images of {size}×{size} pixels", "image-to-image"
        if model.text.enc_attn_dim:
            return f"{inpainting}text-to-image generator", self.does
        condition = "class-conditional" if model.unet.num_classes else "unconditional"
        return f"{inpainting}{condition} image generator", "unconditional-image-generation"


class _GuidingClip(NetworkKind):
    """What CLIPs that guide the sampling share."""

    does = "zero-shot-image-classification"
    role = "classifier_path"
    signal = PixelSignal(3)

    def forward(self, network: Any, images: int, side: int, trainee: str) -> Tensor:
        t, text = torch.zeros(images, dtype=torch.int64), empty_text(images, self.model.text_length)
        return network.encode_image(empty_images(images, 3, side), t) * network.encode_text(*text.values())


@settings
class ClassifierSettings(_GuidingClip):
    """A CLIP that guides the sampling."""

    name = "classifier"
    network = NoisedClip
    reads_tokens = True
    title = "CLIP"
    checkpoint_flag = "classifier_use_checkpoint"
    checkpointing = "model.classifier_use_checkpoint"

    model: NoisedClipConfig = section(NoisedClipConfig)
    tokenizer: TokenizerConfig = section(TokenizerConfig)
    diffusion: NoiseConfig = section(NoiseConfig)
    contrastive: ContrastiveConfig = section(ContrastiveConfig)

    @property
    def described(self) -> tuple[str, str]:
        images = "noised" if self.contrastive.noised else "clean"
        return f"{self.title} trained on {images} images", self.does


@settings
class NoisyClassifierSettings(NetworkKind):
    """A classifier of classes that guides the sampling; it comes from other projects' checkpoints only."""

    name = "noisy_classifier"
    network = NoisyClassifier
    title = "classifier of noisy images into classes"
    does = "image-classification"
    role = "classifier_path"
    checkpoint_flag = "use_checkpoint"
    image_size = "model.tower.image_size"
    checkpointing = "model.tower.use_checkpoint"
    signal = PixelSignal(3)

    model: NoisyClassifierConfig = section(NoisyClassifierConfig)
    diffusion: NoiseConfig = section(NoiseConfig)

    def forward(self, network: nn.Module, images: int, side: int, trainee: str) -> Tensor:
        return network(empty_images(images, 3, side), torch.zeros(images, dtype=torch.int64))


@settings
class VitClipSettings(_GuidingClip):
    """GLIDE's noised CLIP; it comes from that project's checkpoints only."""

    name = "vit_clip"
    network = VitClip
    title = "CLIP with a vision transformer"

    model: VitClipConfig = section(VitClipConfig)
    tokenizer: TokenizerConfig = section(TokenizerConfig)
    diffusion: NoiseConfig = section(NoiseConfig)
    contrastive: ContrastiveConfig = section(ContrastiveConfig)

    def is_checkpointed(self, trainee: str) -> bool:
        return False

    def with_checkpoint(self, value: bool) -> VitClipSettings:
        return self


@settings
class DecoderSettings(NetworkKind):
    """Several U-Nets that are conditioned on CLIP embeddings."""

    name = "decoder"
    network = DecoderUnet
    title = "decoder of CLIP image embeddings"
    does = "image-to-image"
    stage = "pixel_stages.UnetStage"
    checkpoint_flag = "checkpoint_during_training"

    decoder: DecoderConfig = section(DecoderConfig)

    def build(self, vocab_size: int = 0, trainee: str = "") -> nn.Module:
        if trainee:
            return self.decoder.named(trainee).build()
        return nn.ModuleDict({stage.name: stage.build() for stage in self.decoder.stages()})

    def sizes(self, trainee: str) -> tuple[int, int]:
        stage = self.decoder.named(trainee)
        return stage.image_size, stage.crop_size or stage.image_size

    def forward(self, network: nn.Module, images: int, side: int, trainee: str) -> Tensor:
        stage, found = self.decoder.named(trainee), dict[str, Any]()
        unet = stage.unet
        if stage.has_text:
            found = empty_text(images, unet.max_text_len, unet.text_embed_dim or 0)
        if stage.image_embedding:
            found["image_embedding"] = torch.zeros(images, unet.image_embed_dim or 0)
        if stage.is_upsampler:
            found["low_res"] = empty_images(images, unet.channels, side // stage.factor)
            found["low_res_level"] = torch.zeros(images)
        t = torch.zeros(images, dtype=torch.int64)
        return network(empty_images(images, unet.channels, side), t, Conditioning(**found))

    def is_checkpointed(self, trainee: str) -> bool:
        return self.decoder.named(trainee).unet.checkpoint_during_training

    def with_checkpoint(self, value: bool) -> DecoderSettings:
        unets = (replace(unet, checkpoint_during_training=value) for unet in self.decoder.unets)
        return replace(self, decoder=replace(self.decoder, unets=tuple(unets)))

    @property
    def signal(self) -> Signal:
        return PixelSignal(self.decoder.channels)

    @property
    def trainees(self) -> tuple[str, ...]:
        return self.decoder.names

    def summary(self, names: Sequence[str]) -> list[str]:
        stages = [self.decoder.named(name) for name in names]
        lines = [f"{stage.name}: {stage}" for stage in stages]
        if any(stage.image_embedding or stage.has_text for stage in stages):
            lines.append(f"CLIP of the embeddings and texts: {self.decoder.clip or 'not recorded'}")
        return lines
