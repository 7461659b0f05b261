"""Memory of training on one of several processes that share the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from torch import nn

from ..distributed.sharding_config import ShardingConfig
from ..errors import InputError
from .cost import ADAMW_BYTES, Cost
from .units import parts_of

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class ShardedCost:
    """Memory in bytes on each process, all in fp32.

    held:       its share of weights, gradients, AdamW's moments and averages.
    gathered:   weights and gradients that are whole for some time, at their peak.
    activation: of one micro-batch.
    """

    held: int
    gathered: int
    activation: int

    @property
    def total(self) -> int:
        return self.held + self.gathered + self.activation


def shapes_of(network: nn.Module) -> list[Shapes]:
    """The shapes of the parameters of each block that is gathered by itself, and at the end those of the rest; none for
    a network that cannot be sharded."""
    try:
        blocks = parts_of(network, None).blocks
    except InputError:
        return []
    found, seen = [], set[int]()
    for module in (*blocks, network):
        own = [each for each in module.parameters() if id(each) not in seen]
        seen.update(map(id, own))
        found.append(tuple(tuple(each.shape) for each in own))
    return found


def sharded_cost(
    shapes: Sequence[Shapes],
    cost: Cost,
    config: ShardingConfig,
    processes: int,
    microbatch: int,
    pieces: int,
    emas: int,
) -> ShardedCost:
    """The memory of each of the processes that share one copy of the weights.

    shapes:    see ``shapes_of``.
    processes: their number.
    pieces:    micro-batches for each update: their gradients are summed while they are whole.
    """
    sizes = [4 * sum(prod(shape) for shape in block) for block in shapes]
    held = sum(_share(shape, processes) for block in shapes for shape in block) * (ADAMW_BYTES + 4 * emas)
    *blocks, rest = sizes
    ahead = 1 + max(1, config.forward_prefetch, config.backward_prefetch)
    largest = sorted(blocks, reverse=True)
    weights = rest + (sum(largest[:ahead]) if config.reshard_after_forward else sum(blocks))
    # A block's whole gradient and the message in which it is sent; with several micro-batches all blocks' gradients.
    gradients = rest + (sum(blocks) if pieces > 1 else sum(largest[:1])) + sum(largest[:1])
    return ShardedCost(held, weights + gradients, microbatch * cost.activation_bytes)


def _share(shape: Sequence[int], processes: int) -> int:
    """Numbers of the largest share of a parameter, which is divided along its first dimension."""
    return -(-shape[0] // processes) * prod(shape[1:]) if shape else 1
