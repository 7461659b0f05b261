"""Buckets: batches of several image sizes, in an order that is still a pure function of seed and position.

Every sample belongs to one bucket, every bucket has a size, and a global batch has samples of one bucket only. The
j-th batch of a bucket takes samples j·B to (j+1)·B - 1 (B = the global batch size) of that bucket's own infinite
``Order``, which visits each of its samples once per epoch. Nothing is lost at the end of an epoch: a batch may take
its first samples from one epoch and its last from the next.

The buckets take turns in proportion to their numbers of samples. Bucket b, with n_b samples, is due at the times
(j + a_b) / n_b, j = 0, 1, …, with a keyed start a_b in (0, 1]; the batches are these events in the order of their
times. After k batches the count of each bucket therefore differs from its share of k by less than 1 plus its share
of the number of buckets. The batch at any position is found directly: the counts at a time shortly before it follow
from the formula, and only the remaining events, about two per bucket, are merged. All times are exact integers.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..config import InputError
from ..images.decode import Size
from ..randomness import random_bits
from .lru_cache import LRUCache
from .order import Order, Places, SampleOrder, windows_kept

UNIT = 1 << 53  # resolution of the schedule: keyed starts are multiples of 1 / UNIT


@dataclass(frozen=True)
class Buckets:
    """The assignment of samples to image sizes.

    sizes:   (height, width) of each bucket, in pixels.
    numbers: per shard, an int array [usable samples] with the number of each sample's bucket.

    Raises InputError when a number is not that of a bucket.
    """

    sizes: tuple[Size, ...]
    numbers: tuple[np.ndarray, ...]

    def __post_init__(self):
        for shard, numbers in enumerate(self.numbers):
            if len(numbers) and numbers.dtype.kind not in "iu":
                raise InputError(f"the bucket numbers of shard {shard} are {numbers.dtype}, but must be integers")
            if len(numbers) and not 0 <= np.min(numbers) <= np.max(numbers) < len(self.sizes):
                raise InputError(
                    f"shard {shard} has samples in buckets {np.min(numbers)} to {np.max(numbers)}, but must use the "
                    f"numbers 0 to {len(self.sizes) - 1} of the given sizes"
                )

    def check_counts(self, counts: np.ndarray) -> None:
        """Raise InputError unless every usable sample has a bucket. counts: [shards] usable samples per shard."""
        lengths = [len(numbers) for numbers in self.numbers]
        if lengths != counts.tolist():
            raise InputError(
                f"the buckets are for {sum(lengths):,} samples in {len(lengths):,} shards, but there are "
                f"{counts.sum():,} in {len(counts):,}: assign a bucket to every usable sample of every shard, "
                "and to no others"
            )


class BucketOrder(SampleOrder):
    """The order of samples over all epochs, in global batches of one image size.

    buckets:      the samples, and their sizes.
    seed, streams, window, shuffle, processes: as for ``Order``.
    global_batch: samples per step of all processes together. It is part of the order; the number of processes is not.

    Raises InputError when there are no samples.
    """

    def __init__(
        self,
        buckets: Buckets,
        seed: int,
        global_batch: int,
        streams: int,
        window: int,
        shuffle: bool = True,
        processes: int = 1,
    ):
        if global_batch < 1:
            raise InputError(f"the global batch size is {global_batch}, but must be at least 1")
        # One byte per sample, not eight: this is most of the order's memory.
        self._numbers = [np.asarray(n, dtype=np.min_scalar_type(len(buckets.sizes))) for n in buckets.numbers]
        counts = np.zeros((len(buckets.sizes), len(self._numbers)), dtype=np.int64)
        for shard, numbers in enumerate(self._numbers):
            counts[:, shard] = np.bincount(numbers, minlength=len(buckets.sizes))
        super().__init__(int(counts.sum()))
        self.global_batch, self._sizes = global_batch, buckets.sizes
        # All with the same seed: they permute the shards alike, and so read the same shards at about the same time.
        self._orders = {
            b: Order(row, seed, streams, window, shuffle, processes=processes)
            for b, row in enumerate(counts)
            if row.any()
        }
        starts = random_bits(seed, "bucket schedule", range(len(counts))) >> np.uint64(11)  # UNIT = 2^53
        self._rates = {b: order.samples for b, order in self._orders.items()}
        self._starts = {b: int(starts[b]) + 1 for b in self._orders}
        self._turns: LRUCache[tuple[int, int]] = LRUCache(256)
        self._members: LRUCache[np.ndarray] = LRUCache(windows_kept(streams, processes) * window * len(self._orders))

    def check_position(self, position: int):
        """Raise InputError when a global batch does not start at ``position``."""
        if position % self.global_batch:
            raise InputError(
                f"position {position:,} is not a multiple of the global batch size {self.global_batch}: with buckets, "
                "continue with the batch size of the earlier part of the run"
            )

    def size_at(self, position: int) -> Size:
        """(height, width) of the images in the global batch that contains ``position``."""
        return self._sizes[self._turn(position // self.global_batch)[0]]

    def size_of(self, shard: int, member: int) -> Size:
        """(height, width) of the image of a sample."""
        return self._sizes[int(self._numbers[shard][member])]

    def samples_at(self, positions: Sequence[int] | np.ndarray) -> Places:
        batches, offsets = np.divmod(np.asarray(positions, dtype=np.int64), self.global_batch)
        shards, members = np.empty_like(batches), np.empty_like(batches)
        for batch in np.unique(batches).tolist():
            here = batches == batch
            bucket, turn = self._turn(batch)
            found = self._orders[bucket].samples_at(turn * self.global_batch + offsets[here])
            shards[here], members[here] = self._in_bucket(bucket, *found)
        return shards, members

    def successors(self, position: int, first: int, count: int) -> Places:
        """Those after the one at ``position`` in the order of its bucket; see ``Order.successors``."""
        batch, offset = divmod(position, self.global_batch)
        bucket, turn = self._turn(batch)
        found = self._orders[bucket].successors(turn * self.global_batch + offset, first, count)
        return self._in_bucket(bucket, *found)

    def _in_bucket(self, bucket: int, shards: np.ndarray, numbers: np.ndarray) -> Places:
        """The samples' numbers in their shards, given those among the shards' samples of a bucket."""
        members = np.empty_like(numbers)
        for shard in np.unique(shards).tolist():
            here = shards == shard
            of_bucket = self._members.get((bucket, shard), functools.partial(self._find, bucket, shard))
            members[here] = of_bucket[numbers[here]]
        return shards, members

    def _find(self, bucket: int, shard: int) -> np.ndarray:
        return np.flatnonzero(self._numbers[shard] == bucket)

    def _turn(self, batch: int) -> tuple[int, int]:
        """The bucket of a global batch, and how many batches it had before."""
        return self._turns.get(batch, lambda: self._find_turn(batch))

    def _find_turn(self, batch: int) -> tuple[int, int]:
        # In units in which a bucket's batches are due at (j · UNIT + start) / rate, ceil((t · rate - start) / UNIT) of
        # them are due before time t: for all buckets together, less than t · samples / UNIT + the number of buckets.
        time = max(0, (batch - len(self._rates)) * UNIT // self.samples)
        counts = {b: max(0, -((self._starts[b] - time * rate) // UNIT)) for b, rate in self._rates.items()}
        events = [(self._due(b, count), b, count) for b, count in counts.items()]
        heapq.heapify(events)
        for _ in range(batch - sum(counts.values())):
            _, bucket, count = events[0]
            heapq.heapreplace(events, (self._due(bucket, count + 1), bucket, count + 1))
        return events[0][1:]

    def _due(self, bucket: int, turn: int) -> int:
        """The time at which a bucket's batch is due, rounded down: it is before a whole number if and only if the exact
        time is, so these times agree with the counts above. Of equal times the lower bucket number comes first."""
        return (turn * UNIT + self._starts[bucket]) // self._rates[bucket]
