"""Two kinds of samples in turn: those to learn, and others that keep what a network knows already."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from ..batch import Batch
from .loader import Loader


@dataclass(frozen=True)
class BothCollections:
    """The shards of both, for what identifies the data. See ``Collection``."""

    shards: list
    counts: list[int]


def are_prior(positions, half: int):
    """Whether the samples at positions of the run, an int or a tensor, are regularization images, where ``half`` of a
    global batch are."""
    return positions % (2 * half) >= half


class MixedLoader:
    """Batches whose first half are the samples of ``own``, with weight 1, and whose second half those of ``prior``,
    with weight ``prior_weight``: as with one loader, the positions determine all, and the number of processes nothing.

    own, prior: loaders of half the batch size each, with the same rank and world size.

    ``samples`` is twice the epoch of ``own``. Otherwise as ``Loader``.
    """

    def __init__(self, own: Loader, prior: Loader, prior_weight: float):
        self.own, self.prior, self.prior_weight = own, prior, prior_weight
        self.half = own.batch_size * own.world_size  # of a global batch
        self.samples = 2 * own.samples
        both = own.collection, prior.collection
        self.collection = BothCollections(
            [shard for each in both for shard in each.shards], [count for each in both for count in each.counts]
        )

    def batches(self, position: int, should_stop: Callable[[], bool] = lambda: False) -> Iterator[Batch]:
        with contextlib.ExitStack() as stack:
            both = [loader.batches(position // 2, should_stop) for loader in (self.own, self.prior)]
            for source in both:
                stack.enter_context(contextlib.closing(source))  # type: ignore[type-var]  # a generator
            for pair in zip(*both, strict=False):  # they end early where the run is to stop
                yield self._mixed(*pair)

    def batch_at(self, positions: Sequence[int]) -> Batch:
        """The samples at any positions, those of ``own`` first."""
        places = [self._place(position) for position in positions]
        own, prior = ([i for is_prior, i in places if is_prior == kind] for kind in (False, True))
        return self._mixed(self.own.batch_at(own) if own else None, self.prior.batch_at(prior) if prior else None)

    def first(self, count: int) -> Batch:
        """The first samples of ``own``."""
        return self.own.first(count)

    def first_captions(self, count: int) -> list[str]:
        return self.own.first_captions(count)

    def describe(self, position: int) -> str:
        is_prior, i = self._place(position)
        return (self.prior if is_prior else self.own).describe(i)

    def _place(self, position: int) -> tuple[bool, int]:
        """Whether a sample is one of ``prior``, and its position there."""
        batch, place = divmod(position, 2 * self.half)
        return are_prior(position, self.half), batch * self.half + place % self.half

    def _mixed(self, own: Batch | None, prior: Batch | None) -> Batch:
        parts = []
        for batch, start, weight in ((own, 0, 1.0), (prior, self.half, self.prior_weight)):
            if batch is not None:
                index = batch.index + batch.index // self.half * self.half + start
                weights = torch.full((len(batch),), weight, device=batch.images.device)
                parts.append(replace(batch, index=index, weight=weights))
        return Batch.concat(parts)
