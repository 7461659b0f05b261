"""Embeddings of new and of existing tokens as trained differences from a table that stays as it is."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ...config import Fault, InputError
from ..text_encoder import TextEncoder

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
