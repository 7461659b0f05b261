"""Giving sharded trainees their state: from a sharded checkpoint, each rank its own share; from ordinary files, which
rank 0 reads, tensor by tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..checkpoints.content import check_steps
from ..checkpoints.shards import ShardedFolder, replaced
from ..distributed.sharding import place
from ..distributed.world import World
from .trainee import Trainee

Contents = Mapping[str, tuple[Mapping[str, Any], str]]  # by role: of a file, and its path


def contents_of(folder: ShardedFolder, trainee: Trainee) -> dict[str, tuple[dict[str, Any], str]]:
    """What the ordinary files of a sharded checkpoint would hold, without the values."""
    return {
        role: ({**folder.content, "state": folder.outline(trainee.prefix + role)}, folder.path)
        for role in trainee.roles
    }


def load_trainee(trainee: Trainee, contents: Contents | None, folder: ShardedFolder | None, world: World) -> None:
    """Overwrite a trainee's state with what is in ``contents``, that of files, on rank 0, or else in a folder, on every
    rank. Every rank calls it."""
    names = list(trainee.task.model.state_dict())
    targets = [trainee.task.model.state_dict()[name] for name in names]
    roles = ["model"] * len(targets)
    for ema in trainee.emas:
        targets += ema.averages.values()
        names += ema.averages
        roles += [ema.role] * len(ema.averages)
    if folder is not None:
        outline = folder.outline(trainee.prefix + "optimizer")
    else:
        outline = world.broadcast(contents and replaced(contents["optimizer"][0]["state"], _described))
    own = trainee.empty_optimizer(outline)
    rest: list[Tensor] = []
    replaced(own, rest.append)
    if folder is not None:
        from ..checkpoints.sharded_io import load_sharded

        slots = [folder.states[trainee.prefix + role][name] for role, name in zip(roles, names, strict=True)]
        replaced(folder.states[trainee.prefix + "optimizer"], slots.append)
        load_sharded(folder, {int(slot): each for slot, each in zip(slots, [*targets, *rest], strict=True)})
        check_steps(own["optimizer"], folder.path)
    else:
        given: list[Tensor | None] = [None] * (len(targets) + len(rest))
        if contents:
            given = [contents[role][0]["state"][name] for role, name in zip(roles, names, strict=True)]
            replaced(contents["optimizer"][0]["state"], given.append)
        for target, source in zip([*targets, *rest], given, strict=True):
            place(target, source, world)
    trainee.load_optimizer(own)


def place_weights(trainee: Trainee, names: Sequence[str], given: Mapping[str, Tensor] | None, world: World) -> None:
    """Overwrite some of a sharded trainee's weights, and their averages, with rank 0's. Every rank calls it."""
    state = trainee.task.model.state_dict()
    for name in names:
        targets = [state[name], *(ema.averages[name] for ema in trainee.emas if name in ema.averages)]
        for target in targets:
            place(target, given[name] if given is not None else None, world)


def _described(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
