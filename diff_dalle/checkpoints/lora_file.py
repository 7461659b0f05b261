"""Files of LoRAs: tensors by the names of the modules that they adapt, and what they were trained on."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..models.adapters.lora import merge_low_rank
from ..models.adapters.tokens import merge_tokens
from ..text.tokenizer import Tokenizer
from ..text.trained_tokens import TrainedTokens, find_tokens, parse_token
from .checkpoint import load_file
from .content import DamagedError
from .model_folder import find_file
from .safetensors import read_safetensors, write_safetensors

FORMAT = "diff_dalle LoRA 1"
DELTAS = "tokens.deltas"
ENDING = "_lora"  # of the kinds of runs that train one


@dataclass(frozen=True)
class LoraAbout:
    """What a LoRA says about itself.

    kind, trainee:  of the network that it adapts: its kind, and its name where there are several.
    base:           identity of that network's weights.
    rank, alpha:    the change of a weight is alpha / rank · up · down.
    module_filters: which modules were selected.
    train_tokens:   the tokens that it trains, as the setting.
    """

    kind: str
    trainee: str
    base: str
    rank: int
    alpha: float
    module_filters: tuple[str, ...]
    train_tokens: tuple[str, ...]


@dataclass(frozen=True)
class Lora:
    """A LoRA in memory. path: where it is from. tensors: by module."""

    path: str
    about: LoraAbout
    tensors: Mapping[str, Tensor]

    @property
    def deltas(self) -> Tensor | None:
        """The changes of the trained tokens' embeddings; None = it trains none."""
        return self.tensors.get(DELTAS)

    @property
    def pairs(self) -> dict[str, Tensor]:
        """``MODULE.lora_down`` and ``MODULE.lora_up``."""
        return {name: value for name, value in self.tensors.items() if name != DELTAS}

    def tokens(self, tokenizer: Tokenizer) -> TrainedTokens:
        """Its tokens beside those of a tokenizer. InputError for one that exists there."""
        return find_tokens(tokenizer, [parse_token(entry) for entry in self.about.train_tokens])


def write_lora(file: BinaryIO, about: LoraAbout, tensors: Mapping[str, Tensor]) -> None:
    """Write a LoRA into an open file."""
    metadata = {"format": FORMAT, "kind": about.kind, "trainee": about.trainee, "base": about.base}
    metadata |= {"rank": json.dumps(about.rank), "alpha": json.dumps(about.alpha)}
    for name in ("module_filters", "train_tokens"):
        metadata[name] = json.dumps(getattr(about, name), ensure_ascii=False)
    write_safetensors(file, tensors, metadata)


def read_lora(path: str) -> Lora:
    """A LoRA's own file, the folder of a shared one, or a checkpoint of the run that trained it (model….pt, ema_….pt,
    best.pt). InputError for anything else."""
    path = find_file(path, "lora")
    if path.endswith(".safetensors"):
        tensors, metadata = read_safetensors(path)
        if metadata.get("format") != FORMAT:
            raise InputError(f"{path} is no LoRA of diff_dalle: its metadata do not say the format {FORMAT!r}")
        values: dict[str, Any] = {**metadata}
        try:
            for name in ("rank", "alpha", "module_filters", "train_tokens"):
                values[name] = json.loads(metadata[name])
            return Lora(path, _about(values), tensors)
        except (ValueError, KeyError, TypeError, RecursionError):
            raise DamagedError(f"{path} is damaged: its metadata do not describe a LoRA") from None
    content = load_file(path, values=True)
    if not content["kind"].endswith(ENDING):
        raise InputError(f"{path} holds a {content['kind']}, but a LoRA is required here: lora….safetensors")
    config, kind, trainee = content["config"], content["kind"].removesuffix(ENDING), content["trainee"]
    try:
        about = _about({**config, "kind": kind, "trainee": trainee, "base": base_of(config["base_weights"], trainee)})
    except (KeyError, TypeError, ValueError):
        raise DamagedError(f"{path} is damaged: its settings do not describe a LoRA") from None
    return Lora(path, about, {name.removeprefix("lora."): value for name, value in content["state"].items()})


def base_of(weights: Sequence[str], trainee: str) -> str:
    """The identity of a network's weights in the setting ``base_weights``, a list of IDENTITY or NAME=IDENTITY.
    KeyError if it is not there."""
    return {name: identity for name, _, identity in (text.rpartition("=") for text in weights)}[trainee]


def _about(values: Mapping[str, Any]) -> LoraAbout:
    """ValueError, TypeError or KeyError for anything that is missing or has another type."""
    filters, tokens = tuple(values["module_filters"]), tuple(values["train_tokens"])
    about = LoraAbout(
        values["kind"], values["trainee"], values["base"], values["rank"], values["alpha"], filters, tokens
    )
    texts = (about.kind, about.trainee, about.base, *filters, *tokens)
    numbers = type(about.rank) is int and about.rank > 0 and isinstance(about.alpha, (int, float))
    if not numbers or not math.isfinite(about.alpha) or not all(isinstance(text, str) for text in texts):
        raise ValueError
    return about


@dataclass(frozen=True)
class WeightedLora:
    """A LoRA and the factor of its changes."""

    lora: Lora
    weight: float = 1.0


def extended_tokenizer(tokenizer: Tokenizer | None, loras: Sequence[WeightedLora]) -> Tokenizer | None:
    """A network's tokenizer with the new tokens of LoRAs, in their order. InputError for a token of two of them."""
    for each in loras:
        if each.lora.about.train_tokens:
            tokenizer = _tokens(each.lora, tokenizer).tokenizer
    return tokenizer


@torch.no_grad()
def merge_loras(network: nn.Module, tokenizer: Tokenizer | None, loras: Sequence[WeightedLora]) -> None:
    """Make LoRAs part of a network's weights, with its tokens. tokenizer: the network's own, without theirs.

    InputError for a LoRA that does not fit the network.
    """
    changes = []
    for each in loras:
        about = each.lora.about
        try:
            merge_low_rank(network, each.lora.pairs, each.weight * about.alpha / about.rank)
        except InputError as error:
            raise InputError(f"{each.lora.path}: {error}") from None
        if about.train_tokens:
            found = _tokens(each.lora, tokenizer)
            tokenizer, deltas = found.tokenizer, each.lora.deltas
            if deltas is None:
                raise DamagedError(f"{each.lora.path} is damaged: it has no {DELTAS}")
            changes.append((found.ids, found.sources, deltas, each.weight))
    if changes and tokenizer is not None:
        merge_tokens(network, tokenizer.vocab_size, changes)


def _tokens(lora: Lora, tokenizer: Tokenizer | None) -> TrainedTokens:
    if tokenizer is None:
        raise InputError(f"{lora.path} trains tokens, but the network has no text encoder of its own")
    try:
        return lora.tokens(tokenizer)
    except InputError as error:
        raise InputError(f"{lora.path}: {error}") from None
