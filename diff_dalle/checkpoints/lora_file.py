"""Files of LoRAs: tensors by the names of the modules that they adapt, and what they were trained on."""

from __future__ import annotations

import contextlib
import json
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from .. import storage
from ..config import InputError
from ..models.adapters.lora import DOWN, merge_low_rank, merge_tokens, unmerge_tokens
from ..text.tokenizer import Tokenizer
from ..text.trained_tokens import Kind, TrainedTokens, find_tokens, parse_token
from .checkpoint import ROLES, load_file
from .content import DamagedError, Entries, check_entries, is_plain, is_plain_text, is_whole_number, short
from .kinds import LORA_ENDING as ENDING
from .model_folder import find_file, open_model
from .safetensors import LORA_FORMAT as FORMAT
from .safetensors import WEIGHTS, read_safetensors, tensor_names, text_of, write_safetensors

DELTAS = "tokens.deltas"
MAX_TEXTS = 1000  # module filters, and trained tokens


@contextlib.contextmanager
def _naming(path: str) -> Iterator[None]:
    """Name the file in an InputError about it."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


@dataclass(frozen=True)
class LoraAbout:
    """What a LoRA says about itself.

    kind, trainee:  of the network that it adapts: its kind, and its name where there are several.
    base:           identity of that network's weights.
    rank, alpha:    the change of a weight is alpha / rank · up · down.
    module_filters: which modules were selected.
    train_tokens:   the tokens that it trains, as the setting.
    clip:           identity of the CLIP that they belong to, which encodes the network's text; "" = its own encoder.
    """

    kind: str
    trainee: str
    base: str
    rank: int
    alpha: float
    module_filters: tuple[str, ...]
    train_tokens: tuple[str, ...]
    clip: str = ""

    @property
    def own_tokens(self) -> tuple[str, ...]:
        """Those of ``train_tokens`` that belong to the network."""
        return () if self.clip else self.train_tokens


@dataclass(frozen=True)
class Lora:
    """A LoRA in memory. path: where it is from. tensors: by module. foreign: they are another project's, which numbers
    the modules."""

    path: str
    about: LoraAbout
    tensors: Mapping[str, Tensor]
    foreign: bool = False

    @property
    def deltas(self) -> Tensor | None:
        """The changes of the trained tokens' embeddings; None = it trains none."""
        return self.tensors.get(DELTAS)

    @property
    def pairs(self) -> dict[str, Tensor]:
        """``MODULE.lora_down`` and ``MODULE.lora_up``."""
        return {name: value for name, value in self.tensors.items() if name != DELTAS}

    def pairs_for(self, network: Any) -> dict[str, Tensor]:
        """``pairs`` by the names of a network's modules. InputError for another network than a foreign one's base."""
        if not self.foreign:
            return self.pairs
        from .foreign.stable_cascade import lora_of  # it needs this module

        return lora_of(self.tensors, self.path, network, self.about.base).pairs

    def tokens(self, tokenizer: Kind, original: Kind | None = None) -> TrainedTokens[Kind]:
        """Its tokens beside those of a tokenizer, see ``find_tokens``. InputError for one that exists there."""
        with _naming(self.path):
            return find_tokens(tokenizer, [parse_token(entry) for entry in self.about.train_tokens], original)

    def changes(self, count: int) -> Tensor:
        """``deltas``, of so many tokens. InputError for a file with others, DamagedError for one without."""
        if self.deltas is None or self.deltas.ndim != 2:
            raise DamagedError(f"{self.path} is damaged: it has no {DELTAS}")
        if len(self.deltas) != count:
            raise InputError(
                f"{self.path} has changes of {len(self.deltas)} tokens, but its patterns find {count} here"
            )
        return self.deltas


def write_lora(file: BinaryIO, about: LoraAbout, tensors: Mapping[str, Tensor]) -> None:
    """Write a LoRA into an open file."""
    metadata = {
        name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for name, value in vars(about).items()
        if name != "clip" or value
    }
    write_safetensors(file, tensors, {"format": FORMAT, **metadata})


