"""A frozen network with a low-rank adapter and trained tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from ...text.trained_tokens import TrainedTokens
from .lora import DOWN, RECIPES, UP, LowRank, add_low_rank
from .tokens import AdaptedEmbedding, text_encoder_of


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
