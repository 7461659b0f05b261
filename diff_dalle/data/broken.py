"""Counting broken samples, each of them once."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

import numpy as np

from ..errors import InputError, named, quantity
from .samples import Broken

FEW = 20  # broken samples that are tolerated, whatever fraction they are, until an epoch's number has been seen
NAMED = 1000  # broken samples that the log names; more are only counted
log = logging.getLogger(__name__)


class BrokenSamples:
    """The broken samples that this process has met, each counted once however often it was met: one bit per sample.

    counts:   [shards] the number of samples of each shard.
    limit:    maximum fraction of broken samples.
    describe: ``describe(shard, member)`` names a sample.
    """

    def __init__(self, counts: np.ndarray, limit: float, describe: Callable[[int, int], str]):
        self.limit, self.describe = limit, describe
        self.samples, self.count = int(counts.sum()), 0
        self._first = np.cumsum(counts) - counts
        self._met = np.zeros(-(-self.samples // 8), dtype=np.uint8)  # pages that are never touched take no memory
        self._latest: deque[str] = deque(maxlen=3)

    def add(self, broken: Broken) -> None:
        """Count and log a sample, unless it is known."""
        byte, bit = divmod(int(self._first[broken.shard]) + broken.member, 8)
        if self._met[byte] >> bit & 1:
            return
        self._met[byte] |= 1 << bit
        self.count += 1
        if self.count > NAMED:
            self._latest.append(broken.reason)
            return
        name = self.describe(broken.shard, broken.member)
        self._latest.append(f"{name}: {broken.reason}")
        log.warning("replaced %s: %s", name, broken.reason)
        if self.count == NAMED:
            log.warning("further broken samples are replaced and counted, but not named")

    def check(self, seen: int) -> None:
        """Raise InputError when too many of the ``seen`` samples are broken, counting no sample twice."""
        different = min(seen, self.samples)
        allowed = self.limit * different
        if self.count > max(FEW if seen < self.samples else 1, allowed):
            raise InputError(
                f"{self.count:,} of {quantity(different, 'sample')} are broken, more than {named('max_broken')} "
                f"{self.limit} allows: {'; '.join(self._latest)}"
            )
