"""Exponential moving averages of the weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn


def effective_rate(rate: float, step: int) -> float:
    """The decay used at update number ``step`` (from 1).

    min(rate, (1 + step) / (10 + step)): a young average forgets its start quickly, so that a short run's average is of
    use too; with rate 0.9999 the limit is reached after 90 000 steps.
    """
    return min(rate, (1 + step) / (10 + step))


class Ema:
    """The moving average of a model's parameters, in fp32.

    rate: the limit of the decay, in [0, 1); its horizon is about 1 / (1 - rate) steps.
    """

    def __init__(self, rate: float, model: nn.Module):
        self.rate = rate
        self.names = [name for name, _ in model.named_parameters()]
        self.sources = list(model.parameters())
        self.averages = [parameter.detach().clone() for parameter in self.sources]

    @property
    def role(self) -> str:
        """What it is called in a checkpoint."""
        return f"ema_{self.rate:.12g}"

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move towards the present weights, after update number ``step`` (from 1)."""
        torch._foreach_lerp_(self.averages, self.sources, 1 - effective_rate(self.rate, step))

    def state(self) -> dict[str, Tensor]:
        return dict(zip(self.names, self.averages, strict=True))

    @torch.no_grad()
    def load_state(self, state: dict[str, Tensor]) -> None:
        for name, average in zip(self.names, self.averages, strict=True):
            average.copy_(state[name])

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the model hold the average inside the block, for previews and evaluation."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for source, average in zip(self.sources, self.averages, strict=True):
            kept = source.clone()
            source.copy_(average)
            average.copy_(kept)
