"""Shards → batches: the order of ``order.py``, made by worker processes, handed over in turn."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
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
from ..images.transforms import Window
from .captions import caption_kind
from .collection import collect
from .order import Order
from .samples import Chunk, Recipe, Samples, Tokenize
from .shard_table import Required
from .shards import ShardFiles
from .sources import find_shards

CHUNK = 32  # samples a worker makes at a time: a large batch is shared by all workers
FEW_BROKEN = 20  # so many are tolerated whatever fraction they are
GRACE_SECONDS = 30  # what Slurm leaves between SIGTERM and SIGKILL
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DataConfig:
    """Data"""

    data_dir: tuple[str, ...] = option(
        (), "shards of images and captions: a folder (with those below), a tar, a glob, a brace range, a URL "
        "(http, s3, gs, az), pipe:COMMAND, or several of these")  # fmt: skip
    caption_field: str = option("txt", "where captions are: the ending of a text member, or json:FIELD")
    random_crop: bool = option(False, "cut out a random 80 to 100 % of each image instead of its middle")
    random_flip: bool = option(False, "mirror half of the images; wrong where captions mention sides or text is seen")
    exact_decode: bool = option(
        False, "decode jpegs in full before shrinking: slower, equal to Guided-Diffusion's pixels instead of close to "
        "them (45 dB)")  # fmt: skip
    max_pixels: int = option(MAX_PIXELS, "width × height above which an image is refused")
    max_broken: float = option(0.02, "fraction of unusable samples (they are replaced) above which the run stops",
                               free=True)  # fmt: skip
    streams: int = option(
        8, "pieces of the epoch that are read side by side; it must divide the number of processes or be a multiple"
    )
    shuffle_window: int = option(4, "shards whose samples are mixed with each other within a piece")
    num_workers: int = option(2, "processes per training process that prepare batches; 0 = none, in turn", free=True)
    prefetch: int = option(4, "batches prepared ahead, by all workers together", free=True)
    worker_start: str = option("default", "how workers are started", free=True,
                               choices=("default", "fork", "spawn", "forkserver"))  # fmt: skip
    index_cache: str = option("", "folder for the index of the shards; empty = beside them, or else the user's cache",
                              free=True)  # fmt: skip
    copy_shards: bool = option(False, "copy remote shards whole instead of reading samples where they are", free=True)
    shard_cache: str = option("", "folder for copies of remote shards; empty = the user's cache", free=True)
    shard_cache_gb: float = option(20.0, "size of that folder in GB (10^9 bytes)", free=True)

    def __post_init__(self):
        least = {"max_pixels": 1, "streams": 1, "shuffle_window": 1, "num_workers": 0, "prefetch": 1}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise InputError(f"--{name} is {getattr(self, name)}, but must be at least {bound}")
        if not 0 <= self.max_broken <= 1:
            raise InputError(f"--max_broken is {self.max_broken}, but must be a fraction between 0 and 1")
        caption_kind(self.caption_field)


class _Positions:
    """The positions of one rank's samples, chunk by chunk, without end: what DataLoader calls a batch sampler."""

    def __init__(self, start: int, batch_size: int, rank: int, world_size: int):
        self.start, self.batch_size, self.rank, self.world_size = start, batch_size, rank, world_size

    def __iter__(self) -> Iterator[list[int]]:
        start = self.start
        while True:
            mine = start + self.rank + self.world_size * np.arange(self.batch_size)
            for i in range(0, self.batch_size, CHUNK):
                yield mine[i : i + CHUNK].tolist()
            start += self.batch_size * self.world_size


def _ready(chunk: Chunk) -> Chunk:
    """What DataLoader collates with: a chunk is put together already."""
    return chunk


