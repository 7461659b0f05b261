"""Tensors that the backward pass computes again instead of keeping them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Again = Callable[[], Tensor]


@dataclass(frozen=True)
class Transient:
    """A tensor that is cheap to compute again from what is kept anyway.

    value: the tensor.
    again: computes it in the backward pass, to the same bits; None = it is kept wherever it is needed.
    """

    value: Tensor
    again: Again | None

    def into(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """``function(value)``, whose backward pass has ``value`` computed again. Whatever else it needs is kept, also
        copies of ``value``, as autocast makes them."""
        if self.again is None:
            return function(self.value)
        with torch.autograd.graph.saved_tensors_hooks(_forget(self.value, self.again), _remember):
            return function(self.value)

    def through(self, function: Callable[[Tensor], Tensor]) -> Transient:
        """``function(value)``, computed again likewise. function: the same one whenever it is called."""
        again = self.again
        return Transient(self.into(function), None if again is None else lambda: _applied(function, again))


def _forget(value: Tensor, again: Again) -> Callable[[Tensor], Tensor | Again]:
    """What autograd keeps of a tensor: itself, or for ``value`` how to compute it. Holds no reference to ``value``."""
    forgotten = _memory(value)
    return lambda tensor: again if _memory(tensor) == forgotten else tensor


def _remember(kept: Any) -> Tensor:
    return kept if isinstance(kept, Tensor) else kept()


def _memory(tensor: Tensor) -> tuple:
    """Which memory a tensor reads, and how, while it is alive."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride()


@torch.no_grad()
def _applied(function: Callable[[Tensor], Tensor], again: Again) -> Tensor:
    return function(again())
