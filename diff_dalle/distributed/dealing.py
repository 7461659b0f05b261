"""Work on whole matrices, dealt out among the ranks that hold them, each all of every matrix or some rows of it."""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .parallel import is_sharded
from .world import World

LIMIT = 2**24  # numbers of the matrices that a rank works on in one turn, unless one matrix has more
Shape = tuple[int, int]  # rows, columns


@functools.lru_cache
def dealt(shapes: tuple[Shape, ...], cost: Callable[[Shape], float], ranks: int, limit: int) -> list[list[list[int]]]:
    """Turns, in each of which every rank works on some of the matrices, given by their numbers: the most costly ones
    first, and each rank about as much as the others.

    It follows from the arguments alone, so that the ranks need not agree. One rank alone has all matrices of a shape,
    and of its transpose, in one turn. limit: see ``LIMIT``.
    """

    def wide(number: int) -> Shape:
        return min(shapes[number]), max(shapes[number])

    order = sorted(range(len(shapes)), key=lambda number: (-cost(wide(number)), wide(number)))
    if ranks == 1:
        return [[list(group)] for _, group in itertools.groupby(order, wide)]
    hands: list[list[list[int]]] = [[] for _ in range(ranks)]  # of each rank, by turn
    held = [limit] * ranks  # numbers in each rank's last turn
    busy = [(0.0, rank) for rank in range(ranks)]
    for number in order:
        done, rank = busy[0]
        heapq.heapreplace(busy, (done + cost(wide(number)), rank))
        size = shapes[number][0] * shapes[number][1]
        if held[rank] + size > limit:
            hands[rank].append([])
            held[rank] = 0
        hands[rank][-1].append(number)
        held[rank] += size
    return [list(turn) for turn in itertools.zip_longest(*hands, fillvalue=[])]


@dataclass(frozen=True)
class Holders:
    """The ranks that hold the same matrices: copies of them, each divided by rows into shares.

    copies: the group of the ranks that have this rank's share of any copy.
    shares: the group of the ranks that have the shares of this rank's copy.
    None = this rank alone.
    """

    copies: Any = None
    shares: Any = None

    @classmethod
    def of(cls, matrix: Tensor, world: World) -> Holders:
        """Those of a matrix that is sharded, or else whole on every rank."""
        if is_sharded(matrix):
            *copies, shares = matrix.device_mesh.get_all_groups()  # type: ignore[attr-defined]
            return cls(copies[0] if copies else None, shares)
        return cls(torch.distributed.group.WORLD if world.size > 1 else None)


