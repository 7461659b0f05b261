"""The processes of a job, and how they exchange values. On one process every collective does nothing."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from ..config import InputError, named, redact
from .rendezvous import SINGLE, ProcessInfo

Result = TypeVar("Result")
BROADCAST_BYTES = 2**28  # of one message: backends count the elements of a message in 32 bits


def deal(node_of: Sequence[int]) -> list[int]:
    """The slot of each rank, given its node: a permutation of the ranks.

    The slots of node k are those equal to k modulo the number of nodes, so that it reads streams of its own (see
    ``data.order``). On one node, and where the nodes have different numbers of ranks, the slots are the ranks.
    """
    nodes = max(node_of) + 1
    counts, slots = [0] * nodes, []
    for node in node_of:
        slots.append(counts[node] * nodes + node)
        counts[node] += 1
    return slots if len(set(counts)) == 1 else list(range(len(node_of)))


class _Interleave(torch.autograd.Function):
    """The rows of all ranks in turn; see ``World.interleave``."""

    @staticmethod
    def forward(ctx, tensor: Tensor, rank: int, slots: Sequence[int]) -> Tensor:
        ctx.slot, ctx.size = slots[rank], len(slots)
        parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in slots]
        torch.distributed.all_gather(parts, tensor.contiguous())
        return torch.stack([parts[slots.index(slot)] for slot in range(len(slots))], 1).flatten(0, 1)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        gradient = gradient.clone(memory_format=torch.contiguous_format)  # the incoming one may be shared
        torch.distributed.all_reduce(gradient)
        return gradient[ctx.slot :: ctx.size], None, None


class World:
    """The processes of a job. Made by ``launch``; with ``size == 1`` nothing here communicates.

    node_of: the node (machine) of each rank, numbered from 0 in the order in which ranks first name them; empty = all
             on one. ``node`` is this process's own, ``nodes`` their number.
    slot:    this process's turn among those that deal out positions: it holds slot, slot + size, …
    """

    def __init__(self, place: ProcessInfo, device: torch.device, node_of: Sequence[int] = ()):
        self.rank, self.size, self.device = place.rank, place.size, device
        self.node_of = tuple(node_of) or (0,) * place.size
        self.node, self.nodes = self.node_of[self.rank], max(self.node_of) + 1
        self._slots = deal(self.node_of)
        self.slot = self._slots[self.rank]

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def barrier(self) -> None:
        if self.size > 1:
            torch.distributed.barrier()

    def broadcast(self, value=None):
        """Rank 0's ``value``, a plain Python value of any size, on every rank."""
        if self.size == 1:
            return value
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8) if self.is_main else torch.empty(0)
        length = torch.tensor([len(data)])
        torch.distributed.broadcast(length, src=0)
        if not self.is_main:
            data = torch.empty(int(length), dtype=torch.uint8)
        for piece in data.split(BROADCAST_BYTES):
            torch.distributed.broadcast(piece, src=0)
        return value if self.is_main else pickle.loads(data.numpy().data)  # from our own rank 0, not from a file

    def together(self, call: Callable[[], Result]) -> Result:
        """What ``call()`` returns on this rank; every rank calls it. InputError on all, of the kind that one of them
        met."""
        problem = None
        try:
            found = call()
        except InputError as error:
            problem = error
        for rank, other in enumerate(self.gather(problem)):
            if other is not None:
                text = other.message(named)
                raise problem or type(other)(f"rank {rank}: {text}" if rank else text)
        return found

    def on_main(self, call: Callable[[], object]) -> None:
        """``call()`` on rank 0. InputError on every rank when it raises one there."""
        self.together(call if self.is_main else lambda: None)

    def gather(self, value) -> list:
        """Every rank's ``value`` in rank order, on every rank."""
        if self.size == 1:
            return [value]
        values: list = [None] * self.size
        torch.distributed.all_gather_object(values, value)
        return values

    def interleave(self, tensor: Tensor) -> Tensor:
        """[N, …] of every rank → [N·size, …] in order of position (each rank holds slot, slot + size, …).

        The gradient comes back to the rank that sent the value, summed over all ranks.
        """
        return tensor if self.size == 1 else _Interleave.apply(tensor, self.rank, self._slots)

    def maximum(self, tensor: Tensor) -> Tensor:
        """``tensor``, overwritten with the largest value of any rank. Does not wait for a GPU."""
        if self.size > 1:
            torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MAX)
        return tensor

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return bool(self.maximum(torch.tensor(float(flag))))

    def broadcast_tensor(self, tensor: Tensor) -> None:
        """Overwrite ``tensor``, of the same shape and dtype on every rank, with rank 0's values."""
        if self.size > 1:
            torch.distributed.broadcast(tensor, src=0)

    def print(self, *words) -> None:
        """Print on rank 0 only, without the secrets that paths may carry."""
        if self.is_main:
            print(redact(" ".join(map(str, words))), flush=True)


ALONE = World(SINGLE, torch.device("cpu"))  # a process that shares its work with no other


class Vote:
    """Votes among all ranks, one after another; the communication overlaps with the work between cast and answer."""

    def __init__(self, world: World):
        self.world = world
        self.ballot = torch.zeros(1, dtype=torch.int64)
        self.work: torch.distributed.Work | None = None

    def cast(self, value: int) -> None:
        """Begin a vote; every rank casts a number."""
        self.ballot.fill_(value)
        if self.world.size > 1:
            self.work = torch.distributed.all_reduce(self.ballot, torch.distributed.ReduceOp.MAX, async_op=True)

    def answer(self) -> int:
        """The largest number that any rank has cast: the same on every rank."""
        if self.work is not None:
            self.work.wait()
        return int(self.ballot)
