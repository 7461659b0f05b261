"""The CLIP whose tokens a LoRA of a stage trains."""

from __future__ import annotations

from dataclasses import replace

from ..checkpoints.loading import SavedNetwork
from ..config import InputError, named
from ..embeddings.clip import load_clip
from ..embeddings.contract import Clip


def adapter_clip(base: SavedNetwork, path: str = "") -> Clip:
    """path: where it is, if not where the base says. InputError for another CLIP than the base's, and without one."""
    config = base.settings.trained_with.text_clip
    if config is None:
        raise InputError(f"{base.path} reads the text by no CLIP, whose tokens {named('train_tokens')} would be")
    found = replace(config, model=path) if path else config
    clip = load_clip(found.make, found.model, "cpu", "fp32", found.outputs)
    if config.identity and config.identity != clip.identity:
        raise InputError(f"the CLIP is {clip.name} ({clip.identity}), but {base.path} was trained with {config}")
    return clip
