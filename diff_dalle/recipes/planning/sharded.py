"""Memory of training on one of several processes that share the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from ...config import InputError
from ...distributed.sharding_config import ShardingConfig
from ...distributed.world import ProcessInfo, World
from ..recipe import Recipe
from .cost import ADAMW_BYTES, NetworkCost, Shapes


@dataclass(frozen=True)
class Share:
    """What each of the processes that share one copy of the weights has, all in fp32.

    parameters: numbers of its share.
    gathered:   bytes of weights and gradients that are whole for some time, at their peak.
    """

    parameters: int
    gathered: int


@dataclass(frozen=True)
class ProcessMemory:
    """Memory in bytes of one process, all in fp32.

    held:       its share of weights, gradients, AdamW's moments and averages.
    gathered:   see ``Share``.
    activation: of one micro-batch.
    """

    held: int
    gathered: int
    activation: int

    @property
    def total(self) -> int:
        return self.held + self.gathered + self.activation


def share_of(shapes: Sequence[Shapes], config: ShardingConfig, processes: int, pieces: int) -> Share:
    """The share of each of the processes that share one copy of the weights.

    shapes: see ``shapes_of``.
    pieces: micro-batches for each update: their gradients are summed while they are whole.
    """
    *blocks, rest = [4 * sum(prod(shape) for shape in block) for block in shapes]
    ahead = 1 + max(1, config.forward_prefetch, config.backward_prefetch)
    largest = sorted(blocks, reverse=True)
    weights = rest + (sum(largest[:ahead]) if config.reshard_after_forward else sum(blocks))
    # A block's whole gradient and the message in which it is sent; with several micro-batches all blocks' gradients.
    gradients = rest + (sum(blocks) if pieces > 1 else sum(largest[:1])) + sum(largest[:1])
    return Share(sum(_largest_part(shape, processes) for block in shapes for shape in block), weights + gradients)


def _largest_part(shape: Sequence[int], processes: int) -> int:
    """Numbers of the largest part of a parameter, which is divided along its first dimension."""
    return -(-shape[0] // processes) * prod(shape[1:]) if shape else 1


def process_memory(recipe: Recipe, network: NetworkCost, processes: int) -> ProcessMemory:
    """The memory of each process for training one of a run's networks, with its own settings. InputError when it cannot
    be sharded over so many."""
    training = recipe.training
    if not network.shapes:
        raise InputError(f"the weights of a {recipe.settings.kind} cannot be sharded: set --parallel ddp")
    sharing = len(training.sharding.groups(World(ProcessInfo("single", 0, processes), torch.device("meta")))[0])
    piece = recipe.microbatch
    share = share_of(network.shapes, training.sharding, sharing, -(-training.batch_size // piece))
    held = share.parameters * (ADAMW_BYTES + 4 * len(network.optim.ema_rate))
    return ProcessMemory(held, share.gathered, piece * network.activation_bytes())
