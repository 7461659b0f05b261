"""Low-rank adaptation (Hu et al. 2021): W + alpha / rank · up · down, of weights that stay as they are.

A weight [out, in, …] is adapted as the matrix [out, in · …]: those of linear layers, fused ones (queries, keys and
values in one) among them, and of convolutions of every kernel, depthwise ones included.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ...config import Fault, InputError, nearest
from ...text.trained_tokens import TrainedTokens
from ..precision import autocast_disabled
from ..text_encoder import TextEncoder

ADAPTABLE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.ConvTranspose2d)
DOWN, UP = "lora_down", "lora_up"
RECIPES = ("standard", "published")


class LowRank(nn.Module):
    """A parametrization: weight → weight + scale · up · down, in fp32 whatever the weight's dtype is. The identity at
    initialization: up is 0, and down as the weight of a linear layer (standard); or down is 0, and up N(0, 1), as in
    Stable Cascade's training (published).

    enabled: where False, the weight stays as it is.
    """

    enabled = True

    def __init__(self, shape: Sequence[int], rank: int, alpha: float, recipe: str = RECIPES[0]):
        super().__init__()
        columns = math.prod(shape[1:])
        self.scale = alpha / rank
        self.lora_down = nn.Parameter(torch.zeros(rank, columns, dtype=torch.float32))
        self.lora_up = nn.Parameter(torch.zeros(shape[0], rank, dtype=torch.float32))
        if recipe == "published":
            nn.init.normal_(self.lora_up)
        else:
            bound = columns**-0.5
            nn.init.uniform_(self.lora_down, -bound, bound)

    def forward(self, weight: Tensor) -> Tensor:
        if not self.enabled:
            return weight
        with autocast_disabled(weight.device):
            change = product(self.lora_down, self.lora_up, self.scale)
            return (weight.float() + change.view(weight.shape)).to(weight.dtype)


def product(down: Tensor, up: Tensor, scale: float) -> Tensor:
    """scale · up · down, [out, in · …]."""
    return (up * scale) @ down


def adaptable(network: nn.Module) -> list[str]:
    """The dotted names of the modules whose ``weight`` can be adapted."""
    return [name for name, module in network.named_modules() if isinstance(module, ADAPTABLE)]


def select_modules(network: nn.Module, filters: Sequence[str]) -> list[str]:
    """The adaptable modules whose dotted names contain one of the ``filters``. InputError for a filter that none of
    them contains, with the nearest name that there is."""
    names = adaptable(network)
    for text in filters:
        if not any(text in name for name in names):
            parts = {part for name in names for part in name.split(".")}
            begin = "." if text.startswith(".") else ""
            hint = nearest(text, sorted(begin + part for part in parts if not part.isdigit()))
            rule = (
                f"has {text!r}, but no linear layer or convolution of the network has that in its name{hint} "
                f"(names look like {names[len(names) // 2] if names else 'none'})"
            )
            raise InputError(Fault("module_filters", rule))
    return [name for name in names if any(text in name for text in filters)]


def add_low_rank(
    network: nn.Module, filters: Sequence[str], rank: int, alpha: float, recipe: str = RECIPES[0]
) -> dict[str, LowRank]:
    """Adapt the selected modules of a network, which then computes with the adapted weights. Returns the
    parametrizations by the modules' names."""
    pairs = {}
    for name in select_modules(network, filters):
        module: Any = network.get_submodule(name)
        pairs[name] = LowRank(module.weight.shape, rank, alpha, recipe).to(module.weight.device)
        parametrize.register_parametrization(module, "weight", pairs[name], unsafe=True)  # nothing to check
    return pairs


