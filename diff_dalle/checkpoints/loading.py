"""Checkpoint files → networks ready to use, built from what the files say about themselves."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from .. import storage
from ..config import InputError, named, quantity
from ..distributed.devices import with_memory, without_values
from ..models.layers import to_channels_last
from ..text.tokenizer import Tokenizer, load_tokenizer
from ..text.vocabulary import BUILT_IN, parse_vocabulary
from .checkpoint import check_weights, load_file, load_weights, network_in
from .kinds import LORA_ENDING, find_kind
from .model_folder import ROLES, find_file
from .safetensors import WEIGHTS


@dataclass(frozen=True)
class SavedNetwork:
    """What a checkpoint file says about a network it holds; the weights stay on disk until ``load``.

    settings:       what it is, and how it is set: a ``NetworkKind``.
    tokenizer:      the one it was trained with; None without text.
    step:           number of updates it was trained for.
    trainee:        its name, where a run trains several networks.
    is_part:        whether the file holds several networks, of which this is one.
    copy:           what a remote file holds, mapped from its one download; None for a local file, and for one of
                    weights alone, which would stay in memory.
    """

    path: str
    settings: Any
    tokenizer: Tokenizer | None
    step: int
    trainee: str = ""
    is_part: bool = False
    copy: Mapping | None = field(default=None, repr=False, compare=False)

    def read(self) -> Mapping:
        """The file's content, compared with its checksums."""
        return load_file(self.path, values=True) if self.copy is None else self.copy

    def build(self) -> nn.Module:
        """The network with initial weights, on torch's default device."""
        return self.settings.build(self.tokenizer.vocab_size if self.tokenizer else 0, self.trainee)

    def check(self, content: Mapping) -> nn.Module:
        """The network without weights, on the meta device. InputError when the file's weights would not fit it."""
        content = self.own(content)
        with _described(self.path), without_values(), at_most(len(content["state"])):
            model = self.build()
        check_weights(model, content, self.path)
        return model

    def own(self, content: Mapping) -> Mapping:
        """A file's content with the weights of this network only."""
        return network_in(content, self.trainee) if self.is_part else content

    def weights(self) -> dict[str, Tensor]:
        """The file's weights and buffers by name, in the types that the network has them in after ``load``, whatever
        the file's: what an identity of the network is made of. Those that have it already are not copied."""
        content = self.read()
        own, given = self.check(content).state_dict(), self.own(content)["state"]
        return {name: given[name].to(like.dtype) for name, like in own.items()}

    def load(self, device: torch.device) -> nn.Module:
        """The network with the file's weights, frozen and in evaluation mode."""
        content = self.read()
        model = with_memory(self.check(content), "cpu")
        load_weights(model, self.own(content), self.path)
        return to_channels_last(model.to(device)).eval().requires_grad_(False)


def open_network(path: str, kind: str, bpe_path: str = "") -> SavedNetwork:
    """The one network in a model or EMA checkpoint; arguments and errors as for ``open_networks``."""
    networks = open_networks(path, (kind,), bpe_path)
    if len(networks) > 1:
        raise InputError(f"{path} holds {quantity(len(networks), 'network')}, but one is required here")
    return networks[0]


def open_networks(path: str, kinds: Sequence[str], bpe_path: str = "") -> list[SavedNetwork]:
    """The networks in a model or EMA checkpoint, at least one.

    bpe_path: the tokenizer's merge file, if the file neither holds its vocabulary nor names the right one.

    Raises InputError for a file without weights of one of these ``kinds``, for weights that do not fit the file's
    settings, and for a missing tokenizer.
    """
    role = find_kind(kinds[0]).role
    path = find_file(path, role if role in ROLES else "model_path")  # ControlNets are sent alone, as the model
    kept = storage.is_remote(path) and not path.endswith(WEIGHTS)
    content = load_file(path, values=kept)  # what is kept is not read again, so its values are compared now
    if content["kind"] not in kinds:
        *others, last = (f"a {kind}" for kind in kinds)
        required = f"{', '.join(others)} or {last}" if others else last
        hint = f": give a LoRA with {named('lora')}" if content["kind"].endswith(LORA_ENDING) else ""
        raise InputError(f"{path} holds a {content['kind']}, but {required} is required here{hint}")
    with _described(path):
        settings = find_kind(content["kind"]).read(content["config"])
        names = (content["trainee"],) if content["trainee"] else settings.trainees
    section = getattr(settings, "tokenizer", None)
    tokenizer = _tokenizer(content, section.bpe_path if section else "", path, bpe_path)
    is_part = not content["trainee"] and names != ("",)
    copy = content if kept else None
    networks = [SavedNetwork(path, settings, tokenizer, content["step"], name, is_part, copy) for name in names]
    if is_part:
        _check_parts(content["state"], names, path)
    for network in networks:
        network.check(content)
    return networks


def _check_parts(state: Mapping, names: Sequence[str], path: str) -> None:
    """InputError for a weight that belongs to none of several networks."""
    for name in state:
        if name.partition(".")[0] not in names:
            raise InputError(f"{path} does not fit its settings: it has an extra {name}")


@contextlib.contextmanager
def _described(path: str) -> Iterator[None]:
    """Turn what impossible settings of a file make the networks' code raise into an InputError."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{path} holds impossible settings: {error}") from None
    except Exception as error:
        reason = str(error).partition("\n")[0][:200]
        raise InputError(f"{path} holds impossible settings: {type(error).__name__}: {reason}") from error


@contextlib.contextmanager
def at_most(count: int) -> Iterator[None]:
    """InputError when this thread builds networks with many more weights than ``count`` inside the block: settings may
    describe more of them than the memory holds."""
    thread, left = threading.get_ident(), 2 * count + 1000  # a few too many are named one by one later

    def registered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        nonlocal left
        if threading.get_ident() == thread and parameter is not None:
            left -= 1
            if left < 0:
                raise InputError(f"they describe many more weights than the {count} of the file")

    hook = register_module_parameter_registration_hook(registered)
    try:
        yield
    finally:
        hook.remove()


def _tokenizer(content: Mapping, saved_path: str, path: str, bpe_path: str) -> Tokenizer | None:
    """The tokenizer that a file was trained with, from ``bpe_path``, else from the file's own vocabulary. A merge file
    that the file names, as earlier versions wrote them, is opened only if it is a regular local one, since a location
    may also be a command."""
    if not content["tokenizer"]:
        return None
    if bpe_path:
        tokenizer, origin = load_tokenizer(bpe_path), bpe_path
    elif content["vocabulary"]:
        origin = "the vocabulary in the file"
        tokenizer = Tokenizer(parse_vocabulary(content["vocabulary"], f"the vocabulary in {path}"))
    elif saved_path in BUILT_IN or (
        not storage.is_remote(saved_path) and os.path.isfile(storage.local_path(saved_path))
    ):
        tokenizer, origin = load_tokenizer(saved_path), saved_path or "the built-in one"
    else:
        raise InputError(
            f"{path} names the vocabulary {saved_path!r}, which is no local file: give its merge file by "
            f"{named('bpe_path')}"
        )
    # Others' files say the name of the vocabulary and its size only.
    if content["tokenizer"] not in (tokenizer.identity, tokenizer.identity.partition(":")[0]):
        raise InputError(
            f"{path} was trained with tokenizer {content['tokenizer']}, but {origin} is {tokenizer.identity}; "
            f"give the vocabulary it was trained with by {named('bpe_path')}"
        )
    return tokenizer
