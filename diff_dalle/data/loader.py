"""Shards → batches, in the order of ``order.py``, prepared by worker processes."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.util import Finalize

import numpy as np
import torch
from torch.utils.data import DataLoader

from ..batch import Batch, Conditioning
from ..config import option
from ..errors import InputError, quantity
from ..images.decode import MAX_PIXELS
from .buckets import BucketOrder, Buckets
from .captions import caption_kind, caption_option
from .collection import collect
from .order import Order
from .samples import Chunk, Recipe, Samples
from .shards import CACHE_BYTES, ShardFiles
from .spec import SampleSpec

CHUNK = 32  # samples that a worker prepares at a time: all workers share a large batch
FEW_BROKEN = 20  # broken samples that are tolerated, whatever fraction they are
GRACE_SECONDS = 30  # between Slurm's SIGTERM and its SIGKILL
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DataConfig:
    """Data"""

    data_dir: tuple[str, ...] = option(
        (),
        "shards of images and captions: one or several folders (searched recursively), tars, globs, brace ranges, URLs "
        "(http, s3, gs, az), pipe:COMMAND, or expand:pipe:COMMAND for its brace ranges",
        free=True,  # checkpoints know the shards themselves
    )
    caption_field: str = caption_option()
    random_crop: bool = option(False, "random crop, 80–100 % of the shorter side, instead of a center crop")
    random_flip: bool = option(
        False, "horizontal flip, p = 0.5; unsuitable where captions mention left or right, or images show text"
    )
    exact_decode: bool = option(
        False, "decode jpegs at full size: slower, pixels equal to Guided-Diffusion's instead of close (45 dB)"
    )
    max_pixels: int = option(MAX_PIXELS, "maximum width × height of an image; larger ones count as broken")
    max_broken: float = option(
        0.02, "maximum fraction of broken samples, which are replaced; the run stops above it", free=True
    )
    streams: int = option(8, "interleaved streams of an epoch; a multiple or a divisor of the number of processes")
    shuffle_window: int = option(4, "shards of a stream whose samples are shuffled together")
    num_workers: int = option(2, "data workers per training process; 0 = load in the training process", free=True)
    prefetch: int = option(4, "batches prepared in advance by all workers together", free=True)
    worker_start: str = option(
        "default", "start method of workers", free=True, choices=("default", "fork", "spawn", "forkserver")
    )
    index_cache: str = option(
        "", "folder for the index of the shards; empty = beside the shards, else in the user's cache", free=True
    )
    copy_shards: bool = option(False, "copy remote shards as a whole instead of reading by range requests", free=True)
    shard_cache: str = option("", "folder for copies of remote shards; empty = the user's cache", free=True)
    shard_cache_gb: float = option(CACHE_BYTES / 1e9, "maximum size of shard_cache in GB (10^9 bytes)", free=True)

    def __post_init__(self):
        least = {"max_pixels": 1, "streams": 1, "shuffle_window": 1, "num_workers": 0, "prefetch": 1}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise InputError(f"--{name} is {getattr(self, name)}, but must be at least {bound}")
        if not 0 <= self.max_broken <= 1:
            raise InputError(f"--max_broken is {self.max_broken}, but must be a fraction between 0 and 1")
        caption_kind(self.caption_field)


class _Positions:
    """DataLoader's batch sampler: the positions of one rank's samples, chunk by chunk, without end."""

    def __init__(self, start: int, batch_size: int, rank: int, world_size: int):
        self.start, self.batch_size, self.rank, self.world_size = start, batch_size, rank, world_size

    def __iter__(self) -> Iterator[list[int]]:
        start = self.start
        while True:
            mine = start + self.rank + self.world_size * np.arange(self.batch_size)
            for i in range(0, self.batch_size, CHUNK):
                yield mine[i : i + CHUNK].tolist()
            start += self.batch_size * self.world_size


def _collate(chunk):
    """DataLoader's collate function: a chunk is complete already."""
    return chunk


def _start_worker(worker: int):
    """Let the training process decide when to stop: a signal sent to the whole job must not end its workers first, and
    an ended worker must not look like a failed one. So SIGTERM takes effect with a delay."""
    # At its end a spawned process would unload torch's libraries one by one, which may abort.
    Finalize(None, os._exit, args=(0,), exitpriority=-100)  # after its queue has been emptied
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "SIGALRM"):
        signal.signal(signal.SIGALRM, _leave)
        signal.signal(signal.SIGTERM, _leave_later)


def _leave(*_):
    os._exit(0)


def _leave_later(*_):
    signal.alarm(signal.alarm(0) or GRACE_SECONDS)  # a second signal does not prolong it


@contextlib.contextmanager
def _ended_in_time(source) -> Iterator[None]:
    """End the workers with the block, or with the program. Raises InputError when a worker died.

    Left to the garbage collector (the traceback of an error may hold ``source`` until then), DataLoader's queues are
    closed first, and it then waits for workers that it can no longer tell to end.
    """
    atexit.register(source._shutdown_workers)
    try:
        yield
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        reason = str(error).splitlines()[0]
        raise InputError(f"a data worker died: {reason} (out of memory? lower --num_workers or --prefetch)") from error
    finally:
        atexit.unregister(source._shutdown_workers)
        with contextlib.suppress(RuntimeError):  # a worker that dies now does no harm
            source._shutdown_workers()