def read_lora(path: str, foreign: bool = False) -> Lora:
    """A LoRA's own file, the folder of a shared one, or a checkpoint of the run that trained it (model….pt, ema_….pt,
    best.pt). InputError for anything else.

    foreign: one of Stable Cascade without tokens too, whose base nothing says.
    """
    path = find_file(path, "lora")
    is_own = path.endswith(WEIGHTS)
    try:
        if is_own and foreign and (found := _foreign(path)):
            return found
        values, tensors = _own_file(path) if is_own else _of_run(path)
        return Lora(path, _about(values, tensors, path), tensors)
    except InputError:
        raise
    except (ValueError, KeyError, TypeError, RecursionError):
        what = "metadata" if is_own else "settings"
        raise DamagedError(f"{path} is damaged: its {what} do not describe a LoRA") from None


def _foreign(path: str) -> Lora | None:
    """A LoRA of Stable Cascade; None for another file."""
    from .foreign.stable_cascade import FILTERS, is_lora, trains_tokens  # it needs this module

    if not storage.exists(path) or not is_lora(tensor_names(path)):
        return None
    tensors, _ = read_safetensors(path)
    if trains_tokens(tensors):
        return None  # whose names nothing says
    warnings.warn(
        f"{path} is a LoRA of Stable Cascade, and is taken with module_filters {', '.join(FILTERS)}", stacklevel=3
    )
    rank = len(tensors["weights.0.lora_down"])
    return Lora(path, LoraAbout("stage_c", "", "", rank, 1.0, FILTERS, ()), tensors, foreign=True)


def _own_file(path: str) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
    tensors, metadata = read_safetensors(path)
    if metadata.get("format") != FORMAT:
        from .foreign.layouts import refuse_lora  # it needs this module

        refuse_lora(tensors, path)
        raise InputError(f"{path} is no LoRA of diff_dalle: its metadata do not say the format {FORMAT!r}")
    for name, value in tensors.items():
        if not value.is_floating_point():
            raise DamagedError(f"{path} is damaged: its {name} has whole numbers")
    numbers = {name: json.loads(metadata[name]) for name in ("rank", "alpha", "module_filters", "train_tokens")}
    return {**metadata, **numbers}, tensors


def _of_run(path: str) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
    content = load_file(path, values=True)
    if not content["kind"].endswith(ENDING):
        raise InputError(f"{path} holds a {content['kind']}, but a LoRA is required here: lora….safetensors")
    config, trainee = content["config"], content["trainee"]
    values = {**config, "kind": content["kind"].removesuffix(ENDING), "trainee": trainee}
    values["base"] = base_of(config["base_weights"], trainee)
    if config["train_tokens"] and content["tokenizer"] is None:
        values["clip"] = config["trained_with"]["text_clip"]["identity"]
    return values, {name.removeprefix("lora."): value for name, value in content["state"].items()}


def lora_at(path: str) -> Lora | None:
    """The LoRA in a file, in the folder of a shared one or in a checkpoint of the run that trained it; None for
    anything else."""
    model = open_model(path)
    if model is not None and not model.paths("model_path") and model.paths("lora"):
        return read_lora(path)
    path = find_file(path)
    if path.endswith(WEIGHTS):
        return read_lora(path) if storage.exists(path) and text_of(path, "format") == FORMAT else None
    content = load_file(path, roles=tuple(ROLES))
    return read_lora(path) if content["kind"].endswith(ENDING) and content["role"] in ("model", "ema") else None


def base_of(weights: Sequence[str], trainee: str) -> str:
    """The identity of a network's weights in the setting ``base_weights``, a list of IDENTITY or NAME=IDENTITY.
    KeyError if it is not there."""
    return {name: identity for name, _, identity in (text.rpartition("=") for text in weights)}[trainee]


def _is_factor(value: Any) -> bool:
    return type(value) in (int, float) and is_plain(value) and math.isfinite(value)


def _are_texts(value: Any) -> bool:
    return (
        type(value) is list
        and len(value) <= MAX_TEXTS
        and all(is_plain_text(each) and len(each) < 1000 for each in value)
    )


#: What metadata and settings say; see ``check_entries``.
_ABOUT: Entries = (
    (("kind", "trainee", "base", "clip"), is_plain_text, "a text"),
    (("rank",), lambda value: is_whole_number(value) and value > 0, "a whole number above 0"),
    (("alpha",), _is_factor, "a finite number"),
    (("module_filters", "train_tokens"), _are_texts, f"a list of up to {MAX_TEXTS:,} texts, below 1,000 characters"),
)


