"""Commands that make a file of others: what they share, and ``assemble_decoder.py`` and ``consolidate.py``."""

from __future__ import annotations

from dataclasses import replace

from .. import storage
from ..checkpoints.assembling import assemble
from ..checkpoints.loading import SavedNetwork
from ..checkpoints.shards import consolidate
from ..config import InputError, named
from ..embeddings.clip import load_clip
from ..embeddings.contract import Clip
from .file_settings import AssembleConfig, ConsolidateConfig


def check_new(path: str) -> None:
    """InputError for an ``out`` that exists."""
    if storage.exists(path):
        raise InputError(f"{path} exists already: give another file with --out, or remove it")


def adapter_clip(base: SavedNetwork, path: str = "") -> Clip:
    """The CLIP whose tokens a LoRA of a stage trains.

    path: where it is, if not where the base says. InputError for another CLIP than the base's, and without one.
    """
    config = base.settings.trained_with.text_clip
    if config is None:
        raise InputError(f"{base.path} reads the text by no CLIP, whose tokens {named('train_tokens')} would be")
    found = replace(config, model=path) if path else config
    clip = load_clip(found.make, found.model, "cpu", "fp32", found.outputs)
    if config.identity and config.identity != clip.identity:
        raise InputError(f"the CLIP is {clip.name} ({clip.identity}), but {base.path} was trained with {config}")
    return clip


def consolidate_checkpoint(config: ConsolidateConfig) -> str:
    """Write the files; returns a text about them. InputError as ``consolidate``."""
    path = config.model_path.rstrip("/")
    paths = consolidate(path, config.out or storage.split(path)[0] or ".")
    return "\n".join(f"Wrote {each}." for each in paths)


def assemble_decoder(config: AssembleConfig) -> str:
    """Write the decoder; returns a text about what was taken. InputError as ``assemble``, and for an existing file."""
    check_new(config.out)
    return assemble(config.model_paths, config.out)
