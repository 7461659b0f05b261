"""Checkpoints are read by rank 0 alone; the other ranks receive the values, tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..distributed.world import World


@dataclass(frozen=True)
class _Slot:
    """The place of a tensor in a state."""

    shape: torch.Size
    dtype: torch.dtype


def share_tensors(world: World, tensors: Iterable[Tensor]) -> None:
    """Overwrite tensors, of the same shape, dtype and layout on every rank, with rank 0's. No more than one of them is
    copied at a time."""
    if world.size == 1:
        return
    for tensor in tensors:
        sent = tensor.detach().contiguous()
        world.broadcast_tensor(sent.reshape(-1).view(torch.uint8))  # as bytes, which every backend exchanges
        if sent.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(sent)


def share_state(world: World, state: Any) -> Any:
    """Rank 0's nested dicts and lists of tensors and plain values, on every rank; on the others, the tensors are on the
    rank's device. The others' ``state`` is ignored."""
    if world.size == 1:
        return state
    own: list[Tensor] = []
    outline = world.broadcast(_outline(state, own) if world.is_main else None)
    return _filled(outline, iter(own), world)


def _outline(state: Any, found: list[Tensor]) -> Any:
    """The state with a slot for each tensor; the tensors are appended to ``found`` in that order."""
    if isinstance(state, Tensor):
        found.append(state)
        return _Slot(state.shape, state.dtype)
    if isinstance(state, dict):
        return {key: _outline(value, found) for key, value in state.items()}
    if isinstance(state, list):
        return [_outline(value, found) for value in state]
    return state


def _filled(outline: Any, own: Any, world: World) -> Any:
    if isinstance(outline, _Slot):
        if world.is_main:
            tensor = next(own)
            share_tensors(world, [tensor.to(world.device)])
            return tensor
        tensor = torch.empty(outline.shape, dtype=outline.dtype, device=world.device)
        share_tensors(world, [tensor])
        return tensor
    if isinstance(outline, dict):
        return {key: _filled(value, own, world) for key, value in outline.items()}
    if isinstance(outline, list):
        return [_filled(value, own, world) for value in outline]
    return outline
