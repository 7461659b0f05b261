"""Pictures and prompts → the image embeddings and text encodings that a decoder's U-Nets read, by the CLIP of its
training."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from .. import storage
from ..checkpoints.decoder import ClipConfig
from ..config import Fault, InputError, named
from ..embeddings.clip import load_clip
from ..embeddings.contract import Clip
from .image_prompts import BATCH
from .request import Request
from .stage import Stage


class DecoderClip:
    """The CLIP of a decoder's training, which is loaded when it is needed, and kept if the stages are.

    make, path: its maker (a key of ``embeddings.clip.CLIPS``) and what that calls it, where the checkpoint says neither
                or it is no longer there; "" = as the checkpoint says, of path alone a checkpoint of ours.

    Raises InputError for a CLIP that no stage reads anything of, and a maker without a path.
    """

    def __init__(self, stages: Sequence[Stage], make: str = "", path: str = ""):
        self.stages = [stage for stage in stages if stage.reads_embeddings or stage.reads_text_states]
        self.make, self.path = make, path
        self._kept: Clip | None = None
        check_make(make, path)
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
        """Raises InputError where it is not known or not there, and for another one than that of the training."""
        first = self.stages[0]
        clip = self._kept or load_recorded(self.recorded(), self.make, self.path, first)
        self._kept = clip if first.keep else None
        return clip


def check_make(make: str, path: str) -> None:
    """InputError for the maker of a CLIP without its path."""
    if make and not path:
        raise InputError(Fault("clip_make", f"{named('clip_path')} is missing: give both, or neither", make))


def load_recorded(recorded: ClipConfig | None, make: str, path: str, stage: Stage) -> Clip:
    """The CLIP that a stage was trained with, for its device and precision.

    recorded: what its checkpoint says; None = nothing. make, path: as for ``DecoderClip``.

    Raises InputError as ``DecoderClip.load``.
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
