"""A U-Net of a decoder as a stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import torch

from ..batch import Conditioning
from ..checkpoints.decoder import ClipConfig, check_same_embeddings
from ..checkpoints.kinds import DecoderSettings
from ..checkpoints.loading import SavedNetwork
from ..errors import InputError
from .generator_stage import UPSAMPLER_DEFAULTS
from .request import Request, StageSettings
from .stage import Stage


class UnetStage(Stage):
    """A U-Net of a decoder, conditioned on image embeddings and text encodings from outside. Arguments as for
    ``Stage``."""

    def __init__(
        self, saved: SavedNetwork, device: torch.device, precision: str = "fp32", bpe_path: str = "", keep: bool = True
    ):
        super().__init__(saved, device, precision, bpe_path, keep)
        self.decoder = cast("DecoderSettings", saved.settings).decoder
        settings = self.settings = self.decoder.named(saved.trainee)
        self.config = self.unet = settings.unet
        self.image_size, self.small_size = settings.image_size, settings.small_size
        self.diffusion, self.degradation = settings.diffusion, settings.degradation
        usual = UPSAMPLER_DEFAULTS if self.is_upsampler else StageSettings()
        self.never_dropped = "" if settings.droppable else "image_cond_drop_prob, text_cond_drop_prob"
        scale = usual.guidance.guidance_scale if settings.droppable else 1.0
        self.defaults = replace(
            usual,
            sampler=settings.sampler,
            guidance=replace(settings.guidance, guidance_scale=scale),
            noise_level=settings.noise_level,
        )

    @property
    def reads_embeddings(self) -> bool:
        return self.settings.image_embedding

    @property
    def reads_text_states(self) -> bool:
        return self.settings.has_text

    @property
    def clip(self) -> ClipConfig | None:
        return self.decoder.clip

    def conditioning(self, request: Request, index: Sequence[int]) -> Conditioning:
        """Embeddings and text encodings of the request; without text it is dropped, as in training."""
        cond, rows = Conditioning(), list(index)
        if self.reads_embeddings:
            if request.embeddings is None:
                raise InputError(
                    "this decoder is conditioned on image embeddings: give images (--images), embeddings "
                    "(--embeddings), or prompts (--prompts) whose embeddings stand in for those of images"
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
                    "image (--prompts)"
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
