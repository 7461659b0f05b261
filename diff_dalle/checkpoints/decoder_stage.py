"""One U-Net of a decoder: everything that its training and its sampling depend on, resolved from the decoder's
settings."""

from __future__ import annotations

from dataclasses import dataclass

from ..diffusion.augmentation import Degradation
from ..diffusion.diffusion_config import DiffusionConfig
from ..diffusion.guidance import GuidanceConfig
from ..diffusion.sampling import SamplerConfig
from ..models.decoder.config import DecoderUnetConfig
from ..models.decoder.unet import DecoderUnet


@dataclass(frozen=True)
class DecoderStage:
    """The settings of one U-Net.

    name:             of the U-Net: unet0, unet1, …
    image_size:       width and height of its images in pixels.
    small_size:       those of the U-Net before, whose images it upsamples; 0 = the first U-Net.
    image_embedding:  whether it is conditioned on an image embedding.
    diffusion:        its process in training.
    degradation:      of its low-resolution images in training.
    downsample_first: whether those have ``small_size`` in training, or its own size.
    crop_size:        width and height of its training crops; 0 = whole images.
    image_drop_prob, text_drop_prob: probabilities of dropping the image embedding and the text in training.
    sampler, guidance, noise_level: how to sample with it, unless told otherwise.
    """

    name: str
    unet: DecoderUnetConfig
    image_size: int
    small_size: int
    image_embedding: bool
    diffusion: DiffusionConfig
    degradation: Degradation
    downsample_first: bool
    crop_size: int
    image_drop_prob: float
    text_drop_prob: float
    sampler: SamplerConfig
    guidance: GuidanceConfig
    noise_level: float

    @property
    def is_upsampler(self) -> bool:
        return self.small_size > 0

    @property
    def factor(self) -> int:
        """The upsampling factor; 1 for the first U-Net."""
        return self.image_size // self.small_size if self.is_upsampler else 1

    @property
    def has_text(self) -> bool:
        """Whether it is conditioned on text encodings."""
        return bool(self.unet.cond_on_text_encodings)

    @property
    def has_noise(self) -> bool:
        """Whether it is told the noise level of its low-resolution images."""
        return self.degradation.max_level > 0

    @property
    def droppable(self) -> bool:
        """Whether training drops a condition, so that guidance is possible."""
        return bool((self.image_embedding and self.image_drop_prob) or (self.has_text and self.text_drop_prob))

    @property
    def network(self) -> tuple:
        """What its weights depend on, to fit and to mean the same: not how it is trained or sampled."""
        process = self.diffusion
        return (
            (self.unet, self.image_size, self.small_size, self.image_embedding, self.has_noise),
            (process.diffusion_steps, process.noise_schedule, process.prediction, process.variance),
        )

    def __str__(self) -> str:
        """For people: what it makes from what, its process, and how it is sampled."""
        unet, process, steps = self.unet, self.diffusion, self.sampler.steps
        sources = [f"{self.small_size}×{self.small_size} ones"] * self.is_upsampler
        sources += [f"an image embedding of width {unet.image_embed_dim}"] * self.image_embedding
        sources += [f"text of {unet.max_text_len} tokens of width {unet.text_embed_dim}"] * self.has_text
        return (
            f"{self.image_size}×{self.image_size} pixels from {' and '.join(sources) or 'noise alone'}; "
            f"{process.noise_schedule} schedule of {process.diffusion_steps:,} steps, predicts {process.prediction}, "
            f"variance {process.variance}; sampled by {self.sampler.algorithm} in {steps or 'all'} steps"
        )

    def build(self) -> DecoderUnet:
        """The network with initial weights."""
        return DecoderUnet(
            self.unet, self.image_embedding, self.is_upsampler, self.has_noise, self.diffusion.variance_is_learned
        )
