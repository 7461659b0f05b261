"""Sharded checkpoints → ordinary files, and sharded states → whole ones, with one tensor at a time in memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from tqdm import tqdm

from .. import storage
from ..distributed.parallel import is_sharded
from ..distributed.world import World
from .checkpoint import Identity, save_file
from .shards import ShardedFolder, mapped_tensors, temporary_file


def file_name(key: str, step: int) -> str:
    """The name of the file with a state. key: its role, prefixed by the trainee's name in a run of several."""
    trainee, _, role = key.rpartition("/")
    stem = {"model": "model", "optimizer": "opt"}.get(role, f"{role}_")
    return f"{trainee + '_' if trainee else ''}{stem}{step:06d}.pt"


def consolidate(path: str, out: str) -> list[str]:
    """Write all that a sharded checkpoint holds as ordinary files, as a run without sharding would have; returns their
    paths. out: their folder. DamagedError for a checkpoint that is not whole."""
    folder, paths = ShardedFolder(path), []
    content = folder.content
    identity = Identity(content["kind"], content["config"], content["tokenizer"], content["vocabulary"])
    storage.make_dirs(out)
    for key in tqdm(folder.states, desc="consolidating", unit="file", disable=None):
        trainee, _, role = key.rpartition("/")
        paths.append(storage.join(out, file_name(key, content["step"])))
        with temporary_file(out) as file:
            state = folder.read(key, file)
            save_file(paths[-1], role, identity, content["step"], content["samples"], state, trainee)
    return paths


@contextlib.contextmanager
def gathered(state: Mapping[str, Tensor], world: World, folder: str) -> Iterator[Mapping[str, Tensor]]:
    """A state dict whose sharded tensors are whole, on rank 0; nothing on the others. Every rank calls it.

    folder: where rank 0 keeps the values meanwhile, in a file without a name.
    """
    if not any(map(is_sharded, state.values())):
        yield state if world.is_main else {}
        return
    with contextlib.ExitStack() as stack:
        targets: list[Tensor] = []
        if world.is_main:
            file = stack.enter_context(temporary_file(folder))
            targets = mapped_tensors([(tensor.shape, tensor.dtype) for tensor in state.values()], file)
        for number, tensor in enumerate(state.values()):
            sharded: Any = tensor
            whole = sharded.full_tensor() if is_sharded(tensor) else tensor
            if world.is_main:
                targets[number].copy_(whole)
        yield dict(zip(state, targets, strict=False))
