"""Parallelism and micro-batch that fit, and the time of a step with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...distributed.sharding_config import MODES
from ...errors import InputError
from .cluster import sent_bytes
from .config import PlanConfig
from .memory import Layout, Memory, memory_of
from .network import PlannedNetwork

ENOUGH = 8  # images of a micro-batch that use a GPU well: above it, plain data parallelism is preferred


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


def largest_that_fits(batch: int, memory: Callable[[int, bool], int], usable: float) -> int:
    """The largest power of two, or ``batch`` itself, with ``memory(microbatch, exact) <= usable``; 0 = none.

    memory grows with its first argument; inexact, it may be too low, never too high.
    """
    sizes = sorted({batch, *(2**i for i in range(batch.bit_length()) if 2**i <= batch)}, reverse=True)
    for size in sizes:
        if memory(size, False) <= usable and memory(size, True) <= usable:
            return size
    return 0


def options(
    networks: Sequence[PlannedNetwork],
    config: PlanConfig,
    batch: int,
    extra_pass: bool,
    calibrated: float | None = None,
) -> list[Option]:
    """All ways to compute a step over ``batch`` images a GPU.

    extra_pass: several micro-batches need one more forward pass (gradient caching).
    calibrated: FLOP/s that are reached here; None = those that ``config`` assumes.
    """
    found = []
    modes = MODES if config.gpus > config.gpus_per_node else [mode for mode in MODES if mode != "hsdp"]
    for mode in modes[: 1 if config.gpus == 1 else None]:
        for checkpoint in (False, True):
            layout = Layout(mode, checkpoint, config.gpus, config.gpus_per_node)
            try:
                found.append(_option(networks, layout, config, batch, extra_pass, calibrated))
            except InputError:  # these networks cannot be sharded
                continue
    return found


def _option(
    networks: Sequence[PlannedNetwork],
    layout: Layout,
    config: PlanConfig,
    batch: int,
    extra_pass: bool,
    calibrated: float | None,
) -> Option:
    frozen = round(config.frozen_memory * 2**30)

    def memory(size: int, exact: bool) -> int:
        return memory_of(networks, layout, size, batch, frozen, exact).total

    size = largest_that_fits(batch, memory, config.usable)
    own = memory_of(networks, layout, size or 1, batch, frozen)
    seconds = step_seconds(networks, layout, config, batch, size or 1, extra_pass, calibrated)
    return Option(layout, size or 1, own, size > 0, seconds)


def step_flops(
    networks: Sequence[PlannedNetwork], checkpoint: bool, batch: int, microbatch: int, extra_pass: bool
) -> int:
    """FLOPs of a step over ``batch`` images on one GPU."""
    passes = sum(network.flops(checkpoint) for network in networks)
    if extra_pass and microbatch < batch:
        # A backward pass takes twice the forward pass, and checkpointing one forward pass more.
        passes += sum(network.flops(False) for network in networks) // 3
    return batch * passes


def step_seconds(
    networks: Sequence[PlannedNetwork],
    layout: Layout,
    config: PlanConfig,
    batch: int,
    microbatch: int,
    extra_pass: bool,
    calibrated: float | None = None,
) -> tuple[float, float]:
    """Shortest time, in which communication and computation overlap entirely, and longest, in which nothing does. Small
    networks wait for the host, which launches their operations one by one."""
    flops = step_flops(networks, layout.checkpoint, batch, microbatch, extra_pass)
    low, high = (share * config.kind.peak for share in config.utilization)
    if calibrated:
        low = high = calibrated
    pieces, links = -(-batch // microbatch), config.links
    launches = pieces * sum(network.operations(layout.checkpoint) for network in networks)
    quick, slow = (0.0, 0.0) if calibrated else (launches * time / 1e6 for time in config.launch_time)
    wait = 0.0
    if layout.gpus > 1:
        for each in networks:
            sent = sent_bytes(each.shapes, each.parameters, pieces, layout.parallel, layout.gpus, links.local)
            wait += sent.seconds(links)
    return max(flops / high, quick, wait), max(flops / low, slow) + wait


def chosen(found: Sequence[Option], batch: int) -> Option:
    """The fastest of those that fit with a micro-batch of ``ENOUGH`` images, else the one with the largest micro-batch.
    InputError if none fits."""
    fitting = [option for option in found if option.fits]
    if not fitting:
        least = min(found, key=lambda option: option.memory.total)
        raise InputError(
            f"not even one image at a time fits: it takes {least.memory.total / 2**30:,.1f} GiB on each of "
            f"{least.layout.gpus} GPUs with --parallel {least.layout.parallel} and activation checkpointing; use more "
            "--gpus, a --gpu with more memory, or a smaller network"
        )
    enough = [option for option in fitting if option.microbatch >= min(batch, ENOUGH)]
    if enough:
        return min(enough, key=lambda option: sum(option.seconds))
    return max(fitting, key=lambda option: (option.microbatch, -sum(option.seconds)))
