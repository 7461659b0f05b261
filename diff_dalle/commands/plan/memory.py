"""Memory of a training step on each GPU, split into its parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

from ...distributed.sharding_config import ShardingConfig
from ...errors import InputError
from ...models.cost import ADAMW_BYTES, Cost
from ...models.sharded_cost import sharded_cost
from .network import PlannedNetwork


@dataclass(frozen=True)
class Layout:
    """How a step is computed: parallel as in ``ShardingConfig``; checkpoint: with activation checkpointing; node: GPUs
    of a machine, which in hsdp share one copy of the weights."""

    parallel: str = "ddp"
    checkpoint: bool = False
    gpus: int = 1
    node: int = 8

    @property
    def sharing(self) -> int:
        """GPUs that share one copy of the weights, if they are sharded."""
        return self.node if self.parallel == "hsdp" else self.gpus


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU at the peak of a step, without the GPU's own libraries.

    weights, gradients: in fp32. optimizer: its state. averages: EMA weights.
    gathered:           weights and gradients that are whole for some time, if they are sharded.
    activations:        of one micro-batch, with copies of the weights in half precision and what the update needs for
                        its own time, beyond the other parts.
    frozen:             networks that are not trained.
    """

    weights: int
    gradients: int
    optimizer: int
    averages: int
    gathered: int
    activations: int
    frozen: int = 0

    @property
    def total(self) -> int:
        return sum(astuple(self))


def memory_of(
    networks: Sequence[PlannedNetwork], layout: Layout, microbatch: int, batch: int, frozen: int = 0, exact: bool = True
) -> Memory:
    """The memory of a step over ``batch`` images a GPU, ``microbatch`` at a time.

    exact: False = activations are ``estimated_peak``. InputError for networks that cannot be sharded.
    """
    pieces = -(-batch // microbatch)
    # Gradients exist before the backward pass where it adds to them, or where they are parts of DDP's messages.
    accumulates = pieces > 1 or layout.gpus > 1
    peaks, gathered, shares = [], 0, []
    for network in networks:
        peak = (network.peak if exact else network.estimated_peak)(microbatch, layout.checkpoint, accumulates)
        peaks.append(max(peak - (0 if accumulates else 4 * network.parameters), network.update_bytes, 0))
        share, whole = network.parameters, 0
        if layout.parallel != "ddp":
            share, whole = _sharded(network, layout, microbatch, pieces)
        shares.append(share / network.parameters)
        gathered = max(gathered, whole)

    def held(sizes: Sequence[int]) -> int:
        return round(sum(size * share for size, share in zip(sizes, shares, strict=True)))

    weights = [4 * network.parameters for network in networks]
    return Memory(
        weights=held(weights),
        gradients=held(weights),
        optimizer=held([network.optimizer_bytes for network in networks]),
        averages=held([size * len(each.optim.ema_rate) for size, each in zip(weights, networks, strict=True)]),
        gathered=gathered,
        activations=max(peaks),  # networks are trained one after the other
        frozen=frozen,
    )


def _sharded(network: PlannedNetwork, layout: Layout, microbatch: int, pieces: int) -> tuple[int, int]:
    """The parameters that one GPU holds, and the bytes that it gathers."""
    if network.optim.optimizer == "muon" or not network.shapes:
        raise InputError(f"a {network.settings.name} that is trained by {network.optim.optimizer} cannot be sharded")
    nothing = Cost(network.parameters, 0, 0)
    config = ShardingConfig(parallel=layout.parallel)
    found = sharded_cost(network.shapes, nothing, config, layout.sharing, microbatch, pieces, emas=0)
    return found.held // ADAMW_BYTES, found.gathered