@torch.no_grad()
def merge_low_rank(network: nn.Module, pairs: Mapping[str, Tensor], scale: float) -> None:
    """Add scale · up · down to the weights, which ``-scale`` takes away again, both up to rounding.

    pairs: ``MODULE.lora_down`` and ``MODULE.lora_up``. InputError for modules that the network does not have, and for
    other shapes.
    """
    names = adaptable(network)
    for name in sorted({key.rpartition(".")[0] for key in pairs}):
        down, up = pairs.get(f"{name}.{DOWN}"), pairs.get(f"{name}.{UP}")
        if name not in names or down is None or up is None:
            raise InputError(f"the LoRA does not fit this network: it adapts {name}{nearest(name, names)}")
        weight = network.get_parameter(f"{name}.weight")
        rows, columns = weight.shape[0], math.prod(weight.shape[1:])
        if down.ndim != 2 or up.ndim != 2 or (len(up), up.shape[1], down.shape[1]) != (rows, len(down), columns):
            raise InputError(
                f"the LoRA does not fit this network: for the weight {rows}×{columns} of {name} it has "
                f"{tuple(up.shape)} times {tuple(down.shape)}"
            )
        change = product(down.to(weight.device).float(), up.to(weight.device).float(), scale)
        weight.copy_(weight.float() + change.view(weight.shape))


Sources = Sequence[Sequence[int]]


def text_encoder_of(network: nn.Module) -> tuple[str, TextEncoder]:
    """The text encoder of a network, and its dotted name. InputError for a network without one."""
    for name, module in network.named_modules():
        if isinstance(module, TextEncoder):
            return name, module
    raise InputError(Fault("train_tokens", "is set, but the network has no text encoder of its own: leave it out"))


class AdaptedEmbedding(nn.Module):
    """An embedding of tokens some of which have their own rows: ``start`` + ``deltas``.

    base:       the table of the others, which is neither changed nor copied.
    vocab_size: with the new tokens, whose ids are not in the table; negative ones count from the end, which leaves the
                ids of an encoder in place that pools at the largest one.
    ids, sources: see ``TrainedTokens``.
    enabled:    where False, ``deltas`` have no effect.
    """

    enabled = True

    def __init__(self, base: nn.Embedding, vocab_size: int, ids: Sequence[int], sources: Sources):
        super().__init__()
        self.base = base
        start = start_rows(base.weight, sources)
        slots = torch.full((vocab_size,), -1, device=start.device)
        slots[torch.tensor(ids, device=start.device)] = torch.arange(len(ids), device=start.device)
        self.register_buffer("start", start, persistent=False)
        self.register_buffer("slots", slots, persistent=False)
        self.deltas = nn.Parameter(torch.zeros_like(start))
        self.start: Tensor
        self.slots: Tensor

    def forward(self, tokens: Tensor) -> Tensor:
        """[N, L] int64 → [N, L, width]."""
        slots = self.slots[tokens]
        rows = self.start + self.deltas if self.enabled else self.start
        own = rows[slots.clamp(min=0)]
        others = self.base(tokens.clamp(0, self.base.num_embeddings - 1))
        return torch.where((slots >= 0)[..., None], own.to(others.dtype), others)

    def lent(self) -> nn.Parameter:
        """``deltas``, from now on a parameter of another module, which trains and saves it, and not of this one."""
        deltas = self.deltas
        del self.deltas
        self.__dict__["deltas"] = deltas
        return deltas


def start_rows(table: Tensor, sources: Sources) -> Tensor:
    """[len(sources), width] float32: the mean of the rows of each source; zeros for none."""
    rows = [table[list(each)].float().mean(0) if each else table.new_zeros(table.shape[1]).float() for each in sources]
    return torch.stack(rows).detach()


def _check_shape(deltas: Tensor, ids: Sequence[int], table: Tensor) -> None:
    wanted = (len(ids), table.shape[1])
    if deltas.shape != wanted:
        raise InputError(
            f"the LoRA does not fit this network: its token embeddings are {tuple(deltas.shape)}, but must be {wanted}"
        )


