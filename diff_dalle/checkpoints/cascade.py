"""The four kinds of the latent cascade (Pernias et al. 2023): what their checkpoints say, and their networks.

Stage A and the semantic autoencoder make the latents; stage C makes semantic latents from text, stage B latents of
stage A from semantic ones.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ..config import option, section, settings
from ..config.bounds import MAX_SIDE, MAX_STEPS
from ..diffusion.guidance import GuidanceConfig
from ..diffusion.log_snr_config import LogSnrConfig
from ..diffusion.samplers import SAMPLERS
from ..diffusion.sampling import SamplerConfig
from ..images.signal import LatentSignal, PixelSignal, Signal
from ..models.latent.semantic import SemanticAutoencoder, SemanticConfig
from ..models.latent.stage_a import StageA, StageAConfig
from ..models.latent.stages import StageB, StageBConfig, StageC, StageCConfig, zero_inputs
from ..text.tokenizer import TokenizerConfig
from .decoder import ClipConfig
from .kind import NetworkKind, Self, empty_images

SHIFT = "α/σ is divided by this, in addition to diffusion.shift: above 1 = more steps at high noise"


@settings
class StageBDiffusion(LogSnrConfig):
    """Diffusion process in log-SNR"""

    pyramid_noise: float = option(
        0.75,
        "pyramid noise in training: amplitude of each octave relative to the one above; 0 = white noise",
        least=0,
    )


@settings
class LatentSampling:
    """Sampling"""

    sampler: str = option("ancestral", "default sampling algorithm", choices=SAMPLERS, free=True)
    steps: int = option(20, "sampling steps", free=True, least=1, most=MAX_STEPS)
    guidance_scale: float = option(4.0, "scale of classifier-free guidance; 1 = off", free=True)
    guidance_rescale: float = option(
        0.7,
        "share of the guided prediction rescaled to the conditional one's standard deviation",
        free=True,
        least=0,
        most=1,
    )
    shift: float = option(2.0, SHIFT, free=True, above=0)

    @property
    def sampler_config(self) -> SamplerConfig:
        return SamplerConfig(self.sampler, self.steps)

    @property
    def guidance(self) -> GuidanceConfig:
        """Latents have no limits for thresholding."""
        return GuidanceConfig(
            guidance_scale=self.guidance_scale, guidance_rescale=self.guidance_rescale, thresholding="none"
        )


@settings
class StageBSampling(LatentSampling):
    """Sampling"""

    steps: int = option(10, "sampling steps", free=True, least=1, most=MAX_STEPS)
    guidance_scale: float = option(1.1, "scale of classifier-free guidance; 1 = off", free=True)
    shift: float = option(1.0, SHIFT, free=True, above=0)
    semantic_scale: float = option(
        1.0,
        "scale of a picture to reconstruct at the semantic encoder's input: ratio of the training image sizes of "
        "stages C and B",
        free=True,
        above=0,
        most=1,
    )


@settings
class TrainedWith:
    """What it was trained with"""

    image_size: int = option(
        1024, "width and height of training images in pixels, or of an equal-area square", most=MAX_SIDE
    )
    stage_a: str = option("", "identity of stage A's weights, recorded by training; empty = none")
    stage_a_stride: int = option(4, "pixels per position of stage A's latents, recorded by training", most=MAX_SIDE)
    semantic: str = option("", "identity of the semantic encoder's weights, recorded by training; empty = none")
    semantic_stride: int = option(
        32, "pixels per position of the semantic latents, recorded by training", most=MAX_SIDE
    )
    encoder: SemanticConfig | None = option(
        None, "settings of a semantic encoder trained with stage B, recorded by training"
    )
    text_clip: ClipConfig | None = option(None, "CLIP that encodes the text; none = the network's own text encoder")
    image_clip: ClipConfig | None = option(None, "CLIP for image embeddings")


class _Autoencoder(NetworkKind):
    """What stage A and the semantic autoencoder share: they see images of all sizes."""

    does = "image-to-image"
    signal = PixelSignal(3)

    def sizes(self, trainee: str) -> tuple[int, int]:
        return 256, 256

    def forward(self, network: Any, images: int, side: int, trainee: str) -> Tensor:
        found = network(empty_images(images, 3, side))
        return found if isinstance(found, Tensor) else found.images


@settings
class StageASettings(_Autoencoder):
    """The autoencoder of the latents of stage B."""

    name = "stage_a"
    network = StageA
    title = "stage A of a latent cascade, an autoencoder"
    role = "stage_a"

    model: StageAConfig = section(StageAConfig)


@settings
class SemanticSettings(_Autoencoder):
    """The encoder of the latents of stage C, and its previewer."""

    name = "semantic"
    network = SemanticAutoencoder
    title = "semantic encoder of a latent cascade, with its previewer"
    does = "image-feature-extraction"
    role = "semantic"

    model: SemanticConfig = section(SemanticConfig)


class _LatentStage(NetworkKind):
    """What stages B and C share."""

    image_size = "trained_with.image_size"
    diffusion: LogSnrConfig
    sampling: LatentSampling
    trained_with: TrainedWith

    @classmethod
    def read(cls: type[Self], config: Mapping) -> Self:
        """As of every kind. Checkpoints of versions without ``guidance_rescale`` do not rescale."""
        sampling = config.get("sampling")
        if isinstance(sampling, Mapping):
            config = {**config, "sampling": {"guidance_rescale": 0.0, **sampling}}
        return super().read(config)

    @property
    @abstractmethod
    def stride(self) -> int:
        """Pixels per position of its latents."""

    def forward(self, network: Any, images: int, side: int, trainee: str) -> Tensor:
        return network(*zero_inputs(self.model, images, side // self.stride, side // self.stride))

    def summary(self, names: Sequence[str]) -> list[str]:
        """What it was trained with, and how it is sampled."""
        known, sampling = self.trained_with, self.sampling
        found = {
            "stage A": known.stage_a,
            "semantic encoder": known.semantic,
            "CLIP of texts": known.text_clip,
            "CLIP of images": known.image_clip,
        }
        return [
            f"trained on images of {known.image_size}×{known.image_size} pixels or as many, with "
            + (", ".join(f"{name} {value}" for name, value in found.items() if value) or "no other network"),
            f"predicts {self.diffusion.prediction} on the schedule {self.diffusion.log_snr_schedule}; sampled by "
            f"{sampling.sampler} in {sampling.steps} steps, guidance scale {sampling.guidance_scale:g}, shift "
            f"{sampling.shift:g}",
        ]


@settings
class StageBSettings(_LatentStage):
    """Semantic latents → latents of stage A."""

    name = "stage_b"
    network = StageB
    reads_tokens = True
    title = "stage B of a latent cascade, from semantic latents to those of stage A"
    does = "image-to-image"
    role = "stage_b"
    stage = "latent_stages.ReconstructionStage"

    model: StageBConfig = section(StageBConfig)
    tokenizer: TokenizerConfig = section(TokenizerConfig)
    diffusion: StageBDiffusion = section(StageBDiffusion)
    sampling: StageBSampling = section(StageBSampling)
    trained_with: TrainedWith = section(TrainedWith)

    @property
    def stride(self) -> int:
        return self.trained_with.stage_a_stride

    @property
    def signal(self) -> Signal:
        return LatentSignal(self.model.channels, self.stride, "stage A")


@settings
class StageCSettings(_LatentStage):
    """Text → semantic latents."""

    name = "stage_c"
    network = StageC
    reads_tokens = True
    title = "stage C of a latent cascade, from text to semantic latents"
    does = "text-to-image"
    stage = "latent_stages.SemanticStage"

    model: StageCConfig = section(StageCConfig)
    tokenizer: TokenizerConfig = section(TokenizerConfig)
    diffusion: LogSnrConfig = section(LogSnrConfig)
    sampling: LatentSampling = section(LatentSampling)
    trained_with: TrainedWith = section(TrainedWith)

    @property
    def stride(self) -> int:
        return self.trained_with.semantic_stride

    @property
    def signal(self) -> Signal:
        return LatentSignal(self.model.channels, self.stride, "a previewer")
