"""The frozen CLIPs that the stages of a latent cascade were trained with: each is loaded while it encodes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..checkpoints.decoder import ClipConfig
from ..checkpoints.lora_file import WeightedLora, joined_tokens
from ..config import InputError, named
from ..embeddings.contract import Clip
from ..images.signal import PixelSignal
from .embedded import load_recorded
from .image_prompts import BATCH, ImagePrompts
from .stage import Stage

Text = tuple[Tensor, Tensor, Tensor]


class LatentClips:
    """Encodes texts and pictures for all stages of a cascade, each text once for a request.

    named:      the CLIP that ``make`` and ``path`` are about; None = the only one, which no checkpoint names.
    make, path: where it is, if not where the checkpoints say; see ``DecoderClip``.
    keep:       keep the CLIPs in memory.
    loras:      LoRAs whose tokens belong to a CLIP.
    """

    def __init__(
        self,
        named: ClipConfig | None,
        make: str = "",
        path: str = "",
        keep: bool = False,
        loras: Sequence[WeightedLora] = (),
    ):
        self.named, self.make, self.path, self.keep, self.loras = named, make, path, keep, loras
        self._kept: dict[ClipConfig | None, Clip] = {}
        self._texts: dict[ClipConfig | None, dict[str, Text]] = {}
        self._pictures: tuple[ImagePrompts, np.ndarray] | None = None

    def texts(self, config: ClipConfig | None, stage: Stage, request: Sequence[str]) -> dict[str, Text]:
        """Pooled text [E], states [L, D] and their mask [L] of each of the texts and of "", float32 on the CPU."""
        known, wanted = self._texts.get(config, {}), dict.fromkeys(("", *request))
        missing = [text for text in wanted if text not in known]
        if missing:
            clip = self._loaded(config, stage)
            for start in range(0, len(missing), BATCH):
                part = missing[start : start + BATCH]
                found = zip(*(each.cpu() for each in clip.encode_text(part)), strict=True)
                known = known | dict(zip(part, found, strict=True))
            # Only those of the latest request, because the states of a text take hundreds of kilobytes.
            self._texts[config] = {text: known[text] for text in wanted}
        return known

    def pictures(self, config: ClipConfig | None, stage: Stage, images: ImagePrompts, count: int) -> np.ndarray:
        """Embeddings for ``count`` images, float32 [count, E]; see ``ImagePrompts.embed``."""
        if self._pictures is None or self._pictures[0] is not images or len(self._pictures[1]) != count:
            clip = self._loaded(config, stage)
            self._pictures = images, images.embed(clip, PixelSignal(3), count)
        return self._pictures[1]

    def _loaded(self, config: ClipConfig | None, stage: Stage) -> Clip:
        if config in self._kept:
            return self._kept[config]
        about = config is None or self.named is None or config.is_same(self.named)
        clip = load_recorded(config, self.make if about else "", self.path if about else "", stage)
        if own := [each for each in self.loras if each.lora.about.clip == clip.identity]:
            add_tokens(clip, own)
        if self.keep:
            self._kept[config] = clip
        return clip


@torch.no_grad()
def add_tokens(clip: Clip, loras: Sequence[WeightedLora]) -> None:
    """Give a CLIP the tokens of LoRAs, which belong to it. InputError as ``joined_tokens``."""
    for each in loras:
        if each.lora.deltas is not None and each.lora.deltas.shape[1:] != (clip.text_width,):
            raise InputError(f"{each.lora.path} has tokens of another width than the CLIP's, {clip.text_width}")
    tokens, changes = joined_tokens(clip.tokenizer, loras)
    clip.take_tokens(tokens).requires_grad_(False).deltas.copy_(changes)


def check_width(setting: str, expected: int, found: int, path: str) -> None:
    """InputError for encodings of another width than that of a stage's network, 0 where it reads none."""
    if expected and expected != found:
        raise InputError(
            f"the CLIP makes vectors of {found} elements, but {path} was trained with {expected} ({setting}): give the "
            f"CLIP of its training with {named('clip_path')}"
        )
