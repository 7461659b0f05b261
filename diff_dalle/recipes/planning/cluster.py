"""GPUs, the links between them, what a training step sends over these, and what is assumed about all that."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from ...config import Fault, named, option, settings, shown
from ...config.bounds import MAX_BATCH, MAX_PROCESSES
from .cost import NetworkCost


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU.

    peak:   FLOP/s in bf16, dense, by its data sheet.
    memory: GiB that torch reports.
    within: bytes/s to the other GPUs of a node, in one direction, by its data sheet.
    watts:  board power by its data sheet.
    price:  US dollars per hour, what clouds asked for at the low and at the high end in 2025.
    """

    peak: float
    memory: float
    within: float
    watts: float
    price: tuple[float, float]


GPUS = {
    "b200": Gpu(2250e12, 178, 900e9, 1000, (3.5, 7.0)),
    "h200": Gpu(989e12, 139, 450e9, 700, (2.3, 5.0)),
    "h100": Gpu(989e12, 79, 450e9, 700, (1.9, 4.0)),
    "a100_80": Gpu(312e12, 79, 300e9, 400, (1.1, 2.5)),
    "a100_40": Gpu(312e12, 39, 300e9, 400, (0.9, 2.0)),
    "l40s": Gpu(362e12, 44, 32e9, 350, (0.8, 1.6)),
    "rtx4090": Gpu(165e12, 23.5, 32e9, 450, (0.3, 0.7)),
}


@dataclass(frozen=True)
class Links:
    """How fast GPUs send, in bytes/s each.

    local:   GPUs of a node, which in hsdp share one copy of the weights.
    within:  to the other GPUs of a node.
    between: to other nodes.
    """

    local: int = 8
    within: float = GPUS["h100"].within
    between: float = 50e9  # one link of 400 Gbit/s


@dataclass(frozen=True)
class Traffic:
    """Bytes that each GPU sends in a step, within its node and to others."""

    within: float = 0.0
    between: float = 0.0

    def seconds(self, links: Links) -> float:
        return self.within / links.within + self.between / links.between


def sent_bytes(network: NetworkCost, pieces: int, mode: str, gpus: int, local: int) -> Traffic:
    """Of a ring of n, an all-gather or reduce-scatter of b bytes sends b·(n-1)/n, an all-reduce twice that. On several
    nodes there are two levels: each GPU of a node exchanges its share with those of its place in other nodes, over a
    link of its own, and then all within the node. Gradients are exchanged in fp32, weights of blocks gathered in bf16
    and the others in fp32, twice for each micro-batch. Muon's updates are gathered in bf16 by those that have the same
    weights; its rows of shared matrices, each of which one GPU receives, are little beside that.

    pieces: micro-batches of a step. local: GPUs of a node.
    """

    def ring(size: float, n: int) -> float:
        return size * (n - 1) / n

    whole, local = 4 * network.parameters, min(local, gpus)
    updates, nodes = 2 * sum(map(prod, network.matrices)), gpus // local
    if mode == "ddp":
        return Traffic(ring(2 * whole + updates, local), ring((2 * whole + updates) / local, nodes))
    *blocks, rest = (sum(map(prod, block)) for block in network.shapes)
    sent = 2 * pieces * (2 * sum(blocks) + 4 * rest) + whole
    between = ring((sent if mode == "fsdp" else 2 * whole + updates) / local, nodes)
    return Traffic(ring(sent, local), between)


@settings
class PlanConfig:
    """What to plan for"""

    gpu: str = option("h100", "kind of GPU", choices=GPUS)
    gpus: int = option(8, "number of GPUs", least=1, most=MAX_PROCESSES)
    gpus_per_node: int = option(8, "GPUs of a machine", least=1, most=MAX_PROCESSES)
    gpu_memory: float = option(0.0, "memory of a GPU in GiB; 0 = that of its kind", least=0)
    reserve: float = option(0.1, "share of the memory for CUDA, its libraries and fragmentation", least=0, below=1)
    frozen_memory: float = option(0.0, "GiB per GPU for frozen networks, such as a CLIP for captions", least=0)
    global_batch: int = option(
        0, "images per step of all GPUs together; 0 = batch_size × gpus", least=0, most=MAX_BATCH
    )
    images: float = option(0.0, "number of images in the data; 0 = not known", least=0)
    sample_kb: float = option(60.0, "kilobytes of an image with its caption in the shards", above=0)
    shard_mb: float = option(250.0, "megabytes of a shard", above=0)
    decode_rate: float = option(400.0, "images per second that one worker reads and decodes", above=0)
    utilization: tuple[float, ...] = option(
        (0.25, 0.45), "share of the GPU's bf16 peak that forward and backward pass reach: LOWEST,HIGHEST", most=1
    )
    launch_time: tuple[float, ...] = option(
        (4.0, 10.0), "microseconds for the host to launch a GPU operation: LOWEST,HIGHEST"
    )
    network_speed: float = option(50.0, "GB/s from a GPU to other machines", above=0)
    power: tuple[float, ...] = option(
        (),
        "watts per GPU, with its share of machine and cooling: LOWEST,HIGHEST; none = 1.2 and 1.9 × the GPU's own",
    )
    price: tuple[float, ...] = option((), "US dollars per GPU hour: LOWEST,HIGHEST; none = those of its kind")
    budget: float = option(0.0, "US dollars to spend; 0 = no limit", least=0)
    calibrate: bool = option(
        False,
        "train for ten steps, on this machine's device and the run's data, and plan with their speed in place of "
        "utilization; the machine must be idle",
    )

    def faults(self) -> Iterator[Fault]:
        for name in ("utilization", "launch_time", "power", "price"):
            values = getattr(self, name)
            if (len(values) != 2 or not 0 < values[0] <= values[1]) and (
                values or name in ("utilization", "launch_time")
            ):
                yield Fault(name, f"is {shown(values)}, but must be LOWEST,HIGHEST, two numbers above 0")
        if self.gpus > self.gpus_per_node and self.gpus % self.gpus_per_node:
            rule = f"must be a multiple of {named('gpus_per_node')} ({self.gpus_per_node}) or at most that"
            yield Fault.of(self, "gpus", rule)
        if self.global_batch % self.gpus:
            yield Fault.of(self, "global_batch", f"must be a multiple of {named('gpus')} ({self.gpus})")

    @property
    def kind(self) -> Gpu:
        return GPUS[self.gpu]

    @property
    def links(self) -> Links:
        return Links(self.gpus_per_node, self.kind.within, self.network_speed * 1e9)

    @property
    def usable(self) -> float:
        """Bytes of a GPU's memory for tensors."""
        return (self.gpu_memory or self.kind.memory) * 2**30 * (1 - self.reserve)

    @property
    def watts(self) -> tuple[float, ...]:
        return self.power or (1.2 * self.kind.watts, 1.9 * self.kind.watts)

    @property
    def dollars(self) -> tuple[float, ...]:
        """For a GPU's hour."""
        return self.price or self.kind.price