@torch.no_grad()
def merge_tokens(
    network: nn.Module, vocab_size: int, changes: Sequence[tuple[Sequence[int], Sources, Tensor, float]]
) -> None:
    """Give a network's text encoder a table of ``vocab_size`` rows with all trained tokens in it.

    changes: of each adapter the ids, sources, deltas [n, width] and weight of its tokens. What several change, they
    change together. InputError for deltas of another shape.
    """
    encoder = text_encoder_of(network)[1]
    old = encoder.token_emb.weight
    table = torch.cat([old, old.new_zeros(vocab_size - len(old), old.shape[1])])
    for ids, sources, deltas, weight in changes:
        _check_shape(deltas, ids, old)
        rows = torch.tensor(ids, device=old.device)
        begin = start_rows(old, sources)
        known = (rows < len(old))[:, None]
        table[rows] = torch.where(known, table[rows], begin) + weight * deltas.to(old.device, old.dtype)
    encoder.token_emb = nn.Embedding.from_pretrained(table)


@torch.no_grad()
def unmerge_tokens(network: nn.Module, kept: Sequence[int], ids: Sequence[int], changes: Tensor) -> None:
    """Undo ``merge_tokens``: give a network's text encoder the rows ``kept`` of its table, in this order, and take
    ``changes`` [n, width] away from those that then are ``ids``."""
    encoder = text_encoder_of(network)[1]
    table = encoder.token_emb.weight[torch.tensor(kept)]
    _check_shape(changes, ids, table)
    table[torch.tensor(ids, dtype=torch.int64)] -= changes.to(table.dtype)
    encoder.token_emb = nn.Embedding.from_pretrained(table)


class Adapted(nn.Module):
    """``base`` with adapters: called as it is, and with its attributes.

    Parameters and state dict are the adapters' alone: ``lora.MODULE.lora_down``, ``lora.MODULE.lora_up`` and
    ``lora.tokens.deltas``. The base is frozen and in evaluation mode, also in training, and must be on its device.
    Initially all computes what the base does.

    tokens:  the tokens to train; None = none.
    outside: the deltas of tokens of another network, which encodes text for this one: trained with it.
    recipe:  how changes begin, of RECIPES; see ``LowRank``.
    """

    def __init__(
        self,
        base: nn.Module,
        filters: Sequence[str],
        rank: int,
        alpha: float,
        tokens: TrainedTokens[Any] | None = None,
        outside: nn.Parameter | None = None,
        recipe: str = RECIPES[0],
    ):
        super().__init__()
        self.__dict__["base"] = base.eval().requires_grad_(False)  # no submodule: neither saved nor trained with this
        self.lora = _Node()
        self.__dict__["switched"] = switched = list[LowRank | AdaptedEmbedding]()
        if tokens is not None:
            encoder = text_encoder_of(base)[1]
            embedding = AdaptedEmbedding(encoder.token_emb, tokens.tokenizer.vocab_size, tokens.ids, tokens.sources)
            encoder.token_emb = embedding  # type: ignore[assignment]
            switched.append(embedding)
            outside = embedding.deltas
        if outside is not None:
            node = _Node()
            node.deltas = outside
            self.lora.add_module("tokens", node)
        for name, pair in add_low_rank(base, filters, rank, alpha, recipe).items():
            _put(self.lora, name, pair)
            switched.append(pair)

    @contextlib.contextmanager
    def unadapted(self) -> Iterator[None]:
        """Compute what the base does. Tokens of another network keep their deltas, and new ones their initial rows."""
        for each in self.switched:
            each.enabled = False
        try:
            yield
        finally:
            for each in self.switched:
                each.enabled = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["base"], name)


class _Node(nn.Module):
    """A place in the tree of adapters, with the names that modules have in the base."""

    decayed = (DOWN, UP)  # see ``training.optim.decayed``


def _put(root: nn.Module, name: str, pair: LowRank) -> None:
    for part in name.split("."):
        if part not in root._modules:
            root.add_module(part, _Node())
        root = root._modules[part]  # type: ignore[assignment]
    for own in (DOWN, UP):
        root.register_parameter(own, getattr(pair, own))
