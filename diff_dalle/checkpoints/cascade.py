"""The four kinds of the latent cascade (Pernias et al. 2023): what their checkpoints say, and their networks.

Stage A and the semantic autoencoder make the latents; stage C makes semantic latents from text, stage B latents of
stage A from semantic ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ..config import option, section
from ..diffusion.guidance import GuidanceConfig
from ..diffusion.log_snr_config import LogSnrConfig
from ..diffusion.samplers import SAMPLERS
from ..diffusion.sampling import SamplerConfig
from ..errors import InputError
from ..images.signal import LatentSignal, PixelSignal, Signal
from ..models.latent.probe import zero_inputs
from ..models.latent.semantic import SemanticAutoencoder, SemanticConfig
from ..models.latent.stage_a import StageA, StageAConfig
from ..models.latent.stage_b import StageB, StageBConfig
from ..models.latent.stage_c import StageC, StageCConfig
from ..text.tokenizer import TokenizerConfig
from .decoder import ClipConfig
from .probe import Probe, empty_images


@dataclass(frozen=True)
class StageBDiffusion(LogSnrConfig):
    """Diffusion process in log-SNR"""

    pyramid_noise: float = option(
        0.75,
        "training noise with large spots: amplitude of each octave relative to the one above; 0 = white noise",
    )


@dataclass(frozen=True)
class LatentSampling:
    """Sampling"""

    sampler: str = option("ancestral", "sampling algorithm, unless told otherwise", choices=tuple(SAMPLERS), free=True)
    steps: int = option(20, "sampling steps", free=True)
    guidance_scale: float = option(4.0, "scale of classifier-free guidance; 1 = off", free=True)
    shift: float = option(
        2.0, "α/σ is divided by this, in addition to diffusion.shift: above 1 = more steps at high noise", free=True
    )

    def __post_init__(self):
        if self.steps < 1:
            raise InputError(f"steps is {self.steps}, but must be at least 1")
        if self.shift <= 0:
            raise InputError(f"shift is {self.shift:g}, but must be above 0")

    @property
    def sampler_config(self) -> SamplerConfig:
        return SamplerConfig(self.sampler, str(self.steps))

    @property
    def guidance(self) -> GuidanceConfig:
        """Latents have no limits for thresholding."""
        return GuidanceConfig(guidance_scale=self.guidance_scale, thresholding="none")


@dataclass(frozen=True)
class StageBSampling(LatentSampling):
    """Sampling"""

    steps: int = option(10, "sampling steps", free=True)
    guidance_scale: float = option(1.1, "scale of classifier-free guidance; 1 = off", free=True)
    shift: float = option(
        1.0, "α/σ is divided by this, in addition to diffusion.shift: above 1 = more steps at high noise", free=True
    )
    semantic_scale: float = option(
        1.0,
        "scale of a picture to reconstruct before the semantic encoder reads it: the ratio of the image sizes that "
        "stages C and B are trained on",
        free=True,
    )

    def __post_init__(self):
        super().__post_init__()
        if not 0 < self.semantic_scale <= 1:
            raise InputError(f"semantic_scale is {self.semantic_scale:g}, but must be above 0 and at most 1")


@dataclass(frozen=True)
class TrainedWith:
    """What it was trained with"""

    image_size: int = option(1024, "width and height in pixels of training images, or of a square with as many pixels")
    stage_a: str = option("", "identity of the weights of stage A, which training records; empty = none")
    stage_a_stride: int = option(4, "pixels per position of stage A's latents, which training records")
    semantic: str = option("", "identity of the weights of the semantic encoder, which training records; empty = none")
    semantic_stride: int = option(32, "pixels per position of the semantic latents, which training records")
    encoder: SemanticConfig | None = option(
        None, "settings of a semantic encoder that is trained with stage B, which training records"
    )
    text_clip: ClipConfig | None = option(None, "CLIP that encodes the text; none = the network's own text encoder")
    image_clip: ClipConfig | None = option(None, "CLIP that makes image embeddings")


@dataclass(frozen=True)
class StageASettings:
    """The settings required to use stage A."""

    model: StageAConfig = section(StageAConfig)


@dataclass(frozen=True)
class SemanticSettings:
    """The settings required to use a semantic encoder and its previewer."""

    model: SemanticConfig = section(SemanticConfig)


@dataclass(frozen=True)
class StageBSettings:
    """The settings required to sample from stage B."""

    model: StageBConfig = section(StageBConfig)
    tokenizer: TokenizerConfig = section(TokenizerConfig)
    diffusion: StageBDiffusion = section(StageBDiffusion)
    sampling: StageBSampling = section(StageBSampling)
    trained_with: TrainedWith = section(TrainedWith)


@dataclass(frozen=True)
class StageCSettings:
    """The settings required to sample from stage C."""

    model: StageCConfig = section(StageCConfig)
    tokenizer: TokenizerConfig = section(TokenizerConfig)
    diffusion: LogSnrConfig = section(LogSnrConfig)
    sampling: LatentSampling = section(LatentSampling)
    trained_with: TrainedWith = section(TrainedWith)


# -------------------------------------------------------------------------------------------------------- the networks


def build_stage_a(settings: StageASettings, vocab_size: int, trainee: str) -> StageA:
    return StageA(settings.model)


def build_semantic(settings: SemanticSettings, vocab_size: int, trainee: str) -> SemanticAutoencoder:
    return SemanticAutoencoder(settings.model)


def build_stage_b(settings: StageBSettings, vocab_size: int, trainee: str) -> StageB:
    return StageB(settings.model, vocab_size)


def build_stage_c(settings: StageCSettings, vocab_size: int, trainee: str) -> StageC:
    return StageC(settings.model, vocab_size)


def autoencoder_probe(settings: StageASettings | SemanticSettings, trainee: str) -> Probe:
    """Of images of 256 pixels: the network takes all sizes."""

    def forward(network: Any, images: int, side: int) -> Tensor:
        found = network(empty_images(images, 3, side))
        return found if isinstance(found, Tensor) else found.images

    return _probe(settings, 256, forward)


def stage_probe(settings: StageBSettings | StageCSettings, trainee: str) -> Probe:
    """Of images of the size that it was trained on."""
    model, known = settings.model, settings.trained_with
    stride = known.stage_a_stride if isinstance(settings, StageBSettings) else known.semantic_stride

    def forward(network: Any, images: int, side: int) -> Tensor:
        return network(*zero_inputs(model, images, side // stride, side // stride))

    return _probe(settings, known.image_size, forward)


def _probe(settings: Any, side: int, forward: Any) -> Probe:
    def with_checkpoint(value: bool) -> Any:
        return replace(settings, model=replace(settings.model, use_checkpoint=value))

    return Probe((side, side), forward, "model.use_checkpoint", settings.model.use_checkpoint, with_checkpoint)


def pixels(settings: StageASettings | SemanticSettings) -> Signal:
    return PixelSignal(3)


def stage_b_signal(settings: StageBSettings) -> Signal:
    return LatentSignal(settings.model.channels, settings.trained_with.stage_a_stride, "stage A")


def stage_c_signal(settings: StageCSettings) -> Signal:
    return LatentSignal(settings.model.channels, settings.trained_with.semantic_stride, "a previewer")


def stage_summary(settings: StageBSettings | StageCSettings, names: Sequence[str]) -> list[str]:
    """What it was trained with, and how it is sampled."""
    known, sampling = settings.trained_with, settings.sampling
    found = {
        "stage A": known.stage_a,
        "semantic encoder": known.semantic,
        "CLIP of texts": known.text_clip,
        "CLIP of images": known.image_clip,
    }
    return [
        f"trained on images of {known.image_size}×{known.image_size} pixels or as many, with "
        + (", ".join(f"{name} {value}" for name, value in found.items() if value) or "no other network"),
        f"predicts {settings.diffusion.prediction} on the schedule {settings.diffusion.log_snr_schedule}; sampled by "
        f"{sampling.sampler} in {sampling.steps} steps, guidance scale {sampling.guidance_scale:g}, shift "
        f"{sampling.shift:g}",
    ]
