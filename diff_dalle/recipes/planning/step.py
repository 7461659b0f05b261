"""A training step on given GPUs: its memory, also of weights that processes share, and time, by how it is computed, and
the way that is best."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from math import prod

import torch

from ...config import InputError
from ...distributed.sharding_config import MODES, ShardingConfig
from ...distributed.world import ProcessInfo, World
from ..recipe import Recipe
from .cluster import PlanConfig, sent_bytes
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


ENOUGH = 8  # images of a micro-batch that use a GPU well: above it, plain data parallelism is preferred


@dataclass(frozen=True)
class Layout:
    """How a step is computed: parallel as in ``ShardingConfig``; checkpoint: with activation checkpointing."""

    parallel: str = "ddp"
    checkpoint: bool = False


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


@dataclass(frozen=True)
class Option:
    """A way to compute a step.

    memory:  with ``microbatch`` images at a time, the most that fit, or one if not even that does.
    seconds: shortest and longest time of a step.
    """

    layout: Layout
    microbatch: int
    memory: Memory
    fits: bool
    seconds: tuple[float, float]


@dataclass(frozen=True)
class Step:
    """A step of training networks over ``batch`` images a GPU.

    cached:     several micro-batches need one more forward pass: gradient caching, for a contrastive loss over the
                whole batch.
    calibrated: FLOP/s that are reached; None = those that ``config`` assumes.
    """

    networks: Sequence[NetworkCost]
    config: PlanConfig
    batch: int
    cached: bool = False
    calibrated: float | None = None

    @classmethod
    def of(cls, recipe: Recipe, config: PlanConfig, networks: Sequence[NetworkCost]) -> Step:
        """A step of a training run."""
        batch = config.global_batch // config.gpus or recipe.training.batch_size
        return cls(networks, config, batch, cached=recipe.settings.kind == "classifier")

    def memory(self, layout: Layout, microbatch: int, exact: bool = True) -> Memory:
        """With ``microbatch`` images at a time.

        exact: False = activations are ``estimated_peak``. InputError for networks that cannot be sharded.
        """
        pieces = -(-self.batch // microbatch)
        # Gradients exist before the backward pass where it adds to them, or where they are parts of DDP's messages.
        accumulates = pieces > 1 or self.config.gpus > 1
        weights, optimizer, averages, gathered, activations = 0, 0.0, 0, 0, 0
        shares = self._sharing(layout)
        for network in self.networks:
            peak = (network.peak if exact else network.estimated_peak)(microbatch, layout.checkpoint, accumulates)
            peak -= 0 if accumulates else 4 * network.parameters
            update = network.update_bytes(self.config.gpus // shares, shares)
            activations = max(activations, peak, update)  # networks are trained one after the other
            held, whole = self._held(network, layout, pieces)
            gathered = max(gathered, whole)
            weights += 4 * held
            optimizer += network.optimizer_bytes * held / network.parameters
            averages += 4 * held * len(network.optim.ema_rate)
        frozen = round(self.config.frozen_memory * 2**30)
        return Memory(weights, weights, round(optimizer), averages, gathered, activations, frozen)

    def _sharing(self, layout: Layout) -> int:
        """The GPUs that share one copy of the weights."""
        gpus, local = self.config.gpus, self.config.gpus_per_node
        return {"ddp": 1, "fsdp": gpus, "hsdp": min(gpus, local)}[layout.parallel]

    def _held(self, network: NetworkCost, layout: Layout, pieces: int) -> tuple[int, int]:
        """The parameters that one GPU holds, and the bytes that it gathers."""
        if layout.parallel == "ddp":
            return network.parameters, 0
        if not network.shapes:
            raise InputError(f"a {network.settings.name} cannot be sharded")
        share = share_of(network.shapes, ShardingConfig(parallel=layout.parallel), self._sharing(layout), pieces)
        return share.parameters, share.gathered

    def flops(self, checkpoint: bool, microbatch: int) -> int:
        """FLOPs of a step on one GPU."""
        passes = sum(network.training_flops(checkpoint) for network in self.networks)
        if self.cached and microbatch < self.batch:
            # A backward pass takes twice the forward pass, and checkpointing one forward pass more.
            passes += sum(network.training_flops(False) for network in self.networks) // 3
        return self.batch * passes

    def seconds(self, layout: Layout, microbatch: int) -> tuple[float, float]:
        """Shortest time, in which communication and computation overlap entirely, and longest, in which nothing does.
        Small networks wait for the host, which launches their operations one by one."""
        config, pieces = self.config, -(-self.batch // microbatch)
        flops = self.flops(layout.checkpoint, microbatch)
        wait = 0.0
        if config.gpus > 1:
            for each in self.networks:
                sent = sent_bytes(each, pieces, layout.parallel, config.gpus, config.links.local)
                wait += sent.seconds(config.links)
        if self.calibrated:
            busy = flops / self.calibrated
            return max(busy, wait), busy + wait
        low, high = (share * config.kind.peak for share in config.utilization)
        launches = pieces * sum(network.operations(layout.checkpoint) for network in self.networks)
        quick, slow = (launches * time / 1e6 for time in config.launch_time)
        return max(flops / high, quick, wait), max(flops / low, slow) + wait

    def options(self) -> list[Option]:
        """All ways to compute the step."""
        gpus, found = self.config.gpus, []
        modes = ("ddp",) if gpus == 1 else MODES if gpus > self.config.gpus_per_node else ("ddp", "fsdp")
        for layout in [Layout(mode, checkpoint) for mode in modes for checkpoint in (False, True)]:
            try:
                found.append(self._option(layout))
            except InputError:  # these networks cannot be sharded
                continue
        return found

    def _option(self, layout: Layout) -> Option:
        def total(size: int, exact: bool) -> int:
            return self.memory(layout, size, exact).total

        fitting = largest_that_fits(self.batch, total, self.config.usable)
        size = fitting or 1
        return Option(layout, size, self.memory(layout, size), fitting > 0, self.seconds(layout, size))

    def chosen(self, found: Sequence[Option]) -> Option:
        """The fastest of those that fit with a micro-batch of ``ENOUGH`` images, else the one with the largest
        micro-batch. InputError if none fits."""
        fitting = [option for option in found if option.fits]
        if not fitting:
            least = min(found, key=lambda option: option.memory.total)
            raise InputError(
                f"not even one image at a time fits: it takes {least.memory.total / 2**30:,.1f} GiB on each of "
                f"{self.config.gpus} GPUs with --parallel {least.layout.parallel} and activation checkpointing; use "
                "more --gpus, a --gpu with more memory, or a smaller network"
            )
        enough = [option for option in fitting if option.microbatch >= min(self.batch, ENOUGH)]
        if enough:
            return min(enough, key=lambda option: sum(option.seconds))
        return max(fitting, key=lambda option: (option.microbatch, -sum(option.seconds)))


def largest_that_fits(batch: int, memory: Callable[[int, bool], int], usable: float) -> int:
    """The largest power of two, or ``batch`` itself, with ``memory(microbatch, exact) <= usable``; 0 = none.

    memory grows with its first argument; inexact, it may be too low, never too high.
    """
    sizes = sorted({batch, *(2**i for i in range(batch.bit_length()) if 2**i <= batch)}, reverse=True)
    for size in sizes:
        if memory(size, False) <= usable and memory(size, True) <= usable:
            return size
    return 0
