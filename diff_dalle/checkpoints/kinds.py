"""What a checkpoint can hold: for each kind, the settings required to use it and how its network is built.

To add a kind: a dataclass of its settings, a function that builds its network from them, and an entry in ``KINDS``.
Training, resuming, sampling and ``info.py`` read this table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..batch import Conditioning
from ..config import from_dict, lookup, present_keys, section, type_hints
from ..diffusion.augmentation import AugmentationConfig
from ..diffusion.diffusion_config import DiffusionConfig, NoiseConfig
from ..diffusion.preview_config import PreviewConfig
from ..diffusion.resample import ContrastiveConfig, DenoisingConfig
from ..images.signal import PixelSignal, Signal
from ..models.generator import Generator, GeneratorConfig
from ..models.noised_clip import NoisedClip, NoisedClipConfig
from ..models.noisy_classifier import NoisyClassifier, NoisyClassifierConfig
from ..text.tokenizer import TokenizerConfig
from . import cascade, controlnets
from .decoder import DecoderConfig
from .probe import Probe, empty_captions, empty_images


@dataclass(frozen=True)
class GeneratorSettings:
    """The settings required to sample from a generator."""

    model: GeneratorConfig = section(GeneratorConfig)
    tokenizer: TokenizerConfig = section(TokenizerConfig)
    diffusion: DiffusionConfig = section(DiffusionConfig)
    denoising: DenoisingConfig = section(DenoisingConfig)
    augmentation: AugmentationConfig = section(AugmentationConfig)
    preview: PreviewConfig = section(PreviewConfig)


@dataclass(frozen=True)
class ClassifierSettings:
    """The settings required for classifier guidance."""

    model: NoisedClipConfig = section(NoisedClipConfig)
    tokenizer: TokenizerConfig = section(TokenizerConfig)
    diffusion: NoiseConfig = section(NoiseConfig)
    contrastive: ContrastiveConfig = section(ContrastiveConfig)


@dataclass(frozen=True)
class NoisyClassifierSettings:
    """The settings required for guidance by a classifier of classes, which comes from others' checkpoints only."""

    model: NoisyClassifierConfig = section(NoisyClassifierConfig)
    diffusion: NoiseConfig = section(NoiseConfig)


@dataclass(frozen=True)
class DecoderSettings:
    """The settings required to sample from a decoder."""

    decoder: DecoderConfig = section(DecoderConfig)


@dataclass(frozen=True)
class Kind:
    """One kind of network.

    Where a run trains several networks, the name of the trainee says which one; "" is all of them together, as the
    modules of a ModuleDict.

    name:     its name in checkpoints.
    settings: dataclass of the config sections that a checkpoint must contain.
    build:    (settings, vocab_size, trainee) → the network with its initial weights.
    probe:    (settings, trainee) → how to find the cost of one network.
    signal:   settings → the signal that the network denoises or sees.
    trainees: settings → the names of the networks, if there can be several.
    summary:  (settings, names of networks) → lines for people about what the settings mean together.
    """

    name: str
    settings: type
    build: Callable[[Any, int, str], nn.Module]
    probe: Callable[[Any, str], Probe]
    signal: Callable[[Any], Signal]
    trainees: Callable[[Any], tuple[str, ...]] = lambda settings: ("",)
    summary: Callable[[Any, Sequence[str]], list[str]] = lambda settings, names: []

    def read_settings(self, config: Mapping) -> Any:
        """The settings in a checkpoint's config. Raises InputError for one that does not exist or is mistyped; a
        section that the checkpoint is too old to have takes its defaults."""
        hints, present = type_hints(self.settings), present_keys(self.settings)
        config = {present.get(key, key): value for key, value in config.items()}
        return self.settings(**{name: from_dict(hints[name], config.get(name, {}), name) for name in hints})

    def settings_of(self, run: Any) -> Any:
        """The settings of a training run, whose config has them among its sections."""
        return self.settings(**{field.name: getattr(run, field.name) for field in fields(self.settings)})


def find_kind(name: str) -> Kind:
    """The entry of ``KINDS``; InputError for a name that is not there."""
    return lookup(KINDS, name, "kind")


# -------------------------------------------------------------------------------------------------------- the networks


def _build_generator(settings: GeneratorSettings, vocab_size: int, trainee: str) -> Generator:
    return Generator(settings.model, vocab_size, settings.diffusion.variance_is_learned)


def _build_classifier(settings: ClassifierSettings, vocab_size: int, trainee: str) -> NoisedClip:
    return NoisedClip(settings.model, vocab_size)


def _build_noisy_classifier(settings: NoisyClassifierSettings, vocab_size: int, trainee: str) -> NoisyClassifier:
    return NoisyClassifier(settings.model)


def _build_decoder(settings: DecoderSettings, vocab_size: int, trainee: str) -> nn.Module:
    decoder = settings.decoder
    if trainee:
        return decoder.named(trainee).build()
    return nn.ModuleDict({stage.name: stage.build() for stage in decoder.stages()})


