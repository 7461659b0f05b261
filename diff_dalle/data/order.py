"""The order of samples: a pure function of seed and position, so that one integer is the whole state of the data.

An epoch visits every sample once. Its shards are permuted; ``window`` consecutive shards form a window, whose samples
are permuted together; the windows in succession are the epoch's sequence. The sequence is cut into ``streams``
contiguous parts, and position p of the epoch is the next sample of stream p mod ``streams``. So each stream reads its
shards nearly in order. The order does not depend on the number of processes or workers.

Each process takes every W-th position, so it reads the streams that are its own number modulo the greatest common
divisor of W and ``streams``. The numbers of a node's processes are equal modulo the number of nodes (``World.slot``).
When that divides ``streams``, as ``streams_for`` sees to, every stream is read on one node, and so is every shard,
except those of the windows that two streams share.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from ..config import Fault, InputError
from ..randomness import permutation, random_uniform
from .lru_cache import LRUCache

STREAMS = 8  # at least; enough for workers to read from several disks or servers at a time


def streams_for(nodes: int) -> int:
    """The number of streams for a new run on that many nodes: the first multiple of ``nodes`` from 8 on."""
    return -(-STREAMS // nodes) * nodes


def windows_kept(streams: int, processes: int) -> int:
    """The windows that each of ``processes`` processes needs at a time: of every stream it reads one, and the next."""
    return 2 * streams // math.gcd(streams, processes)


Places = tuple[np.ndarray, np.ndarray]  # shards, and numbers in them


class SampleOrder(ABC):
    """An order of samples over all epochs: the sample at every position.

    samples: the length of an epoch. Raises InputError when it is 0.
    """

    def __init__(self, samples: int):
        if samples == 0:
            raise InputError("there are no samples to put in order")
        self.samples = samples

    def sample_at(self, position: int) -> tuple[int, int]:
        """The shard of the sample at ``position`` (samples since the start of training) and its number in the shard."""
        shard, member = self.samples_at([position])
        return int(shard[0]), int(member[0])

    @abstractmethod
    def samples_at(self, positions: Sequence[int] | np.ndarray) -> Places:
        """``sample_at`` for many positions: two int64 arrays."""

    @abstractmethod
    def successors(self, position: int, first: int, count: int) -> Places:
        """The samples that may replace the one at ``position``: ``count`` of them; first: 1 = from the next one on."""


class Order(SampleOrder):
    """The order of samples over all epochs.

    counts:  [shards] the number of samples of each shard.
    seed:    the run's seed.
    streams: interleaved streams of an epoch.
    window:  shards whose samples are shuffled together; memory and open shards grow with it.
    shuffle: False = every epoch visits the shards, and the samples in them, in the given order.
    resample: draw the shards of an epoch with replacement, all with equal chance, until they have as many samples as
             all shards together; needs ``shuffle``.
    processes: those that take turns at the positions. Memory falls with it; the order does not depend on it.

    Raises InputError when there are no samples.
    """

    def __init__(
        self,
        counts: Sequence[int] | np.ndarray,
        seed: int,
        streams: int,
        window: int,
        shuffle: bool = True,
        resample: bool = False,
        processes: int = 1,
    ):
        InputError.check(
            Fault(name, "must be at least 1", value)
            for name, value in {"streams": streams, "shuffle_window": window}.items()
            if value < 1
        )
        self.counts = np.asarray(counts, dtype=np.int64)
        super().__init__(int(self.counts.sum()))
        self.seed, self.streams, self.window, self.shuffle = seed, streams, window, shuffle
        self.resample = resample
        lengths = (
            self.samples - np.arange(streams) + streams - 1
        ) // streams  # of the streams: they differ by at most 1
        self._starts = np.cumsum(lengths) - lengths
        self._epochs: LRUCache[Places] = LRUCache(2)  # one ends while the next begins
        self._mixes: LRUCache[np.ndarray] = LRUCache(windows_kept(streams, processes))

    def samples_at(self, positions: Sequence[int] | np.ndarray) -> Places:
        epochs, places = np.divmod(np.asarray(positions, dtype=np.int64), self.samples)
        sequence = self._starts[places % self.streams] + places // self.streams
        shards, members = np.empty_like(places), np.empty_like(places)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            shards[here], members[here] = self._in_epoch(epoch, sequence[here])
        return shards, members

    def successors(self, position: int, first: int, count: int) -> Places:
        """Those after the one at ``position`` in its stream. Without shuffling, where the stream of later epochs may
        repeat the same samples, the neighboring streams follow when all of these have had their turn."""
        steps = np.arange(first, first + count)
        rounds = 0 if self.shuffle else steps // (self.samples // math.gcd(self.samples, self.streams))
        return self.samples_at(position + self.streams * steps + rounds)

    def _in_epoch(self, epoch: int, sequence: np.ndarray) -> Places:
        shards, ends = self._epochs.get(epoch, lambda: self._shards(epoch))
        number = np.searchsorted(ends, sequence, side="right")  # of the shard in the epoch's order
        if self.shuffle:
            sequence = sequence.copy()
            windows = number // self.window
            for window in np.unique(windows).tolist():
                first = window * self.window
                begin = ends[first - 1] if first else 0
                size = int(ends[min(first + self.window, len(ends)) - 1] - begin)
                mix = self._mixes.get((epoch, window), functools.partial(self._mix, epoch, window, size))
                here = windows == window
                sequence[here] = begin + mix[sequence[here] - begin]
            number = np.searchsorted(ends, sequence, side="right")
        return shards[number], sequence - np.where(number > 0, ends[number - 1], 0)

    def _shards(self, epoch: int) -> Places:
        """The epoch's order of shards, and the end of each in the epoch's sequence."""
        n = len(self.counts)
        if self.resample:
            return self._drawn_shards(epoch)
        shards = permutation(self.seed, f"order of shards {epoch}", n) if self.shuffle else np.arange(n)
        return shards, np.cumsum(self.counts[shards])

    def _drawn_shards(self, epoch: int) -> Places:
        """``_shards`` with replacement: of the last one as many samples as there is room for."""
        n, shards = len(self.counts), np.empty(0, dtype=np.int64)
        while self.counts[shards].sum() < self.samples:
            places = np.arange(len(shards), len(shards) + n)
            drawn = random_uniform(self.seed, f"draw of shards {epoch}", places) * n
            shards = np.concatenate([shards, drawn.astype(np.int64)])
        ends = np.minimum(np.cumsum(self.counts[shards]), self.samples)
        last = int(np.searchsorted(ends, self.samples)) + 1
        return shards[:last], ends[:last]

    def _mix(self, epoch: int, window: int, size: int) -> np.ndarray:
        return permutation(self.seed, f"order in window {epoch} {window}", size)
