"""Buckets by aspect ratio: the sizes that images are trained at, the one that each image gets, and the order of
batches, each of one size.

All sizes have about the pixels of the square, sides that are multiples of a factor, and a ratio from a list or the
reciprocal of one. An image goes to the nearest ratio; a fraction of them, the same in every epoch, to any one. It is
scaled to cover the size, no further, and cropped.

The order is still a pure function of seed and position. Every sample belongs to one bucket, every bucket has a size,
and a global batch has samples of one bucket only. The j-th batch of a bucket takes samples j·B to (j+1)·B - 1 (B = the
global batch size) of that bucket's own infinite ``Order``, which visits each of its samples once per epoch. Nothing is
lost at the end of an epoch: a batch may take its first samples from one epoch and its last from the next.

The buckets take turns in proportion to their numbers of samples. Bucket b, with n_b samples, is due at the times
(j + a_b) / n_b, j = 0, 1, …, with a keyed start a_b in (0, 1]; the batches are these events in the order of their
times. After k batches the count of each bucket therefore differs from its share of k by less than 1 plus its share
of the number of buckets. The batch at any position is found directly: the counts at a time shortly before it follow
from the formula, and only the remaining events, about two per bucket, are merged. All times are exact integers.
"""

from __future__ import annotations

import functools
import heapq
import math
import re
from collections.abc import Iterator, Sequence
from fractions import Fraction

import numpy as np

from ..config import Fault, InputError, option, settings
from ..config.bounds import MAX_SIDE
from ..images.decode import Size
from ..randomness import random_bits, random_uniform
from .lru_cache import LRUCache
from .order import Order, Places, SampleOrder, windows_kept

UNIT = 1 << 53  # resolution of the schedule: keyed starts are multiples of 1 / UNIT
_RATIO = re.compile(r"\d{1,6}(\.\d{1,9})?(/\d{1,6}(\.\d{1,9})?)?")


@settings
class AspectConfig:
    """Aspect ratios"""

    multi_aspect_ratio: tuple[str, ...] = option(
        (),
        "width / height of training images of the square's area, such as 1/1,2/3,9/16: reciprocals are added, each "
        "image takes the nearest, and each batch has one; none = squares",
    )
    bucketeer_random_ratio: float = option(
        0.05,
        "fraction of samples assigned a random aspect ratio instead",
        needs=("multi_aspect_ratio",),
        least=0,
        most=1,
    )
    bucket_factor: int = option(
        32,
        "both sides of images are multiples of this, in pixels",
        needs=("multi_aspect_ratio",),
        least=1,
        most=MAX_SIDE,
    )
    bucket_distance: str = option(
        "linear",
        "distance of two ratios: their difference, or that of their logarithms, which treats both orientations alike",
        choices=("linear", "log"),
        needs=("multi_aspect_ratio",),
    )
    bucket_crop: str = option(
        "random",
        "crop of an image resized to cover its bucket; held-out images are center-cropped",
        choices=("random", "center"),
        needs=("multi_aspect_ratio",),
    )

    def faults(self) -> Iterator[Fault]:
        known: dict[Fraction, str] = {}
        for text in self.multi_aspect_ratio:
            try:
                ratio = parse_ratio("multi_aspect_ratio", text)
            except InputError as error:
                yield from error.faults
                continue
            if ratio in known:
                yield Fault("multi_aspect_ratio", f"has {text} and {known[ratio]}, which are equal: leave one out")
            known[ratio] = text

    @property
    def crops_at_random(self) -> bool:
        return bool(self.multi_aspect_ratio) and self.bucket_crop == "random"

    def buckets(self, pixels: int) -> AspectBuckets:
        """The buckets of images with that many pixels."""
        ratios = [parse_ratio("multi_aspect_ratio", text) for text in self.multi_aspect_ratio]
        return AspectBuckets(ratios, pixels, self.bucket_factor, self.bucket_distance == "log")


