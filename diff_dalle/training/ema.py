"""Exponential moving averages of the weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ..distributed.parallel import discard_gathered, local


def effective_rate(rate: float, step: int) -> float:
    """The decay of update number ``step`` (from 1): min(rate, (1 + step) / (10 + step)).

    The warm-up makes the average of a short run useful: with rate 0.9999 the limit is reached after 90,000 steps.
    """
    return min(rate, (1 + step) / (10 + step))


class Ema:
    """The moving average, in fp32, of a model's trained parameters and of the floating-point buffers in its state, such
    as statistics of activations, which belong to the weights. Frozen parameters and other buffers are not averaged; in
    ``state`` they have the model's present values.

    rate:  limit of the decay, in [0, 1); the horizon is about every / (1 - rate) steps.
    start: steps in which it is the model itself; from then on the decay is ``rate``. None = the decay warms up, as
           ``effective_rate`` says.
    every: steps between its updates.
    """

    def __init__(self, rate: float, model: nn.Module, start: int | None = None, every: int = 1):
        self.rate, self.model, self.start, self.every = rate, model, start, every
        state = model.state_dict()
        buffers = {name: b for name, b in model.named_buffers() if name in state and b.is_floating_point()}
        self.sources = {name: p for name, p in model.named_parameters() if p.requires_grad} | buffers
        self.averages = {name: source.detach().clone() for name, source in self.sources.items()}

    @property
    def role(self) -> str:
        """Its name in a checkpoint."""
        return f"ema_{self.rate:.12g}"

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move towards the present weights, after update number ``step`` (from 1)."""
        if step % self.every:
            return
        averages, sources = local(self.averages.values()), local(self.sources.values())
        torch._foreach_lerp_(averages, sources, 1 - self._decay(step))

    def _decay(self, step: int) -> float:
        if self.start is None:
            return effective_rate(self.rate, step // self.every)
        return 0.0 if step <= self.start else self.rate

    def state(self) -> dict[str, Tensor]:
        """A state dict of the model with the averages in it."""
        return {name: self.averages.get(name, value) for name, value in self.model.state_dict().items()}

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """The model has the averaged weights inside the block, for previews and evaluation."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        discard_gathered(self.model)
        for average, source in zip(local(self.averages.values()), local(self.sources.values()), strict=True):
            kept = source.clone()
            source.copy_(average)
            average.copy_(kept)