def _start_worker(worker: int):
    """The training process decides when to stop: a signal sent to the whole job must not take its data away first,
    and an ended worker must not look like a failed one. So SIGTERM only takes effect after a while."""
    # A spawned process would end by taking down torch's libraries one by one, in which it may abort.
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
    """End the workers with the block, or with the program.

    Left to the garbage collector (an error's traceback may keep ``source`` until it comes), DataLoader's queues go
    first, and then it waits for workers that it can no longer tell to end. InputError when a worker died.
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
        with contextlib.suppress(RuntimeError):  # a worker that dies now has nothing more to give
            source._shutdown_workers()


class Loader:
    """Batches of images with captions, in an order fixed by the seed and the position alone.

    image_size:  height and width, or one number for both.
    tokenize:    ``tokenize(texts, length) -> (tokens, mask)``; None = captions are not needed and not read.
    text_length: tokens a caption is cut and padded to.
    batch_size:  samples per process. rank, world_size: this process among all that share the batches.
    num_classes: above 0, each sample's class is given, a number below it from its ``cls`` member.
    shuffle:     False = in the order of the shards.
    sources:     shards to read instead of ``config.data_dir``; ``flag`` is what messages call them.
    device:      where batches are wanted.
    window:      cut out of each image at a random place, so that batches hold squares of ``window.size`` pixels.

    ``samples`` is the length of an epoch, ``broken`` how many unusable samples this process has met so far.
    Raises InputError when there is nothing to read, or the window does not fit the images.
    """

    def __init__(
        self,
        config: DataConfig,
        image_size: int | tuple[int, int],
        tokenize: Tokenize | None = None,
        text_length: int = 48,
        seed: int = 0,
        batch_size: int = 1,
        rank: int = 0,
        world_size: int = 1,
        num_classes: int = 0,
        shuffle: bool = True,
        sources: Sequence[str] | None = None,
        flag: str = "--data_dir",
        device: torch.device | str = "cpu",
        window: Window | None = None,
    ):
        size = (image_size, image_size) if isinstance(image_size, int) else tuple(image_size)
        if window:
            window.check_size(size)
        self.config, self.batch_size, self.rank, self.world_size = config, batch_size, rank, world_size
        self.device = torch.device(device)
        field = config.caption_field if tokenize else ""
        need = Required(caption=caption_kind(field) if field else "", label="cls" if num_classes else "")
        paths = find_shards(config.data_dir if sources is None else sources, flag)
        files = ShardFiles(config.shard_cache, int(config.shard_cache_gb * 1e9), config.copy_shards)
        remembered = 2 * config.streams * config.shuffle_window  # of each stream, the window it leaves and the next
        self.collection = collect(paths, need, files, config.index_cache, flag, remembered)
        self.order = Order(self.collection.counts, seed, config.streams, config.shuffle_window, shuffle)
        self.order.check_world_size(world_size)
        self.samples = self.order.samples
        recipe = Recipe(
            size=size,
            window=window,
            seed=seed,
            caption_field=field,
            text_length=text_length,
            num_classes=num_classes,
            random_crop=config.random_crop,
            random_flip=config.random_flip,
            exact_decode=config.exact_decode,
            max_pixels=config.max_pixels,
        )
        self.dataset = Samples(self.collection, self.order, recipe, tokenize)
        self.seen = self.broken = 0
        self._reasons: dict[tuple[int, int], str] = {}  # of the broken samples met, each named in the log once

    def batches(self, position: int) -> Iterator[Batch]:
        """This rank's part of successive global batches from ``position`` on, without end.

        Batch k consists of the samples at position + (k · batch_size + j) · world_size + rank for j = 0 … batch_size-1.
        InputError when too many samples are broken or a worker dies. Workers end when the iterator is closed.
        """
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
                collate_fn=_ready,
                pin_memory=self.device.type == "cuda",
                generator=torch.Generator(),  # its draws decide nothing here, and must not come from the global one
                **workers,
            )
        )
        with _ended_in_time(source) if config.num_workers else contextlib.nullcontext():
            while True:
                yield self._batch([next(source) for _ in range(chunks)])

    def batch_at(self, positions: Sequence[int]) -> Batch:
        """The samples at any positions, made in this process."""
        return self._batch([self.dataset.chunk(list(positions))])

    def describe(self, position: int) -> str:
        """``shard : key`` of the sample at ``position``."""
        return self.collection.describe(*self.order.sample_at(position))

    def _batch(self, parts: Sequence[Chunk]) -> Batch:
        for part in parts:
            if part.failure:
                raise InputError(part.failure)
            self._count(part)
        joined = {
            name: torch.cat([getattr(part, name).to(self.device, non_blocking=True) for part in parts])
            for name in ("images", "tokens", "mask", "labels")
            if getattr(parts[0], name) is not None
        }
        images = joined.pop("images").permute(0, 3, 1, 2).float().div_(127.5).sub_(1.0)
        return Batch(images, Conditioning(**joined), torch.cat([part.index for part in parts]))

    def _count(self, part: Chunk):
        """Keep count of broken samples. InputError when they are too many."""
        self.seen += len(part.index)
        self.broken += len(part.broken)
        for bad in part.broken:
            if (bad.shard, bad.member) not in self._reasons:
                self._reasons[bad.shard, bad.member] = bad.reason
                log.warning("replaced %s: %s", self.collection.describe(bad.shard, bad.member), bad.reason)
        if self.broken > max(FEW_BROKEN, self.config.max_broken * self.seen):
            latest = list(self._reasons.items())[-3:]
            named = "; ".join(f"{self.collection.describe(*place)}: {reason}" for place, reason in latest)
            raise InputError(
                f"{self.broken:,} of {quantity(self.seen, 'sample')} cannot be used, more than --max_broken "
                f"{self.config.max_broken} allows: {named}"
            )
