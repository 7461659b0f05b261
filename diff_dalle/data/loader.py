"""Shards → batches, in the order of ``order.py``, prepared by worker processes."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from ..batch import Batch, Conditioning
from ..config import faults_of, option, section, settings
from ..distributed.world import ALONE, World
from ..errors import Fault, InputError, named, quantity
from ..images.decode import DECODERS, MAX_PIXELS, PILLOW_PIXELS, SCALE
from ..images.pixels import from_uint8
from ..images.plain_jpeg import require_simplejpeg
from ..images.plugins import load_plugin
from ..images.preprocessing import TransformConfig
from ..images.smart_crop import GROUP, Saliency
from .aspect_buckets import AspectConfig
from .broken import BrokenSamples
from .buckets import BucketOrder, Buckets
from .captions import caption_kind, caption_option
from .collection import collect
from .filters import filters_option, parse_filters
from .order import Order, SampleOrder, streams_for, windows_kept
from .samples import Chunk, Recipe, Samples
from .shards import CACHE_BYTES, ShardFiles
from .sources import DATA_DIR
from .spec import SampleSpec
from .survey import Questions
from .workers import Workers, prepared

CHUNK = 32  # samples that a worker prepares at a time: all workers share a large batch
MANY = 8 * CHUNK  # samples at once that are worth starting workers for
log = logging.getLogger(__name__)


@settings
class DataConfig:
    """Data"""

    data_dir: tuple[str, ...] = option(
        (),
        "shards of images and captions: one or several folders (searched recursively), tars, globs, brace ranges, URLs "
        "(http, s3, gs, az), pipe:COMMAND, expand:pipe:COMMAND for its brace ranges, or a .yml list of these",
        free=True,  # checkpoints know the shards themselves
    )
    caption_field: str = caption_option()
    dataset_filters: tuple[str, ...] = filters_option()
    transforms: tuple[TransformConfig, ...] = option(
        (),
        "transforms of images, by torchvision's names, before the center crop at the training size; instead of "
        "random_crop",
        keyed="name",
    )
    random_crop: bool = option(False, "random crop, 80–100 % of the shorter side, instead of a center crop")
    random_flip: bool = option(
        False, "horizontal flip, p = 0.5; unsuitable where captions mention left or right, or images show text"
    )
    saliency: str = option(
        "",
        "crop around what an image shows, as a saliency map finds it: the name of an entry point in the group "
        "diff_dalle.saliency of an installed package; empty = in the center or random_crop",
    )
    exact_decode: bool = option(
        False, "decode jpegs at full size: slower, pixels equal to Guided-Diffusion's instead of close (45 dB)"
    )
    decode_scale: int = option(
        SCALE,
        "least size of a jpeg as it is decoded, relative to the size that it is downsampled to, unless exact_decode: "
        "2 = 45 dB, 1 = 41 dB and faster",
        least=1,
    )
    decoder: str = option(
        "pillow",
        "library that decodes jpegs, with the same pixels: simplejpeg is faster and needs the extra jpeg",
        choices=DECODERS,
    )
    max_pixels: int = option(MAX_PIXELS, "maximum width × height of an image; larger ones count as broken", least=1)
    max_broken: float = option(
        0.02,
        "maximum fraction of broken samples, which are replaced and counted once each; the run stops above it",
        free=True,
        least=0,
        most=1,
    )
    streams: int = option(
        0,
        "interleaved streams of an epoch, which its order depends on; 0 = 8, or the next multiple of the number of "
        "nodes, when the run starts, and the same when it resumes",
        least=0,
    )
    shuffle_window: int = option(4, "consecutive shards of an epoch whose samples are shuffled together", least=1)
    resample: bool = option(False, "draw the shards of an epoch with replacement")
    num_workers: int = option(
        2, "data workers per training process; 0 = load in the training process", free=True, least=0
    )
    prefetch: int = option(4, "batches prepared in advance by all workers together", free=True, least=1)
    data_timeout: float = option(
        1200.0, "seconds without samples from the data workers after which the run saves and stops", free=True, least=1
    )
    worker_start: str = option(
        "default", "start method of workers", free=True, choices=("default", "fork", "spawn", "forkserver")
    )
    index_cache: str = option(
        "", "folder for the index of the shards; empty = beside the shards, else in the user's cache", free=True
    )
    copy_shards: bool = option(False, "copy remote shards as a whole instead of reading by range requests", free=True)
    shard_cache: str = option("", "folder for copies of remote shards; empty = the user's cache", free=True)
    shard_cache_gb: float = option(CACHE_BYTES / 1e9, "maximum size of shard_cache in GB (10^9 bytes)", free=True)
    aspect: AspectConfig = section(AspectConfig)

    def faults(self) -> Iterator[Fault]:
        if self.max_pixels > PILLOW_PIXELS:
            yield Fault.of(self, "max_pixels", f"Pillow decodes at most {PILLOW_PIXELS}")
        for name in ("random_crop", "transforms"):
            if self.saliency and getattr(self, name):
                yield Fault("saliency", f"and {named(name)} exclude each other, since both crop images: leave one out")
        for name in ("random_crop", "random_flip"):
            if self.transforms and getattr(self, name):
                yield Fault(name, f"is a transform too: leave it out beside {named('transforms')}")
        for name in ("transforms", "random_crop", "resample"):
            if self.aspect.multi_aspect_ratio and getattr(self, name):
                yield Fault(name, f"and {named('aspect.multi_aspect_ratio')} exclude each other: leave one of them out")
        yield from faults_of(lambda: caption_kind(self.caption_field))
        yield from faults_of(lambda: parse_filters(self.dataset_filters))


class Loader:
    """Batches of training samples, in an order that the seed and the position determine.

    spec:       what a sample must hold; nothing else is read.
    batch_size: samples per process and step. rank, world_size: this process among those that share the batches:
                it takes every world_size-th sample from rank on. (``World.slot`` is the rank that suits its node.)
    shuffle:    False = in the order of the shards.
    augment:    False = no random crops and flips: those in the middle, and none; a window of the spec stays random.
    sources:    shards to read instead of ``config.data_dir``; ``flag`` is their name in messages.
    device:     device of the batches.
    buckets:    the image size of every sample; batches then have the sizes of ``BucketOrder``. None = those of
                ``config.aspect`` with the pixels of ``spec.image``, or, without aspect ratios, its size for all.
    saliency:   finds what crops should show, instead of the center or random places; see ``images.smart_crop``. None =
                the one that ``config.saliency`` names, if any.
    world:      the processes that create their loaders together: one of them lists the shards for all.

    ``samples`` is the length of an epoch. ``seen`` counts the samples this process has looked at, ``broken`` the
    different broken ones among them, ``rejected`` those that filters rejected, by the filter's name.
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
        augment: bool = True,
        sources: Sequence[str] | None = None,
        flag: str = DATA_DIR,
        device: torch.device | str = "cpu",
        buckets: Buckets | None = None,
        saliency: Saliency | None = None,
        world: World = ALONE,
    ):
        if batch_size < 1:
            raise InputError(Fault("batch_size", "must be at least 1", batch_size))
        if config.decoder == "simplejpeg":
            require_simplejpeg()
        if saliency is None and config.saliency:
            saliency = load_plugin(GROUP, config.saliency, "saliency", "leave it out, to crop in the center")
        if saliency and spec.control:
            raise InputError(Fault("saliency", "crops an image and its control differently: leave one of them out"))
        self.config, self.spec, self.batch_size = config, spec, batch_size
        self.rank, self.world_size = rank, world_size
        self.device = torch.device(device)
        sources = config.data_dir if sources is None else sources
        files = ShardFiles(config.shard_cache, int(config.shard_cache_gb * 1e9), config.copy_shards)
        self.streams = config.streams or streams_for(1)
        remembered = windows_kept(self.streams, world_size) * config.shuffle_window
        required = spec.required(config.caption_field)
        sidecars = spec.sidecars.items()
        aspect = config.aspect if buckets is None and config.aspect.multi_aspect_ratio else None
        questions = Questions(parse_filters(config.dataset_filters), sizes=aspect is not None)
        self.collection = collect(
            sources, required, files, config.index_cache, flag, remembered, sidecars, world, questions
        )
        if aspect:
            buckets = self._aspect_buckets(aspect, seed, augment, world)
        self.order = self._order(buckets, seed, shuffle)
        self.samples = self.order.samples
        recipe = Recipe(
            spec=spec,
            seed=seed,
            caption_field=config.caption_field,
            transforms=config.transforms,
            augment=augment,
            random_crop=config.random_crop,
            random_flip=config.random_flip,
            exact_decode=config.exact_decode,
            decode_scale=config.decode_scale,
            decoder=config.decoder,
            max_pixels=config.max_pixels,
            bucket_crop=aspect.bucket_crop if aspect else "center",
            saliency=saliency,
        )
        self.dataset = Samples(self.collection, self.order, recipe)
        self.seen = 0
        self._broken = BrokenSamples(self.collection.counts, config.max_broken, self.collection.describe)
        self.rejected: Counter[str] = Counter()

    def _aspect_buckets(self, aspect: AspectConfig, seed: int, augment: bool, world: World) -> Buckets:
        """The bucket of every sample; rank 0 alone knows the sizes of the images."""
        if self.spec.image is None:
            raise InputError(Fault("multi_aspect_ratio", "is set, but no images are read: leave it out"))
        table, numbers = aspect.buckets(math.prod(self.spec.image.size)), None
        if world.is_main:
            assert self.collection.sizes is not None  # they were asked for
            numbers = table.assign(self.collection.sizes, seed, aspect.bucketeer_random_ratio if augment else 0.0)
        return Buckets(table.sizes, world.broadcast(numbers))

    def _order(self, buckets: Buckets | None, seed: int, shuffle: bool) -> SampleOrder:
        streams, window = self.streams, self.config.shuffle_window
        if buckets is None:
            resample = shuffle and self.config.resample
            return Order(self.collection.counts, seed, streams, window, shuffle, resample, self.world_size)
        if self.config.resample:
            rule = "must be False, since images of several sizes are drawn without replacement"
            raise InputError(Fault("resample", rule, True))
        buckets.check_counts(self.collection.counts)
        if self.spec.image and self.spec.image.window:
            for size in buckets.sizes:
                self.spec.image.window.check_size(size)
        return BucketOrder(buckets, seed, self.batch_size * self.world_size, streams, window, shuffle, self.world_size)

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
        if self.config.num_workers and len(positions) > MANY:
            (batch,) = self._prepared([positions], lambda: False)
            return batch
        return self._batch([self.dataset.chunk(list(positions))])

    def first(self, count: int) -> Batch:
        """The first samples of the order; with buckets, of those in the bucket of the first."""
        return self.batch_at(self._first(count))

    def first_captions(self, count: int) -> list[str]:
        """The captions of ``first``, as texts; "" each when the spec asks for none."""
        return list(self.dataset.chunk(self._first(count)).captions)

    def _first(self, count: int) -> Sequence[int]:
        if not isinstance(self.order, BucketOrder):
            return range(count)
        size = self.order.size_at(0)
        of_size = (position for position in itertools.count() if self.order.size_at(position) == size)
        return list(itertools.islice(of_size, count))

    def _prepared(self, blocks: Iterable[Sequence[int]], should_stop: Callable[[], bool]) -> Iterator[Batch]:
        """A batch for each block, made of chunks so that all workers share a large one."""
        config, sizes = self.config, deque[int]()  # number of chunks of the blocks that have been begun

        def chunks() -> Iterator[list[int]]:
            for block in blocks:
                parts = [list(block[i : i + CHUNK]) for i in range(0, len(block), CHUNK)]
                sizes.append(len(parts))
                yield from parts

        prefetch = config.prefetch * -(-self.batch_size // CHUNK)
        pin = self.device.type == "cuda"
        workers = Workers(config.num_workers, prefetch, config.worker_start, config.data_timeout, pin)
        with contextlib.closing(prepared(self.dataset, chunks(), workers, should_stop)) as source:
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

    def describe(self, position: int) -> str:
        """``shard : key`` of the sample at ``position``, for messages."""
        return self.collection.describe(*self.order.sample_at(position))

    def _batch(self, parts: Sequence[Chunk]) -> Batch:
        for part in parts:
            if part.failure:
                raise part.failure
            self._count(part)
        index = _joined([part.index for part in parts])
        pixels = self._moved([part.images for part in parts])
        cond = {name: self._moved([part.cond[name] for part in parts]) for name in parts[0].cond}
        if "control" in cond:
            cond["control"] = cond["control"].permute(0, 3, 1, 2).float() / 255
        return Batch(from_uint8(pixels), Conditioning.of(cond), index)

    def _moved(self, parts: Sequence[Tensor]) -> Tensor:
        return _joined([part.to(self.device, non_blocking=True) for part in parts])

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
        for broken in part.broken:
            self._broken.add(broken)
        self._broken.check(self.seen)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts)) if len(parts) > 1 else parts[0]
