"""The networks that make pixels as stages: generators, and the U-Nets of decoders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ..batch import Conditioning
from ..checkpoints.decoder import check_same_embeddings
from ..checkpoints.pixels import DecoderSettings
from ..config import Fault, InputError, named
from ..diffusion.guidance import GuidanceConfig
from ..diffusion.sampling import SamplerConfig
from .request import Request
from .stage import Stage
from .stage_settings import StageSettings

UPSAMPLER_DEFAULTS = StageSettings(SamplerConfig("dpm++2m", 20), GuidanceConfig(guidance_scale=1.0), batch_size=4)


class GeneratorStage(Stage):
    """A generator, base or upsampler. Arguments as for ``Stage``."""

    def configure(self, settings: Any) -> None:
        self.config, self.diffusion = settings.model, settings.diffusion
        self.degradation = settings.augmentation.degradation
        self.unet, self.num_classes = self.config.unet, self.config.unet.num_classes
        self.inpaints = self.config.inpaint
        self.image_size, self.small_size = self.config.unet.image_size, self.config.low_res.small_size
        usual = UPSAMPLER_DEFAULTS if self.is_upsampler else StageSettings()
        guidance = settings.preview.guidance
        if not settings.denoising.caption_dropout:
            self.never_dropped = "caption_dropout"
            guidance = guidance.at_scale(1.0)
        elif guidance.guidance_scale is None:
            guidance = replace(guidance, guidance_scale=usual.guidance.guidance_scale)
        self.defaults = replace(usual, guidance=guidance)

    def conditioning(self, request: Request, index: Sequence[int]) -> Conditioning:
        """Captions and classes. Subclasses with further conditions (of other networks) add them here."""
        cond, labels, last = self.text([request.prompts[i] for i in index]), request.labels, self.num_classes - 1
        if not self.num_classes:
            return cond
        if labels is None:
            raise InputError(f"this generator is class-conditional: give {named('labels')} from 0 to {last}")
        if not all(0 <= label <= self.num_classes for label in labels):
            rule = f"must lie between 0 and {last} ({self.num_classes} = no class), not {list(labels)}"
            raise InputError(Fault("labels", rule))
        return replace(cond, labels=torch.tensor([labels[i] for i in index]))


class UnetStage(Stage):
    """A U-Net of a decoder, conditioned on image embeddings and text encodings from outside. Arguments as for
    ``Stage``."""

    def configure(self, settings: DecoderSettings) -> None:
        self.decoder = settings.decoder
        own = self.settings = self.decoder.named(self.saved.trainee)
        self.clip, self.reads_text_states = self.decoder.clip, own.has_text
        self.reads_embeddings = self.takes_embeddings = own.image_embedding
        self.config = self.unet = own.unet
        self.image_size, self.small_size = own.image_size, own.small_size
        self.diffusion, self.degradation = own.diffusion, own.degradation
        usual = UPSAMPLER_DEFAULTS if self.is_upsampler else StageSettings()
        self.never_dropped = "" if own.droppable else "image_cond_drop_prob, text_cond_drop_prob"
        scale = usual.guidance.guidance_scale if own.droppable else 1.0
        guidance = replace(own.guidance, guidance_scale=scale)
        self.defaults = replace(usual, sampler=own.sampler, guidance=guidance, noise_level=own.noise_level)

    def conditioning(self, request: Request, index: Sequence[int]) -> Conditioning:
        """Embeddings and text encodings of the request; without text it is dropped, as in training."""
        cond, rows = Conditioning(), list(index)
        if self.reads_embeddings:
            if request.embeddings is None:
                raise InputError(
                    f"this decoder is conditioned on image embeddings: give images ({named('images')}), embeddings "
                    f"({named('embeddings')}), or prompts ({named('prompts')}) whose embeddings stand in for those of "
                    "images"
                )
            given, width = request.embeddings, self.config.image_embed_dim
            if given.shape[1] != width:
                raise InputError(
                    f"the embeddings have width {given.shape[1]}, but this decoder's have width {width}: compute them "
                    "with the CLIP of its training"
                )
            cond = replace(cond, image_embedding=torch.from_numpy(given[rows]))
        if self.reads_text_states:
            width = self.config.text_embed_dim or 0
            states, mask = request.text_states or _no_text(len(request), width)
            if not self.settings.text_drop_prob and not mask.any(1).all():
                raise InputError(
                    "this decoder was trained without dropping its text (text_cond_drop_prob): give a text for each "
                    f"image ({named('prompts')})"
                )
            if states.shape[2] != width:
                raise InputError(f"the text encodings have width {states.shape[2]}, but this decoder's have {width}")
            cond = replace(cond, text_states=torch.from_numpy(states[rows]), mask=torch.from_numpy(mask[rows]))
        return cond

    def check_beside(self, other: Stage) -> None:
        if isinstance(other, UnetStage):
            check_same_embeddings((other.path, other.decoder, other.settings), (self.path, self.decoder, self.settings))


def _no_text(count: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Text encodings and their mask without any token."""
    return np.zeros((count, 1, width), dtype=np.float32), np.zeros((count, 1), dtype=bool)