class Dealing:
    """The exchange of matrices among their holders, every one of which makes it and calls its methods.

    shapes: of the whole matrices.
    cost:   of the work on a matrix of a shape, whose rows are not more than its columns; a function of a module.
    like:   a tensor of the dtype and device in which matrices and results are exchanged.
    """

    def __init__(self, shapes: Sequence[Shape], cost: Callable[[Shape], float], holders: Holders, like: Tensor):
        self.shapes, self.cost, self.holders, self.like = tuple(shapes), cost, holders, like
        self.copies, self.copy = _size_and_rank(holders.copies)
        self.shares, self.share = _size_and_rank(holders.shares)

    def results(
        self, rows: Callable[[int], Tensor], work: Callable[[Sequence[Tensor]], Sequence[Tensor]]
    ) -> Iterator[tuple[int, Tensor]]:
        """The number of each matrix, and this rank's rows of the result of ``work`` on it: the same bits in each copy.

        rows: this rank's rows of the matrix of a number.
        work: for whole matrices, results of the same shapes and dtype. Each matrix reaches it on one rank.
        """
        for hands in dealt(self.shapes, self.cost, self.copies * self.shares, LIMIT):
            starts = range(0, len(hands), self.shares)
            by_copy = [hands[start : start + self.shares] for start in starts]
            own = by_copy[self.copy][self.share]
            if self.shares == 1:
                results = work([rows(number).to(self.like.dtype) for number in own])
            else:
                results = work(self._whole(by_copy[self.copy], rows))
            if self.copies == self.shares == 1:
                yield from zip(own, results, strict=True)
                continue
            flat = self._flat(results) if self.shares == 1 else self._divided(by_copy[self.copy], results)
            numbers = [[number for hand in copy for number in hand] for copy in by_copy]
            for held, found in zip(numbers, self._copied(flat, numbers), strict=True):
                pieces = found.split([self._size(number, self.share) for number in held])
                for number, piece in zip(held, pieces, strict=True):
                    yield number, piece.view(-1, self.shapes[number][1])

    def _rows(self, number: int, share: int) -> slice:
        """Those of a matrix that a share has."""
        total = self.shapes[number][0]
        most = -(-total // self.shares)
        return slice(min(total, most * share), min(total, most * (share + 1)))

    def _size(self, number: int, share: int) -> int:
        rows = self._rows(number, share)
        return (rows.stop - rows.start) * self.shapes[number][1]

    def _bytes(self, numbers: Sequence[int], share: int) -> int:
        return self.like.element_size() * sum(self._size(number, share) for number in numbers)

    def _flat(self, pieces: Sequence[Tensor]) -> Tensor:
        return torch.cat([self.like.new_empty(0), *(piece.to(self.like.dtype).reshape(-1) for piece in pieces)])

    def _whole(self, hands: Sequence[Sequence[int]], rows: Callable[[int], Tensor]) -> list[Tensor]:
        """The matrices in this rank's hand, of which the holders of the shares send each other rows."""
        own = hands[self.share]
        found = self._sent(self._flat([rows(number) for hand in hands for number in hand]), hands, back=False)
        sizes = [self._size(number, share) for share in range(self.shares) for number in own]
        pieces = found.split(sizes)
        matrices = [torch.cat(pieces[place :: len(own)]) for place in range(len(own))]
        return [matrix.view(self.shapes[number]) for number, matrix in zip(own, matrices, strict=True)]

    def _divided(self, hands: Sequence[Sequence[int]], results: Sequence[Tensor]) -> Tensor:
        """This rank's rows of the results of all hands, one after another; the reverse of ``_whole``."""
        given = list(zip(hands[self.share], results, strict=True))
        pieces = [result[self._rows(number, share)] for share in range(self.shares) for number, result in given]
        return self._sent(self._flat(pieces), hands, back=True)

    def _sent(self, flat: Tensor, hands: Sequence[Sequence[int]], back: bool) -> Tensor:
        """What the holders of the shares have for this rank in their ``flat``: rows for the hands, or from them."""
        theirs = [self._bytes(hand, self.share) for hand in hands]
        own = [self._bytes(hands[self.share], share) for share in range(self.shares)]
        sent, received = (own, theirs) if back else (theirs, own)
        found = torch.empty(sum(received), dtype=torch.uint8, device=flat.device)  # bytes: every backend sends them
        group = self.holders.shares
        torch.distributed.all_to_all_single(found, flat.view(torch.uint8), received, sent, group=group)
        return found.view(flat.dtype)

    def _copied(self, flat: Tensor, numbers: Sequence[Sequence[int]]) -> Sequence[Tensor]:
        """What the holders of the copies have as ``flat``: this rank's rows of the matrices of these numbers."""
        if self.copies == 1:
            return [flat]
        sizes = [sum(self._size(number, self.share) for number in held) for held in numbers]
        padded = torch.cat([flat, flat.new_empty(max(sizes) - len(flat))]).view(torch.uint8)
        found = [torch.empty_like(padded) for _ in sizes]
        torch.distributed.all_gather(found, padded, group=self.holders.copies)
        return [each.view(flat.dtype)[:size] for each, size in zip(found, sizes, strict=True)]


def _size_and_rank(group: Any) -> tuple[int, int]:
    return (group.size(), group.rank()) if group else (1, 0)
