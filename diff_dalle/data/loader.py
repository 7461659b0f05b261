"""Shards → batches, in the order of ``order.py``, prepared by worker processes."""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ..batch import Batch, Conditioning, moved
from ..config import Fault, InputError, named, quantity
from ..distributed.world import ALONE, World
from ..images.decode import require_simplejpeg
from ..images.plugins import load_plugin
from ..images.signal import from_uint8
from ..images.transforms import GROUP, Saliency
from .buckets import BucketOrder
from .collection import Collection, collect
from .filters import parse_filters
from .first_look import Findings, look
from .order import Order, SampleOrder, streams_for, windows_kept
from .samples import Broken, Chunk, Recipe, Samples
from .settings import DataConfig
from .shards import ShardFiles
from .sources import DATA_DIR
from .spec import SampleSpec
from .workers import prepared, worker_count

CHUNK = 32  # samples that a worker prepares at a time: all workers share a large batch
MANY = 8 * CHUNK  # samples at once that are worth starting workers for
FEW = 20  # broken samples that are tolerated, whatever fraction they are, until an epoch's number has been seen
NAMED = 1000  # broken samples that the log names; more are only counted
NAMED_MISSING = 20  # samples without embeddings that the log names
log = logging.getLogger(__name__)


class Loader:
    """Batches of training samples, in an order that the seed and the position determine.

    spec:       what a sample must hold; nothing else is read.
    batch_size: samples per process and step. rank, world_size: this process among those that share the batches:
                it takes every world_size-th sample from rank on. (``World.slot`` is the rank that suits its node.)
    shuffle:    False = in the order of the shards.
    augment:    False = no random crops and flips: those in the middle, and none; a window of the spec stays random.
    sources:    shards to read instead of ``config.data_dir``; ``flag`` is their name in messages.
    device:     device of the batches.
    saliency:   finds what crops should show, instead of the center or random places; see ``smart_crop``. None = what
                ``config.saliency`` names, if anything.
    world:      the processes that create their loaders together: one of them lists the shards for all.

    ``samples`` is the length of an epoch. ``seen`` counts the samples this process has looked at, ``broken`` the
    different broken ones among them, ``missing`` those without an embedding, which are skipped too and never end a run,
    ``rejected`` those that filters rejected, by the filter's name. ``findings``: what a first look at some samples
    found; None on other ranks than 0.
    Raises InputError when there are no usable samples, or the spec does not fit the settings.
    """

    def __init__(
        self,
        config: DataConfig,
        spec: SampleSpec,
        seed: int = 0,
        batch_size: int = 1,
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool = True,
        augment: bool = True,
        sources: Sequence[str] | None = None,
        flag: str = DATA_DIR,
        device: torch.device | str = "cpu",
        saliency: Saliency | None = None,
        world: World = ALONE,
    ):
        if batch_size < 1:
            raise InputError(Fault("batch_size", "must be at least 1", batch_size))
        if config.decoder == "simplejpeg":
            require_simplejpeg()
        if (saliency or config.saliency) and spec.control:
            raise InputError(Fault("saliency", "crops an image and its control differently: leave one of them out"))
        if saliency is None and config.saliency:
            saliency = load_plugin(GROUP, config.saliency, "saliency", "leave it out, to crop in the center")
        self.config, self.spec, self.batch_size = config, spec, batch_size
        self.rank, self.world_size = rank, world_size
        self.device = torch.device(device)
        self.workers = worker_count(config.num_workers, self.device, world.node_of.count(world.node))
        sources = config.data_dir if sources is None else sources
        files = ShardFiles(config.shard_cache, int(config.shard_cache_gb * 1e9), config.copy_shards, config.index_cache)
        self.streams = config.streams or streams_for(1)
        remembered = windows_kept(self.streams, world_size) * config.shuffle_window
        has_buckets = bool(config.aspect.multi_aspect_ratio)
        required = replace(
            spec.required(config.caption_field), filters=parse_filters(config.dataset_filters), sizes=has_buckets
        )
        self.findings: Findings | None = None
        self.collection = collect(sources, required, files, flag, remembered, world, partial(self._look, flag))
        self.order: SampleOrder
        if has_buckets:
            self.order = self._bucket_order(seed, shuffle, augment, world)
        else:
            resample = shuffle and config.resample
            window = config.shuffle_window
            self.order = Order(self.collection.counts, seed, self.streams, window, shuffle, resample, world_size)
        self.samples = self.order.samples
        self.dataset = Samples(self.collection, self.order, Recipe(spec, config, seed, augment, saliency))
        self.seen = 0
        self._broken = BrokenSamples(self.collection.counts, config.max_broken, self.collection.describe)
        self._missing = BrokenSamples(self.collection.counts, 1.0, self.collection.describe, NAMED_MISSING)
        self.rejected: Counter[str] = Counter()

    def _look(self, flag: str, found: Collection) -> None:
        """Look at some samples. InputError when none has what the settings name."""
        self.findings = look(found, self.spec, self.config.caption_field)
        self.findings.check(flag, self.config.caption_field)
        for line in self.findings.said():
            log.warning("%s", line)

    def _bucket_order(self, seed: int, shuffle: bool, augment: bool, world: World) -> BucketOrder:
        """The order by the bucket of every sample; rank 0 alone knows the sizes of the images."""
        aspect, image = self.config.aspect, self.spec.image
        if image is None:
            raise InputError(Fault("multi_aspect_ratio", "is set, but no images are read: leave it out"))
        table, numbers = aspect.buckets(math.prod(image.size)), None
        if image.window:
            for size in table.sizes:
                image.window.check_size(size)
        if world.is_main:
            assert self.collection.sizes is not None  # they were asked for
            numbers = table.assign(self.collection.sizes, seed, aspect.bucketeer_random_ratio if augment else 0.0)
        numbers, batch, window = world.broadcast(numbers), self.batch_size * self.world_size, self.config.shuffle_window
        return BucketOrder(table.sizes, numbers, seed, batch, self.streams, window, shuffle, self.world_size)

    def batches(self, position: int, should_stop: Callable[[], bool] = lambda: False) -> Iterator[Batch]:
        """This rank's part of consecutive global batches from ``position`` on, without end.

        Batch k holds the samples at position + (k · batch_size + j) · world_size + rank for j = 0 … batch_size-1.
        should_stop: asked several times a second while waiting for workers; the iterator ends when it returns True.

        Workers end when the iterator is closed. Raises InputError when too many samples are broken, a shard changed, a
        worker dies or delivers nothing in time, or, with buckets, ``position`` is not a multiple of the global batch
        size.
        """
        if isinstance(self.order, BucketOrder):
            self.order.check_position(position)
        step = self.batch_size * self.world_size
        starts = itertools.count(position + self.rank, step)
        return self._prepared((range(start, start + step, self.world_size) for start in starts), should_stop)

    def batches_at(self, blocks: Iterable[Sequence[int]]) -> Iterator[Batch]:
        """``batch_at`` for each block of positions, prepared by workers if there are any."""
        return self._prepared(blocks, lambda: False)

    def batch_at(self, positions: Sequence[int]) -> Batch:
        """The samples at any positions, with buckets of one size. Many are prepared by workers."""
        if self.workers and len(positions) > MANY:
            (batch,) = self._prepared([positions], lambda: False)
            return batch
        return self._batch([self.dataset.chunk(list(positions))])

    def first(self, count: int) -> Batch:
        """The first samples of the order; with buckets, of those in the bucket of the first."""
        return self.batch_at(self._first(count))

    def first_captions(self, count: int) -> list[str]:
        """The captions of ``first``, as texts; "" each when the spec asks for none."""
        return list(self.dataset.chunk(self._first(count)).captions)

    def reading_whole(self) -> Loader:
        """The same samples in the same order, read as ``SampleSpec.whole`` says."""
        found = copy.copy(self)
        found.spec = self.spec.whole
        found.collection = self.collection.reading(found.spec.required(self.config.caption_field))
        found.dataset = Samples(found.collection, self.order, replace(self.dataset.recipe, spec=found.spec))
        return found

    def _first(self, count: int) -> Sequence[int]:
        if not isinstance(self.order, BucketOrder):
            return range(count)
        size = self.order.size_at(0)
        of_size = (position for position in itertools.count() if self.order.size_at(position) == size)
        return list(itertools.islice(of_size, count))

    def _prepared(self, blocks: Iterable[Sequence[int]], should_stop: Callable[[], bool]) -> Iterator[Batch]:
        """A batch for each block, made of chunks so that all workers share a large one."""
        sizes = deque[int]()  # number of chunks of the blocks that have been begun

        def chunks() -> Iterator[list[int]]:
            for block in blocks:
                parts = [list(block[i : i + CHUNK]) for i in range(0, len(block), CHUNK)]
                sizes.append(len(parts))
                yield from parts

        prefetch = self.config.prefetch * -(-self.batch_size // CHUNK)
        pin = self.device.type == "cuda"
        with contextlib.closing(prepared(self.dataset, chunks(), self.workers, prefetch, pin, should_stop)) as source:
            for first in source:
                rest = sizes.popleft() - 1
                parts = [first, *itertools.islice(source, rest)]
                if len(parts) <= rest:  # the run is to stop
                    return
                yield self._batch(parts)

    @property
    def broken(self) -> int:
        """The number of different broken samples this process has met."""
        return self._broken.count

    @property
    def missing(self) -> int:
        """The number of different samples without an embedding that this process has met."""
        return self._missing.count

    def describe(self, position: int) -> str:
        """``shard : key`` of the sample at ``position``, for messages."""
        return self.collection.describe(*self.order.sample_at(position))

    def _batch(self, parts: Sequence[Chunk]) -> Batch:
        for part in parts:
            if part.failure:
                raise part.failure
            self._count(part)
        index = _joined([part.index for part in parts])
        pixels = _joined([part.images.to(self.device, non_blocking=True) for part in parts])
        cond = moved({name: _joined([part.cond[name] for part in parts]) for name in parts[0].cond}, self.device)
        if "control" in cond:
            cond["control"] = cond["control"].permute(0, 3, 1, 2).float() / 255
        return Batch(from_uint8(pixels), Conditioning.of(cond), index)

    def _count(self, part: Chunk):
        """Count and log broken and rejected samples. Raises InputError when too many are broken."""
        for name, count in part.lost.rejected.items():
            before = self.rejected[name]
            self.rejected[name] = after = before + count
            if len(str(after)) > len(str(before)) or before == 0:  # the first, and then every power of ten
                last, so_far = part.lost.reasons[name], quantity(after, "sample")
                log.warning("the filter %r has rejected %s so far; the last: %s", name, so_far, last)
        self.seen += len(part.index) + part.lost.rejected.total()
        for broken in part.lost.broken:
            (self._missing if broken.is_missing else self._broken).add(broken)
        self._broken.check(self.seen)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts)) if len(parts) > 1 else parts[0]


