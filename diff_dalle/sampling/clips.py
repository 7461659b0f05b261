"""The frozen CLIPs that stages were trained with, each loaded while it encodes: pictures and prompts → the image
embeddings and text encodings that a decoder's U-Nets or the stages of a latent cascade read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import storage
from ..checkpoints.decoder import ClipConfig
from ..checkpoints.lora_file import WeightedLora, joined_tokens
from ..config import Fault, InputError, named
from ..embeddings.clip import load_clip
from ..embeddings.contract import Clip
from ..images.signal import PixelSignal
from .image_prompts import BATCH, ImagePrompts
from .request import Request
from .stage import Stage

Text = tuple[Tensor, Tensor, Tensor]


class Clips:
    """Loads CLIPs of trainings, and keeps them if the stages are kept.

    about:      the CLIP that ``make`` and ``path`` are about; None = the only one, which no checkpoint names.
    make, path: its maker (a key of ``embeddings.clip.CLIPS``) and what that calls it, where the checkpoint says neither
                or it is no longer there; "" = as the checkpoint says, of path alone a checkpoint of ours.
    keep:       keep the CLIPs in memory.
    loras:      LoRAs whose tokens belong to a CLIP.

    Raises InputError for a maker without a path.
    """

    def __init__(
        self,
        about: ClipConfig | None = None,
        make: str = "",
        path: str = "",
        keep: bool = False,
        loras: Sequence[WeightedLora] = (),
    ):
        self.about, self.make, self.path, self.keep, self.loras = about, make, path, keep, loras
        self._kept: dict[ClipConfig | None, Clip] = {}
        if make and not path:
            raise InputError(Fault("clip_make", f"{named('clip_path')} is missing: give both, or neither", make))

    def of(self, config: ClipConfig | None, stage: Stage) -> Clip:
        """The CLIP that a checkpoint names, for the device and precision of a stage. InputError as ``load_recorded``,
        and for LoRAs that do not fit it."""
        if config in self._kept:
            return self._kept[config]
        is_given = config is None or self.about is None or config.is_same(self.about)
        clip = load_recorded(config, self.make if is_given else "", self.path if is_given else "", stage)
        if own := [each for each in self.loras if each.lora.about.clip == clip.identity]:
            add_tokens(clip, own)
        if self.keep:
            self._kept[config] = clip
        return clip


class LatentClips(Clips):
    """Encodes texts and pictures for all stages of a latent cascade, each text once for a request."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self._texts: dict[ClipConfig | None, dict[str, Text]] = {}
        self._pictures: tuple[ImagePrompts, np.ndarray] | None = None

    def texts(self, config: ClipConfig | None, stage: Stage, request: Sequence[str]) -> dict[str, Text]:
        """Pooled text [E], states [L, D] and their mask [L] of each of the texts and of "", float32 on the CPU."""
        known, wanted = self._texts.get(config, {}), dict.fromkeys(("", *request))
        missing = [text for text in wanted if text not in known]
        if missing:
            clip = self.of(config, stage)
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
            clip = self.of(config, stage)
            self._pictures = images, images.embed(clip, PixelSignal(3), count)
        return self._pictures[1]


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


class DecoderClip(Clips):
    """The CLIP of a decoder's training, for all of its stages. Arguments as for ``Clips``.

    Raises InputError as ``Clips``, and for a CLIP that no stage reads anything of.
    """

    def __init__(self, stages: Sequence[Stage], make: str = "", path: str = ""):
        self.stages = [stage for stage in stages if stage.reads_embeddings or stage.reads_text_states]
        super().__init__(None, make, path, any(stage.keep for stage in self.stages))
        if path and not self.stages:
            rule = "no network is conditioned on embeddings or text encodings: leave it out"
            raise InputError(Fault("clip_path", rule, path))

    def recorded(self) -> ClipConfig | None:
        """The CLIP that the checkpoints name; None = none. InputError where they name several."""
        named = {stage.path: stage.clip for stage in self.stages if stage.clip}
        first = next(iter(named.items()), None)
        for path, clip in named.items():
            if first and not first[1].is_same(clip):
                raise InputError(
                    f"{first[0]} was trained with {first[1]}, but {path} with {clip}: give their embeddings and text "
                    "encodings instead of images and prompts"
                )
        return first[1] if first else None

    def load(self) -> Clip:
        """Raises InputError as ``of``."""
        return self.of(self.recorded(), self.stages[0])


