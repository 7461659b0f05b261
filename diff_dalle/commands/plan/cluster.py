"""GPUs, the links between them, and what a training step sends over these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from ...models.sharded_cost import Shapes


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


def sent_bytes(shapes: Sequence[Shapes], parameters: int, pieces: int, mode: str, gpus: int, local: int) -> Traffic:
    """Of a ring of n, an all-gather or reduce-scatter of b bytes sends b·(n-1)/n, an all-reduce twice that. On several
    nodes there are two levels: each GPU of a node exchanges its share with those of its place in other nodes, over a
    link of its own, and then all within the node. Gradients are exchanged in fp32, weights of blocks gathered in bf16
    and the others in fp32, twice for each micro-batch.

    shapes: see ``shapes_of``; not needed for ddp. pieces: micro-batches of a step. local: GPUs of a node.
    """

    def ring(size: float, n: int) -> float:
        return size * (n - 1) / n

    whole, local = 4 * parameters, min(local, gpus)
    nodes = gpus // local
    if mode == "ddp":
        return Traffic(2 * ring(whole, local), 2 * ring(whole / local, nodes))
    *blocks, rest = (sum(map(prod, block)) for block in shapes)
    sent = 2 * pieces * (2 * sum(blocks) + 4 * rest) + whole
    if mode == "fsdp":
        return Traffic(ring(sent, local), ring(sent / local, nodes))
    return Traffic(ring(sent, local), 2 * ring(whole / local, nodes))
