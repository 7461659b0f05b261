"""Checkpoints are read by rank 0 alone; the other ranks receive the values, tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..distributed.world import World
from .shards import replaced


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

    def outlined(tensor: Tensor) -> Tensor:
        own.append(tensor)
        return torch.empty_like(tensor, device="meta")

    def shared(slot: Tensor) -> Tensor:
        tensor = own.pop(0) if world.is_main else torch.empty(slot.shape, dtype=slot.dtype, device=world.device)
        share_tensors(world, [tensor.to(world.device)])
        return tensor

    return replaced(world.broadcast(replaced(state, outlined) if world.is_main else None), shared)
