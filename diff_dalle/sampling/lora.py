"""LoRAs in sampling: the settings of all commands that use them, which network each belongs to, and networks with LoRAs
in their weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache

import torch
from torch import nn

from ..checkpoints.kinds import KINDS, find_kind
from ..checkpoints.loading import SavedNetwork
from ..checkpoints.lora_file import WeightedLora, extended_tokenizer, merge_loras, read_lora
from ..config import InputError, named, quantity
from ..embeddings.contract import weights_digest

# The kinds of networks that guide others.
GUIDES = tuple(kind for kind in KINDS if find_kind(kind).role == "classifier_path")


def parse_lora_paths(texts: Sequence[str]) -> list[WeightedLora]:
    """LoRAs from PATH or PATH:FACTOR. InputError for files of anything else."""
    found = [with_factor(text) for text in texts]
    return [WeightedLora(read_lora(path, foreign=True), factor) for path, factor in found]


def with_factor(text: str) -> tuple[str, float]:
    """The path, or another name, and the factor in PATH:FACTOR; 1 in PATH alone. InputError for one that is not
    finite."""
    path, _, last = text.rpartition(":")
    try:
        factor = float(last) if path else 1.0
    except ValueError:
        return text, 1.0
    if not math.isfinite(factor):
        raise InputError(f"lora has {text[:80]!r}, but the factor must be a finite number")
    return path or text, factor


def of_guides(texts: Sequence[str]) -> tuple[list[str], list[str]]:
    """LoRAs of classifiers, and those of other networks. Arguments and errors as for ``parse_lora_paths``."""
    own = {text: parse_lora_paths([text])[0].lora.about.kind in GUIDES for text in texts}
    return [text for text in texts if own[text]], [text for text in texts if not own[text]]


@dataclass(frozen=True)
class Loras:
    """LoRAs for networks that are opened later. accept_changed_base: see ``with_loras``."""

    loras: tuple[WeightedLora, ...] = ()
    accept_changed_base: bool = False

    @classmethod
    def read(cls, texts: Sequence[str], accept_changed_base: bool = False) -> Loras:
        """Arguments and errors as for ``parse_lora_paths``."""
        return cls(tuple(parse_lora_paths(texts)), accept_changed_base)

    def given_to(self, network: SavedNetwork) -> SavedNetwork:
        """The network with them. InputError as ``with_loras``."""
        return with_loras([network], self.loras, self.accept_changed_base)[0]


@dataclass(frozen=True)
class LoraNetwork(SavedNetwork):
    """A network of a checkpoint with LoRAs in its weights, and with their tokens."""

    plain: SavedNetwork | None = None
    loras: tuple[WeightedLora, ...] = ()

    def load(self, device: torch.device) -> nn.Module:
        assert self.plain is not None
        network = self.plain.load(device)
        merge_loras(network, self.plain.tokenizer, self.loras)
        return network.eval().requires_grad_(False)


def loras_of(saved: SavedNetwork) -> tuple[WeightedLora, ...]:
    """The LoRAs of a network, if any."""
    return saved.loras if isinstance(saved, LoraNetwork) else ()


def with_loras(
    networks: Sequence[SavedNetwork], loras: Sequence[WeightedLora], accept_changed_base: bool = False
) -> list[SavedNetwork]:
    """The networks, those that a LoRA was trained for with it.

    InputError for a LoRA that belongs to none of them, or that was trained for one with other weights, unless
    ``accept_changed_base``, and for two LoRAs that add the same token.
    """
    given: list[list[WeightedLora]] = [[] for _ in networks]

    @cache
    def identity(i: int) -> str:
        return weights_digest(networks[i].weights())

    for each in loras:
        about, path = each.lora.about, each.lora.path
        fitting = [
            i for i, saved in enumerate(networks) if (saved.settings.name, saved.trainee) == (about.kind, about.trainee)
        ]
        same = [i for i in fitting if each.lora.foreign or identity(i) == about.base]
        if not fitting:
            name = f" {about.trainee}" if about.trainee else ""
            raise InputError(f"{path} was trained for a {about.kind}{name}, which is not among the networks here")
        if not same and not accept_changed_base:
            raise InputError(
                f"{path} was trained for a {about.kind} with the weights {about.base}, but {networks[fitting[0]].path} "
                f"has {identity(fitting[0])}: give its own base, or accept this one by {named('accept_changed_base')} "
                "True"
            )
        if not same and len(fitting) > 1:
            count = quantity(len(fitting), "network")
            raise InputError(f"{path} fits {count} here, none of which it was trained for: sample with one of them")
        given[(same or fitting)[0]].append(each)
    return [_adapted(saved, own) if own else saved for saved, own in zip(networks, given, strict=True)]


def _adapted(saved: SavedNetwork, loras: Sequence[WeightedLora]) -> LoraNetwork:
    values = {field.name: getattr(saved, field.name) for field in fields(SavedNetwork)}
    tokenizer = extended_tokenizer(saved.tokenizer, loras)
    return replace(LoraNetwork(**values, plain=saved, loras=tuple(loras)), tokenizer=tokenizer)
