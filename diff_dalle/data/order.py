"""Which sample is at position i: a pure function of the seed, so that one integer is the whole state of the data.

An epoch visits every sample once. Its shards are permuted; ``window`` consecutive ones form a window, whose samples
are permuted together; the windows one after another are the epoch's sequence. The sequence is cut into ``streams``
contiguous pieces, and position p of the epoch is the next sample of piece p mod ``streams``. So each piece reads its
shards nearly in order, and rank r of R, which takes every R-th position, reads only pieces that are its own.
Neither the number of processes nor that of workers appears here: neither changes what position i is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..errors import InputError
from ..randomness import permutation
from .lru_cache import LRUCache


class Order:
    """The order of samples over all epochs.

    counts:  [shards] how many samples each shard has.
    seed:    the run's seed.
    streams: pieces of the epoch that are read side by side.
    window:  shards whose samples are mixed; the reach of the shuffling, its memory and how much is read at once.
    shuffle: False keeps the shards and the samples in them in order, the same in every epoch.
    """

    def __init__(
        self, counts: Sequence[int] | np.ndarray, seed: int, streams: int = 8, window: int = 4, shuffle: bool = True
    ):
        if streams < 1 or window < 1:
            raise InputError(f"--streams is {streams} and --shuffle_window {window}, but both must be at least 1")
        self.counts = np.asarray(counts, dtype=np.int64)
        self.samples = int(self.counts.sum())
        if self.samples == 0:
            raise InputError("there are no samples to put in order")
        self.seed, self.streams, self.window, self.shuffle = seed, streams, window, shuffle
        lengths = (self.samples - np.arange(streams) + streams - 1) // streams  # of the pieces: as even as can be
        self._starts = np.cumsum(lengths) - lengths
        self._epochs: LRUCache[tuple[np.ndarray, np.ndarray]] = LRUCache(2)  # one ends while the next begins
        self._mixes: LRUCache[np.ndarray] = LRUCache(2 * streams)  # of each piece, the window it leaves and the next

    def check_world_size(self, world_size: int):
        """InputError unless the streams can be dealt evenly to that many processes."""
        if self.streams % world_size and world_size % self.streams:
            raise InputError(
                f"--streams is {self.streams}, which neither divides the number of processes ({world_size}) nor is "
                f"a multiple of it; --streams {world_size} is (it changes the order of the samples)"
            )

    def sample_at(self, position: int) -> tuple[int, int]:
        """The shard at ``position`` (counted from the start of training) and the sample's number in it."""
        shard, member = self.samples_at([position])
        return int(shard[0]), int(member[0])

    def samples_at(self, positions: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """``sample_at`` for many positions at once: two int64 arrays."""
        epochs, places = np.divmod(np.asarray(positions, dtype=np.int64), self.samples)
        sequence = self._starts[places % self.streams] + places // self.streams
        shards, members = np.empty_like(places), np.empty_like(places)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            shards[here], members[here] = self._in_epoch(epoch, sequence[here])
        return shards, members

    def _in_epoch(self, epoch: int, sequence: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        shards, ends = self._epochs.get(epoch, lambda: self._shards(epoch))
        rank = np.searchsorted(ends, sequence, side="right")  # of the shard in the epoch's order
        if self.shuffle:
            sequence = sequence.copy()
            windows = rank // self.window
            for window in np.unique(windows).tolist():
                first = window * self.window
                begin = ends[first - 1] if first else 0
                size = int(ends[min(first + self.window, len(ends)) - 1] - begin)
                mix = self._mixes.get((epoch, window), lambda w=window, n=size: self._mix(epoch, w, n))
                here = windows == window
                sequence[here] = begin + mix[sequence[here] - begin]
            rank = np.searchsorted(ends, sequence, side="right")
        return shards[rank], sequence - (ends[rank] - self.counts[shards[rank]])

    def _shards(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The epoch's order of shards, and where in its sequence each of them ends."""
        n = len(self.counts)
        shards = permutation(self.seed, f"order of shards {epoch}", n) if self.shuffle else np.arange(n)
        return shards, np.cumsum(self.counts[shards])

    def _mix(self, epoch: int, window: int, size: int) -> np.ndarray:
        return permutation(self.seed, f"order in window {epoch} {window}", size)