class Loader:
    """Batches of training samples, in an order that the seed and the position determine.

    spec:       what a sample must hold; nothing else is read.
    batch_size: samples per process and step. rank, world_size: this process among those that share the batches.
    shuffle:    False = in the order of the shards.
    sources:    shards to read instead of ``config.data_dir``; ``flag`` is their name in messages.
    device:     device of the batches.
    buckets:    the image size of every sample; batches then have the sizes of ``BucketOrder``. None = all images have
                the size of ``spec.image``.

    ``samples`` is the length of an epoch. ``seen`` counts the samples this process has looked at, ``broken`` the
    broken ones among them, ``rejected`` those that filters rejected, by the filter's name.
    Raises InputError when there are no usable samples, or the spec does not fit the buckets.
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
        sources: Sequence[str] | None = None,
        flag: str = "--data_dir",
        device: torch.device | str = "cpu",
        buckets: Buckets | None = None,
    ):
        self.config, self.spec, self.batch_size = config, spec, batch_size
        self.rank, self.world_size = rank, world_size
        self.device = torch.device(device)
        sources = config.data_dir if sources is None else sources
        files = ShardFiles(config.shard_cache, int(config.shard_cache_gb * 1e9), config.copy_shards)
        remembered = 2 * config.streams * config.shuffle_window  # per stream: its window and the next
        required = spec.required(config.caption_field)
        self.collection = collect(sources, required, files, config.index_cache, flag, remembered, spec.sidecars.items())
        self.order = self._order(buckets, seed, shuffle)
        self.order.check_world_size(world_size)
        self.samples = self.order.samples
        recipe = Recipe(
            spec=spec,
            seed=seed,
            caption_field=config.caption_field,
            random_crop=config.random_crop,
            random_flip=config.random_flip,
            exact_decode=config.exact_decode,
            max_pixels=config.max_pixels,
        )
        self.dataset = Samples(self.collection, self.order, recipe)
        self.seen = self.broken = 0
        self.rejected: Counter[str] = Counter()
        self._reasons: dict[tuple[int, int], str] = {}  # of the broken samples met; each is named in the log once

    def _order(self, buckets: Buckets | None, seed: int, shuffle: bool) -> Order | BucketOrder:
        streams, window = self.config.streams, self.config.shuffle_window
        if buckets is None:
            return Order(self.collection.counts, seed, streams, window, shuffle)
        buckets.check_counts(self.collection.counts)
        if self.spec.image and self.spec.image.window:
            for size in buckets.sizes:
                self.spec.image.window.check_size(size)
        return BucketOrder(buckets, seed, self.batch_size * self.world_size, streams, window, shuffle)

    def batches(self, position: int) -> Iterator[Batch]:
        """This rank's part of consecutive global batches from ``position`` on, without end.

        Batch k holds the samples at position + (k · batch_size + j) · world_size + rank for j = 0 … batch_size-1.
        Workers end when the iterator is closed. Raises InputError when too many samples are broken, a worker dies, or,
        with buckets, ``position`` is not a multiple of the global batch size.
        """
        if isinstance(self.order, BucketOrder):
            self.order.check_position(position)
        config, chunks = self.config, -(-self.batch_size // CHUNK)
        workers: dict = {}
        if config.num_workers:
            workers = {
                "num_workers": config.num_workers,
                "prefetch_factor": max(2, -(-config.prefetch * chunks // config.num_workers)),
                "worker_init_fn": _start_worker,
                "multiprocessing_context": None if config.worker_start == "default" else config.worker_start,
            }
        source = iter(
            DataLoader(
                self.dataset,
                batch_sampler=_Positions(position, self.batch_size, self.rank, self.world_size),
                collate_fn=_collate,
                pin_memory=self.device.type == "cuda",
                generator=torch.Generator(),  # its draws have no effect here, but must not come from the global one
                **workers,
            )
        )
        with _ended_in_time(source) if config.num_workers else contextlib.nullcontext():
            while True:
                yield self._batch([next(source) for _ in range(chunks)])

    def batch_at(self, positions: Sequence[int]) -> Batch:
        """The samples at any positions, with buckets of one size, prepared in this process."""
        return self._batch([self.dataset.chunk(list(positions))])

    def describe(self, position: int) -> str:
        """``shard : key`` of the sample at ``position``, for messages."""
        return self.collection.describe(*self.order.sample_at(position))

    def _batch(self, parts: Sequence[Chunk]) -> Batch:
        for part in parts:
            if part.failure:
                raise InputError(part.failure)
            self._count(part)
        index = torch.cat([part.index for part in parts])
        pixels = torch.cat([part.images.to(self.device, non_blocking=True) for part in parts])
        cond = {
            name: torch.cat([part.cond[name].to(self.device, non_blocking=True) for part in parts])
            for name in parts[0].cond
        }
        return Batch(pixels.permute(0, 3, 1, 2).float().div_(127.5).sub_(1.0), Conditioning.of(cond), index)

    def _count(self, part: Chunk):
        """Count and log broken and rejected samples. Raises InputError when too many are broken."""
        for name, (count, reason) in part.rejected.items():
            before, after = self.rejected[name], self.rejected[name] + count
            self.rejected[name] = after
            if len(str(after)) > len(str(before)) or before == 0:  # the first, and then every power of ten
                log.warning(
                    "the filter %r has rejected %s so far; the last: %s", name, quantity(after, "sample"), reason
                )
        self.seen += len(part.index) + sum(count for count, _ in part.rejected.values())
        self.broken += len(part.broken)
        for bad in part.broken:
            if (bad.shard, bad.member) not in self._reasons:
                self._reasons[bad.shard, bad.member] = bad.reason
                log.warning("replaced %s: %s", self.collection.describe(bad.shard, bad.member), bad.reason)
        if self.broken > max(FEW_BROKEN, self.config.max_broken * self.seen):
            latest = list(self._reasons.items())[-3:]
            named = "; ".join(f"{self.collection.describe(*place)}: {reason}" for place, reason in latest)
            raise InputError(
                f"{self.broken:,} of {quantity(self.seen, 'sample')} are broken, more than --max_broken "
                f"{self.config.max_broken} allows: {named}"
            )
