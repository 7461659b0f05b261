"""The kinds of networks that see pixels: generators with their upsamplers, classifiers, and decoders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..batch import Conditioning
from ..config import section, settings
from ..diffusion.augmentation import AugmentationConfig
from ..diffusion.diffusion_config import DiffusionConfig, NoiseConfig
from ..diffusion.preview_config import PreviewConfig
from ..diffusion.resample import ContrastiveConfig, DenoisingConfig
from ..images.signal import PixelSignal, Signal
from ..models.generator import Generator, GeneratorConfig
from ..models.noised_clip import NoisedClip, NoisedClipConfig
from ..models.noisy_classifier import NoisyClassifier, NoisyClassifierConfig
from ..text.tokenizer import TokenizerConfig
from .decoder import DecoderConfig
from .kind import NetworkKind
from .probe import Probe, empty_captions, empty_images


@settings
class GeneratorSettings(NetworkKind):
    """A base generator, or an upsampler."""

    name = "generator"
    title = "generator"
    does = "text-to-image"
    stage = "generator_stage.GeneratorStage"

    model: GeneratorConfig = section(GeneratorConfig)
    tokenizer: TokenizerConfig = section(TokenizerConfig)
    diffusion: DiffusionConfig = section(DiffusionConfig)
    denoising: DenoisingConfig = section(DenoisingConfig)
    augmentation: AugmentationConfig = section(AugmentationConfig)
    preview: PreviewConfig = section(PreviewConfig)

    def build(self, vocab_size: int = 0, trainee: str = "") -> Generator:
        return Generator(self.model, vocab_size, self.diffusion.variance_is_learned)

    def probe(self, trainee: str = "") -> Probe:
        config, unet = self.model, self.model.unet

        def forward(network: nn.Module, images: int, side: int) -> Tensor:
            cond = empty_captions(images, config.text.text_length) if config.text.enc_attn_dim else Conditioning()
            if unet.num_classes:
                cond = replace(cond, labels=torch.zeros(images, dtype=torch.int64))
            if config.is_upsampler:
                low_res, level = empty_images(images, config.channels, side // config.factor), torch.zeros(images)
                cond = replace(cond, low_res=low_res, low_res_level=level, low_res_blur=level)
            return network(empty_images(images, config.channels, side), torch.zeros(images, dtype=torch.int64), cond)

        def with_checkpoint(value: bool) -> GeneratorSettings:
            return replace(self, model=replace(config, unet=replace(unet, use_checkpoint=value)))

        sizes = (unet.image_size, self.augmentation.crop_size or unet.image_size)
        return Probe(sizes, forward, "use_checkpoint", unet.use_checkpoint, with_checkpoint)

    @property
    def signal(self) -> Signal:
        return PixelSignal(self.model.channels)

    @property
    def described(self) -> tuple[str, str]:
        model = self.model
        if model.is_upsampler:
            size = model.low_res.small_size
            return f"upsampler of images of {size}×{size} pixels", "image-to-image"
        if model.text.enc_attn_dim:
            return "text-to-image generator", self.does
        condition = "class-conditional" if model.unet.num_classes else "unconditional"
        return f"{condition} image generator", "unconditional-image-generation"


@settings
class ClassifierSettings(NetworkKind):
    """A CLIP that guides the sampling."""

    name = "classifier"
    title = "CLIP"
    does = "zero-shot-image-classification"
    role = "classifier_path"

    model: NoisedClipConfig = section(NoisedClipConfig)
    tokenizer: TokenizerConfig = section(TokenizerConfig)
    diffusion: NoiseConfig = section(NoiseConfig)
    contrastive: ContrastiveConfig = section(ContrastiveConfig)

    def build(self, vocab_size: int = 0, trainee: str = "") -> NoisedClip:
        return NoisedClip(self.model, vocab_size)

    def probe(self, trainee: str = "") -> Probe:
        config = self.model

        def forward(network: NoisedClip, images: int, side: int) -> Tensor:
            cond, t = empty_captions(images, config.text_length), torch.zeros(images, dtype=torch.int64)
            return network.encode_image(empty_images(images, 3, side), t) * network.encode_text(*cond.caption)

        def with_checkpoint(value: bool) -> ClassifierSettings:
            return replace(self, model=replace(config, classifier_use_checkpoint=value))

        sizes = (config.image_size, config.image_size)
        return Probe(sizes, forward, "classifier_use_checkpoint", config.classifier_use_checkpoint, with_checkpoint)

    @property
    def signal(self) -> Signal:
        return PixelSignal(3)

    @property
    def described(self) -> tuple[str, str]:
        images = "noised" if self.contrastive.noised else "clean"
        return f"{self.title} trained on {images} images", self.does


@settings
class NoisyClassifierSettings(NetworkKind):
    """A classifier of classes that guides the sampling; it comes from other projects' checkpoints only."""

    name = "noisy_classifier"
    title = "classifier of noisy images into classes"
    does = "image-classification"
    role = "classifier_path"

    model: NoisyClassifierConfig = section(NoisyClassifierConfig)
    diffusion: NoiseConfig = section(NoiseConfig)

    def build(self, vocab_size: int = 0, trainee: str = "") -> NoisyClassifier:
        return NoisyClassifier(self.model)

    def probe(self, trainee: str = "") -> Probe:
        tower = self.model.tower

        def forward(network: nn.Module, images: int, side: int) -> Tensor:
            return network(empty_images(images, 3, side), torch.zeros(images, dtype=torch.int64))

        def with_checkpoint(value: bool) -> NoisyClassifierSettings:
            return replace(self, model=replace(self.model, tower=replace(tower, use_checkpoint=value)))

        sizes = (tower.image_size, tower.image_size)
        return Probe(sizes, forward, "use_checkpoint", tower.use_checkpoint, with_checkpoint)

    @property
    def signal(self) -> Signal:
        return PixelSignal(3)


