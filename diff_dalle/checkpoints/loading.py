"""Checkpoint files → networks ready to use, built from what the files say about themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import InputError
from ..models.layers import to_channels_last
from ..text.tokenizer import Tokenizer, load_tokenizer
from .checkpoint import check_weights, load_file, load_weights
from .kinds import Kind, find_kind


@dataclass(frozen=True)
class SavedNetwork:
    """What a checkpoint file says about the network it holds; the weights stay on disk until ``load``.

    kind, settings: what it is, and how it is set (``kind.settings``).
    tokenizer:      the one it was trained with; None without text.
    step:           number of updates it was trained for.
    """

    path: str
    kind: Kind
    settings: Any
    tokenizer: Tokenizer | None
    step: int

    def build(self) -> nn.Module:
        """The network with initial weights, on torch's default device."""
        return self.kind.build(self.settings, self.tokenizer.vocab_size if self.tokenizer else 0)

    def check(self, content: Mapping) -> nn.Module:
        """The network without weights, on the meta device. InputError when the file's weights would not fit it."""
        with torch.device("meta"):
            model = self.build()
        check_weights(model, content, self.path)
        return model

    def load(self, device: torch.device) -> nn.Module:
        """The network with the file's weights, frozen and in evaluation mode."""
        content = load_file(self.path)
        model = self.check(content).to_empty(device="cpu")
        load_weights(model, content, self.path)
        return to_channels_last(model.to(device)).eval().requires_grad_(False)


def open_network(path: str, kind: str, bpe_path: str = "") -> SavedNetwork:
    """The network in a model or EMA checkpoint.

    bpe_path: the tokenizer's merge file, if it has moved since training.

    Raises InputError for a file without weights of this ``kind``, for weights that do not fit the file's settings, and
    for a missing tokenizer.
    """
    content = load_file(path)
    if content["kind"] != kind:
        raise InputError(f"{path} holds a {content['kind']}, but a {kind} is required here")
    found = find_kind(kind)
    settings = found.read_settings(content["config"])
    saved = SavedNetwork(
        path,
        found,
        settings,
        _tokenizer(content, settings.tokenizer.bpe_path, path, bpe_path),
        content["step"],
    )
    saved.check(content)
    return saved


def _tokenizer(content: Mapping, saved_path: str, path: str, bpe_path: str) -> Tokenizer | None:
    if not content["tokenizer"]:
        return None
    tokenizer = load_tokenizer(bpe_path or saved_path)
    if tokenizer.identity != content["tokenizer"]:
        raise InputError(
            f"{path} was trained with tokenizer {content['tokenizer']}, but "
            f"{bpe_path or saved_path or 'the built-in one'} is {tokenizer.identity}; "
            "give the vocabulary it was trained with by --bpe_path"
        )
    return tokenizer
