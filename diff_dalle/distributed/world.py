"""The processes of a job, and how they exchange values. On one process every collective does nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import redact


@dataclass(frozen=True)
class ProcessInfo:
    """What a launcher says about this process. ``launcher`` is single, mpi, torchrun or slurm."""

    launcher: str
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


SINGLE = ProcessInfo("single")


class _Interleave(torch.autograd.Function):
    """The rows of all ranks in turn; see ``World.interleave``."""

    @staticmethod
    def forward(ctx, tensor: Tensor, rank: int, size: int) -> Tensor:
        ctx.rank, ctx.size = rank, size
        parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(size)]
        torch.distributed.all_gather(parts, tensor.contiguous())
        return torch.stack(parts, 1).flatten(0, 1)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        gradient = gradient.clone(memory_format=torch.contiguous_format)  # the incoming one may be shared
        torch.distributed.all_reduce(gradient)
        return gradient[ctx.rank :: ctx.size], None, None


class World:
    """The processes of a job. Made by ``launch``; with ``size == 1`` nothing here communicates."""

    def __init__(self, place: ProcessInfo, device: torch.device):
        self.place, self.device = place, device
        self.rank, self.size = place.rank, place.size

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def barrier(self) -> None:
        if self.size > 1:
            torch.distributed.barrier()

    def broadcast(self, value=None):
        """Rank 0's ``value``, a plain Python value or small tensors, on every rank."""
        if self.size == 1:
            return value
        box = [value]
        torch.distributed.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def gather(self, value) -> list:
        """Every rank's ``value`` in rank order, on every rank."""
        if self.size == 1:
            return [value]
        values: list = [None] * self.size
        torch.distributed.all_gather_object(values, value)
        return values

    def interleave(self, tensor: Tensor) -> Tensor:
        """[N, …] of every rank → [N·size, …] in order of position (rank r holds positions r, r + size, …).

        The gradient comes back to the rank that sent the value, summed over all ranks.
        """
        return tensor if self.size == 1 else _Interleave.apply(tensor, self.rank, self.size)

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
    """Repeated votes among all ranks, each answered one call later, so that the communication overlaps with work."""

    def __init__(self, world: World):
        self.world = world
        self.ballot = torch.zeros(1)
        self.work: torch.distributed.Work | None = None

    def cast(self, yes: bool) -> bool:
        """Whether any rank voted yes at the PREVIOUS call: the same answer on every rank."""
        if self.work is not None:
            self.work.wait()
        answer = self.ballot.item() > 0
        self.ballot = torch.tensor([float(yes)])
        self.work = torch.distributed.all_reduce(self.ballot, async_op=True) if self.world.size > 1 else None
        return answer