def _about(values: Mapping[str, Any], tensors: Mapping[str, Tensor], path: str) -> LoraAbout:
    """DamagedError for values of other types, and for pairs of another rank. KeyError for one that is missing."""
    values = {"clip": "", **values}
    check_entries(values, _ABOUT, path)
    for name, value in tensors.items():
        if name.endswith(f".{DOWN}") and (value.ndim != 2 or len(value) != values["rank"]):
            raise DamagedError(f"{path} is damaged: its rank is {values['rank']}, but its {name} is {short(value)}")
    own: dict[str, Any] = {name: value if type(value) is not list else tuple(value) for name, value in values.items()}
    return LoraAbout(**{field.name: own[field.name] for field in fields(LoraAbout)})


@dataclass(frozen=True)
class WeightedLora:
    """A LoRA and the factor of its changes."""

    lora: Lora
    weight: float = 1.0


def extended_tokenizer(tokenizer: Tokenizer | None, loras: Sequence[WeightedLora]) -> Tokenizer | None:
    """A network's tokenizer with the new tokens of LoRAs, in their order. InputError for a token of two of them."""
    original = tokenizer
    for each in loras:
        if each.lora.about.own_tokens:
            tokenizer = _tokens(each.lora, tokenizer, original).tokenizer
    return tokenizer


@torch.no_grad()
def merge_loras(network: nn.Module, tokenizer: Tokenizer | None, loras: Sequence[WeightedLora]) -> None:
    """Make LoRAs part of a network's weights, with its tokens. tokenizer: the network's own, without theirs.

    InputError for a LoRA that does not fit the network.
    """
    changes, original = [], tokenizer
    for each in loras:
        about = each.lora.about
        with _naming(each.lora.path):
            merge_low_rank(network, each.lora.pairs_for(network), each.weight * about.alpha / about.rank)
        if about.own_tokens:
            found = _tokens(each.lora, tokenizer, original)
            tokenizer = found.tokenizer
            changes.append((found.ids, found.sources, each.lora.changes(len(found.ids)), each.weight))
    if changes and tokenizer is not None:
        merge_tokens(network, tokenizer.vocab_size, changes)


@torch.no_grad()
def unmerge_lora(network: nn.Module, tokenizer: Tokenizer | None, given: WeightedLora) -> Tokenizer | None:
    """Take a LoRA out of a network's weights again, up to rounding, and its new tokens out of the vocabulary.

    tokenizer: the network's own, with them. Returns the one without. InputError for a LoRA that does not fit."""
    lora, about = given.lora, given.lora.about
    with _naming(lora.path):
        merge_low_rank(network, lora.pairs_for(network), -given.weight * about.alpha / about.rank)
    if not about.own_tokens:
        return tokenizer
    new = [spec.text for spec in map(parse_token, about.own_tokens) if spec.is_new]
    if tokenizer is None or not set(new) <= {*tokenizer.added}:
        raise InputError(f"{lora.path}: it adds {', '.join(new)}, which the network does not have")
    rest = tokenizer.without(new)
    found, first = lora.tokens(rest), tokenizer.vocab_size - len(tokenizer.added)
    kept = [*range(first), *(tokenizer.token_id(text) for text in rest.added)]
    existing = [row for row, i in enumerate(found.ids) if i < rest.vocab_size]
    changes = given.weight * lora.changes(len(found.ids))[existing]
    with _naming(lora.path):
        unmerge_tokens(network, kept, [found.ids[row] for row in existing], changes)
    return rest


def joined_tokens(tokenizer: Kind, loras: Sequence[WeightedLora]) -> tuple[TrainedTokens[Kind], Tensor]:
    """The tokens of LoRAs together, at least one, and their changes [n, width]. tokenizer: that of the encoder which
    they belong to. InputError for a token of two of them."""
    extended, sources, changes = tokenizer, dict[int, tuple[int, ...]](), dict[int, Tensor]()
    for each in loras:
        found = each.lora.tokens(extended, tokenizer)
        extended = found.tokenizer
        deltas = each.weight * each.lora.changes(len(found.ids))
        for i, source, delta in zip(found.ids, found.sources, deltas, strict=True):
            sources[i], changes[i] = source, delta + changes.get(i, 0)
    return TrainedTokens(extended, tuple(sources), tuple(sources.values())), torch.stack([*changes.values()])


def _tokens(lora: Lora, tokenizer: Tokenizer | None, original: Tokenizer | None) -> TrainedTokens[Tokenizer]:
    if tokenizer is None:
        raise InputError(f"{lora.path} trains tokens, but the network has no text encoder of its own")
    return lora.tokens(tokenizer, original)