class BrokenSamples:
    """The broken samples that this process has met, each counted once however often it was met: one bit per sample.

    counts:   [shards] the number of samples of each shard.
    limit:    maximum fraction of broken samples.
    describe: ``describe(shard, member)`` names a sample.
    named:    how many of them the log names; more are only counted.
    """

    def __init__(self, counts: np.ndarray, limit: float, describe: Callable[[int, int], str], named: int = NAMED):
        self.limit, self.describe, self.named = limit, describe, named
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
        if self.count > self.named:
            self._latest.append(broken.reason)
            return
        name = self.describe(broken.shard, broken.member)
        self._latest.append(f"{name}: {broken.reason}")
        log.warning("replaced %s: %s", name, broken.reason)
        if self.count == self.named:
            what = "samples without embeddings" if broken.is_missing else "broken samples"
            log.warning("further %s are replaced and counted, but not named", what)

    def check(self, seen: int) -> None:
        """Raise InputError when too many of the ``seen`` samples are broken, counting no sample twice."""
        different = min(seen, self.samples)
        allowed = self.limit * different
        if self.count > max(FEW if seen < self.samples else 1, allowed):
            raise InputError(
                f"{self.count:,} of {quantity(different, 'sample')} are broken, more than {named('max_broken')} "
                f"{self.limit} allows: {'; '.join(self._latest)}"
            )
