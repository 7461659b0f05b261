"""Settings of what several processes hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..config import InputError, named, option, quantity, settings
from ..config.bounds import MAX_PROCESSES

if TYPE_CHECKING:  # settings and --help need no torch
    from .world import World

MODES = ("ddp", "fsdp", "hsdp")
_SHARDED = ("parallel", "fsdp", "hsdp")


@settings
class ShardingConfig:
    """Sharding"""

    parallel: str = option(
        "ddp",
        "what a process holds: ddp = all weights; fsdp = its shard of weights, gradients, optimizer state and "
        "averages; hsdp = its shard within a group of shard_processes, replicated across groups",
        choices=MODES,
        free=True,
    )
    shard_processes: int = option(
        0,
        "processes that shard one copy of the weights; 0 = those of a machine",
        free=True,
        needs=("parallel", "hsdp"),
        least=0,
        most=MAX_PROCESSES,
    )
    reshard_after_forward: bool = option(
        True,
        "free gathered weights after the forward pass and gather them again for the backward pass: less memory, more "
        "communication",
        free=True,
        needs=_SHARDED,
    )
    forward_prefetch: int = option(
        0,
        "blocks to gather ahead in the forward pass; 0 = the next one",
        free=True,
        needs=_SHARDED,
        least=0,
        most=MAX_PROCESSES,
    )
    backward_prefetch: int = option(
        0,
        "blocks to gather ahead in the backward pass; 0 = the next one",
        free=True,
        needs=_SHARDED,
        least=0,
        most=MAX_PROCESSES,
    )
    consolidate: bool = option(
        False,
        "also write each checkpoint as ordinary files, in the background; else diff-dalle consolidate makes them",
        free=True,
        needs=_SHARDED,
    )

    def groups(self, world: World) -> list[list[int]]:
        """The ranks that share one copy of the weights, for each copy. InputError when there are no such groups."""
        if self.parallel != "hsdp":
            return [list(range(world.size))]
        size = self.shard_processes or world.node_of.count(0)
        ranks = sorted(range(world.size), key=lambda rank: world.node_of[rank])
        copies = [ranks[start : start + size] for start in range(0, world.size, size)]
        if world.size % size or len(copies) == 1:
            raise InputError(
                f"hsdp shares the weights among {quantity(size, 'process')}, but there are {world.size}, which must be "
                f"two or more such groups: change {named('shard_processes')}, or set {named('parallel')} fsdp"
            )
        return copies