def _probe_generator(settings: GeneratorSettings, trainee: str) -> Probe:
    config = settings.model

    def forward(network: nn.Module, images: int, side: int) -> Tensor:
        cond = empty_captions(images, config.text.text_length) if config.text.enc_attn_dim else Conditioning()
        if config.unet.num_classes:
            cond = replace(cond, labels=torch.zeros(images, dtype=torch.int64))
        if config.is_upsampler:
            low_res, level = empty_images(images, config.channels, side // config.factor), torch.zeros(images)
            cond = replace(cond, low_res=low_res, low_res_level=level, low_res_blur=level)
        return network(empty_images(images, config.channels, side), torch.zeros(images, dtype=torch.int64), cond)

    def with_checkpoint(value: bool) -> GeneratorSettings:
        return replace(settings, model=replace(config, unet=replace(config.unet, use_checkpoint=value)))

    size = config.unet.image_size
    sizes = (size, settings.augmentation.crop_size or size)
    return Probe(sizes, forward, "use_checkpoint", config.unet.use_checkpoint, with_checkpoint)


def _probe_classifier(settings: ClassifierSettings, trainee: str) -> Probe:
    config = settings.model

    def forward(network: NoisedClip, images: int, side: int) -> Tensor:
        cond, t = empty_captions(images, config.text_length), torch.zeros(images, dtype=torch.int64)
        return network.encode_image(empty_images(images, 3, side), t) * network.encode_text(*cond.caption)

    def with_checkpoint(value: bool) -> ClassifierSettings:
        return replace(settings, model=replace(config, classifier_use_checkpoint=value))

    sizes = (config.image_size, config.image_size)
    return Probe(sizes, forward, "classifier_use_checkpoint", config.classifier_use_checkpoint, with_checkpoint)


def _probe_noisy_classifier(settings: NoisyClassifierSettings, trainee: str) -> Probe:
    tower = settings.model.tower

    def forward(network: nn.Module, images: int, side: int) -> Tensor:
        return network(empty_images(images, 3, side), torch.zeros(images, dtype=torch.int64))

    def with_checkpoint(value: bool) -> NoisyClassifierSettings:
        return replace(settings, model=replace(settings.model, tower=replace(tower, use_checkpoint=value)))

    return Probe((tower.image_size, tower.image_size), forward, "use_checkpoint", tower.use_checkpoint, with_checkpoint)


def _probe_decoder(settings: DecoderSettings, trainee: str) -> Probe:
    decoder, stage = settings.decoder, settings.decoder.named(trainee)

    def forward(network: nn.Module, images: int, side: int) -> Tensor:
        cond, unet, level = Conditioning(), stage.unet, torch.zeros(images)
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
        unets = (replace(unet, checkpoint_during_training=value) for unet in decoder.unets)
        return replace(settings, decoder=replace(decoder, unets=tuple(unets)))

    sizes = (stage.image_size, stage.crop_size or stage.image_size)
    return Probe(sizes, forward, "checkpoint_during_training", stage.unet.checkpoint_during_training, with_checkpoint)


def _decoder_trainees(settings: DecoderSettings) -> tuple[str, ...]:
    return settings.decoder.names


def _decoder_summary(settings: DecoderSettings, names: Sequence[str]) -> list[str]:
    decoder = settings.decoder
    stages = [decoder.named(name) for name in names]
    lines = [f"{stage.name}: {stage}" for stage in stages]
    if any(stage.image_embedding or stage.has_text for stage in stages):
        lines.append(f"CLIP of the embeddings and texts: {decoder.clip or 'not recorded'}")
    return lines


def _decoder_signal(settings: DecoderSettings) -> Signal:
    return PixelSignal(settings.decoder.channels)


def _generator_signal(settings: GeneratorSettings) -> Signal:
    return PixelSignal(settings.model.channels)


def _classifier_signal(settings: ClassifierSettings | NoisyClassifierSettings) -> Signal:
    return PixelSignal(3)


KINDS = {
    kind.name: kind
    for kind in (
        Kind("generator", GeneratorSettings, _build_generator, _probe_generator, _generator_signal),
        Kind("classifier", ClassifierSettings, _build_classifier, _probe_classifier, _classifier_signal),
        Kind(
            "noisy_classifier",
            NoisyClassifierSettings,
            _build_noisy_classifier,
            _probe_noisy_classifier,
            _classifier_signal,
        ),
        Kind(
            "decoder",
            DecoderSettings,
            _build_decoder,
            _probe_decoder,
            _decoder_signal,
            _decoder_trainees,
            _decoder_summary,
        ),
        Kind("stage_a", cascade.StageASettings, cascade.build_stage_a, cascade.autoencoder_probe, cascade.pixels),
        Kind("semantic", cascade.SemanticSettings, cascade.build_semantic, cascade.autoencoder_probe, cascade.pixels),
        Kind(
            "stage_b",
            cascade.StageBSettings,
            cascade.build_stage_b,
            cascade.stage_probe,
            cascade.stage_b_signal,
            summary=cascade.stage_summary,
        ),
        Kind(
            "stage_c",
            cascade.StageCSettings,
            cascade.build_stage_c,
            cascade.stage_probe,
            cascade.stage_c_signal,
            summary=cascade.stage_summary,
        ),
        Kind(
            "controlnet",
            controlnets.ControlNetSettings,
            controlnets.build_unet_controlnet,
            controlnets.unet_probe,
            controlnets.controlnet_signal,
            summary=controlnets.controlnet_summary,
        ),
        Kind(
            "stage_c_controlnet",
            controlnets.StageCControlNetSettings,
            controlnets.build_latent_controlnet,
            controlnets.latent_probe,
            controlnets.controlnet_signal,
            summary=controlnets.controlnet_summary,
        ),
    )
}