@settings
class DecoderSettings(NetworkKind):
    """Several U-Nets that are conditioned on CLIP embeddings."""

    name = "decoder"
    title = "decoder of CLIP image embeddings"
    does = "image-to-image"
    stage = "unet_stage.UnetStage"

    decoder: DecoderConfig = section(DecoderConfig)

    def build(self, vocab_size: int = 0, trainee: str = "") -> nn.Module:
        if trainee:
            return self.decoder.named(trainee).build()
        return nn.ModuleDict({stage.name: stage.build() for stage in self.decoder.stages()})

    def probe(self, trainee: str = "") -> Probe:
        stage = self.decoder.named(trainee)
        unet = stage.unet

        def forward(network: nn.Module, images: int, side: int) -> Tensor:
            cond, level = Conditioning(), torch.zeros(images)
            if stage.image_embedding:
                cond = replace(cond, image_embedding=torch.zeros(images, unet.image_embed_dim or 0))
            if stage.has_text:
                states = torch.zeros(images, unet.max_text_len, unet.text_embed_dim or 0)
                cond = replace(cond, text_states=states, mask=torch.ones(states.shape[:2], dtype=torch.bool))
            if stage.is_upsampler:
                low_res = empty_images(images, unet.channels, side // stage.factor)
                cond = replace(cond, low_res=low_res, low_res_level=level)
            return network(empty_images(images, unet.channels, side), torch.zeros(images, dtype=torch.int64), cond)

        def with_checkpoint(value: bool) -> DecoderSettings:
            unets = (replace(unet, checkpoint_during_training=value) for unet in self.decoder.unets)
            return replace(self, decoder=replace(self.decoder, unets=tuple(unets)))

        sizes = (stage.image_size, stage.crop_size or stage.image_size)
        return Probe(sizes, forward, "checkpoint_during_training", unet.checkpoint_during_training, with_checkpoint)

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