def parse_ratio(setting: str, text: str) -> Fraction:
    """A ratio above 0 from a text such as 2/3 or 1.5. (Fraction itself accepts 1e999999999.)"""
    if _RATIO.fullmatch(text):
        above, _, below = text.partition("/")
        if Fraction(above) > 0 and Fraction(below or 1) > 0:
            return Fraction(above) / Fraction(below or 1)
    raise InputError(Fault(setting, f"has {text[:40]!r}, but a ratio is WIDTH/HEIGHT or a number, above 0"))


class AspectBuckets:
    """The sizes of images by their ratio, width / height.

    ratios: to which the reciprocals are added. pixels: of a square. factor: both sides are multiples of it, rounded
    down, but at least it. log: compare the logarithms of ratios.

    ``sizes``: the different (height, width), in the order of the ratios.
    """

    def __init__(self, ratios: Sequence[Fraction], pixels: int, factor: int, log: bool = False):
        self.ratios = tuple(dict.fromkeys([*ratios, *(1 / ratio for ratio in ratios)]))
        sizes = [size_of(ratio, pixels, factor) for ratio in self.ratios]
        self.sizes = tuple(dict.fromkeys(sizes))
        self._bucket_of = np.array([self.sizes.index(size) for size in sizes])
        self.log = log

    def nearest(self, images: np.ndarray) -> np.ndarray:
        """The number of each image's bucket, in ``sizes``. images: [n, 2] height and width; 0 = unknown, for a broken
        image, which counts as a square."""
        known = images.astype(np.float64)
        known[(images <= 0).any(1)] = 1
        found, ratios = known[:, 1] / known[:, 0], np.array(self.ratios, dtype=np.float64)
        if self.log:
            found, ratios = np.log(found), np.log(ratios)
        return self._bucket_of[np.abs(found[:, None] - ratios).argmin(1)]

    def assign(self, images: Sequence[np.ndarray], seed: int, random_share: float) -> tuple[np.ndarray, ...]:
        """``nearest`` of each shard's images, but for a share of them one of the ratios at random: a function of the
        seed and of an image's number among all, and the same in every epoch."""
        first, numbers = 0, []
        for each in images:
            positions = np.arange(first, first := first + len(each))
            chosen = random_uniform(seed, "random aspect ratio", positions) < random_share
            any_ratio = (random_uniform(seed, "aspect ratio", positions) * len(self.ratios)).astype(np.int64)
            numbers.append(np.where(chosen, self._bucket_of[any_ratio], self.nearest(each)))
        return tuple(numbers)


def size_of(ratio: Fraction, pixels: int, factor: int) -> tuple[int, int]:
    """Height and width of images of a ratio, width / height, with about as many pixels: multiples of ``factor``."""
    return _side(pixels / ratio, factor), _side(pixels * ratio, factor)


def _side(square: Fraction, factor: int) -> int:
    """The square root, rounded down to a multiple of ``factor``; at least that. Exact."""
    return max(1, math.isqrt(square // factor**2)) * factor


def kept_share(images: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """The part of each image that is left when it is scaled to cover a size and cropped: [n], of two [n, 2]."""
    with np.errstate(divide="ignore", invalid="ignore"):  # of broken images
        stretch = images[:, 1] * sizes[:, 0] / (images[:, 0] * sizes[:, 1])
        return np.minimum(stretch, 1 / stretch)


class BucketOrder(SampleOrder):
    """The order of samples over all epochs, in global batches of one image size.

    sizes:        (height, width) of each bucket, in pixels.
    numbers:      per shard, an int array [usable samples] with the number of each sample's bucket.
    seed, streams, window, shuffle, processes: as for ``Order``.
    global_batch: samples per step of all processes together. It is part of the order; the number of processes is not.

    Raises InputError when there are no samples.
    """

    def __init__(
        self,
        sizes: Sequence[Size],
        numbers: Sequence[np.ndarray],
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
        self._numbers = [np.asarray(each, dtype=np.min_scalar_type(len(sizes))) for each in numbers]
        counts = np.stack([np.bincount(each, minlength=len(sizes)) for each in self._numbers], 1)
        super().__init__(int(counts.sum()))
        self.global_batch, self._sizes = global_batch, sizes
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
