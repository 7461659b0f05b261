"""A text-conditional or class-conditional generator as a stage: base or upsampler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ..batch import Conditioning
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
        cond, labels, last = self._text([request.prompts[i] for i in index]), request.labels, self.num_classes - 1
        if not self.num_classes:
            return cond
        if labels is None:
            raise InputError(f"this generator is class-conditional: give {named('labels')} from 0 to {last}")
        if not all(0 <= label <= self.num_classes for label in labels):
            rule = f"must lie between 0 and {last} ({self.num_classes} = no class), not {list(labels)}"
            raise InputError(Fault("labels", rule))
        return replace(cond, labels=torch.tensor([labels[i] for i in index]))

    def negative_conditioning(self, cond: Conditioning, negative_prompt: str) -> Conditioning | None:
        """As for any stage, but with the negative prompt as its caption."""
        null = super().negative_conditioning(cond, negative_prompt)
        if null is None or not negative_prompt or self.tokenizer is None:
            return null
        text = self._text([negative_prompt] * len(null.caption[0]))
        return replace(null, tokens=text.tokens, mask=text.mask)

    def _text(self, prompts: Sequence[str]) -> Conditioning:
        if self.tokenizer is None:
            return Conditioning()
        tokens, mask = self.tokenizer(list(prompts), self.config.text.text_length)
        return Conditioning(tokens=tokens, mask=mask)