def load_recorded(recorded: ClipConfig | None, make: str, path: str, stage: Stage) -> Clip:
    """The CLIP that a stage was trained with, for its device and precision.

    recorded: what its checkpoint says; None = nothing. make, path: as for ``Clips``.

    Raises InputError where it is not known or not there, and for another one than that of the training.
    """
    if not (path or recorded):
        raise InputError(
            f"{stage.path} does not say which CLIP it was trained with: give it with {named('clip_path')}, or its "
            f"embeddings with {named('embeddings')}"
        )
    make = make or (recorded.make if recorded else "diff_dalle")
    if recorded and not path:
        path = recorded.model
        # A location in a file may also be a command or a URL, which nobody here has asked for.
        if make == "diff_dalle" and (storage.is_remote(path) or not os.path.isfile(storage.local_path(path))):
            raise InputError(
                f"the CLIP that {stage.path} was trained with is not at {path}: give its place with "
                f"{named('clip_path')}"
            )
    outputs = recorded.outputs if recorded else "unit"
    clip = load_clip(make, path, stage.device, stage.precision, outputs)
    if recorded and recorded.identity and recorded.identity != clip.identity:
        raise InputError(
            f"the CLIP is {clip.name} ({clip.identity}), but {stage.path} was trained with {recorded}: give that one "
            f"with {named('clip_path')}"
        )
    return clip


def embedded(request: Request, stages: Sequence[Stage], source: DecoderClip) -> Request:
    """The request with the embeddings and text encodings that stages read, where images or prompts are given instead.

    Without images and embeddings, the embeddings of the prompts stand in for those of images. Raises InputError for
    prompts that cannot, and as ``DecoderClip.load`` does.
    """
    count, texts = len(request), any(request.prompts)
    reads_image, reads_text = (
        any(getattr(stage, what) for stage in stages) for what in ("reads_embeddings", "reads_text_states")
    )
    image = reads_image and request.embeddings is None and (request.images is not None or texts)
    text = reads_text and request.text_states is None and texts
    if not (image or text):
        return request
    clip = source.load()
    embeddings, text_states = request.embeddings, request.text_states
    if text or (image and request.images is None):
        found, states, mask = encoded(clip, request.prompts)
        if text:
            if not clip.text_width:
                raise InputError(
                    f"the CLIP {clip.name} has no states of text tokens to condition on: leave prompts out"
                )
            text_states = states, mask
        if image and request.images is None:
            if not all(request.prompts):
                raise InputError(
                    f"prompt {request.prompts.index('') + 1} is empty, but has to stand in for an image: give a text, "
                    f"or images ({named('images')})"
                )
            embeddings = found
    if image and request.images is not None:
        embeddings = request.images.embed(clip, stages[0].signal, count)
    return replace(request, embeddings=embeddings, text_states=text_states, images=None)


def encoded(clip: Clip, prompts: Sequence[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The embeddings of prompts, float32 [N, E], and their states [N, L, D] with the mask, bool [N, L]; an empty prompt
    has no token, and zeros."""
    texts = list(dict.fromkeys(prompts))
    parts = [clip.encode_text(texts[start : start + BATCH]) for start in range(0, len(texts), BATCH)]
    rows = [texts.index(prompt) for prompt in prompts]
    embeddings, states, mask = (np.concatenate([part[i].cpu().numpy() for part in parts])[rows] for i in range(3))
    mask &= np.array([bool(prompt) for prompt in prompts])[:, None]
    return embeddings, states * mask[:, :, None], mask
