"""The settings of the data: where it is, and how samples are read, ordered and decoded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..config import Fault, faults_of, named, option, section, settings
from ..config.bounds import MAX_BATCH, MAX_PROCESSES, MAX_SECONDS
from ..images.decode import DECODERS, MAX_PIXELS, PILLOW_PIXELS, SCALE
from ..images.preprocessing import TransformConfig
from .buckets import AspectConfig
from .captions import caption_kind, caption_option
from .filters import filters_option, parse_filters
from .shards import CACHE_BYTES

MAX_WORKERS = 16  # of a process that are started unasked


def workers_option() -> Any:
    return option(
        None,
        "data workers per training process; auto = 2, or for a GPU all but one of the process's cores, at most "
        f"{MAX_WORKERS}; 0 = load in the training process",
        free=True,
        least=0,
    )


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
        "image transforms, by torchvision's names, before the center crop at the training size; instead of random_crop",
        keyed="name",
    )
    random_crop: bool = option(False, "random crop, 80–100 % of the shorter side, instead of a center crop")
    random_flip: bool = option(
        False, "horizontal flip, p = 0.5; unsuitable where captions mention left or right, or images show text"
    )
    saliency: str = option(
        "",
        "crop around the salient part of an image: opencv (extra saliency), or an installed package's entry point in "
        "the group diff_dalle.saliency; empty = in the center or random_crop",
    )
    exact_decode: bool = option(
        False, "decode jpegs at full size: slower, pixels equal to Guided-Diffusion's instead of close (45 dB)"
    )
    decode_scale: int = option(
        SCALE,
        "minimum decoded size of a jpeg, relative to the size it is downsampled to, unless exact_decode: 2 = 45 dB, "
        "1 = 41 dB and faster",
        least=1,
        most=MAX_BATCH,
    )
    decoder: str = option(
        "pillow",
        "jpeg decoder; both yield the same pixels; simplejpeg is faster and needs the extra jpeg",
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
        "interleaved streams of an epoch, which determine its order; 0 = 8, or the next multiple of the number of "
        "nodes, fixed when the run starts",
        least=0,
        most=MAX_PROCESSES,
    )
    shuffle_window: int = option(
        4, "consecutive shards of an epoch whose samples are shuffled together", least=1, most=MAX_BATCH
    )
    resample: bool = option(False, "draw the shards of an epoch with replacement")
    num_workers: int | None = workers_option()
    prefetch: int = option(4, "batches prepared in advance by all workers together", free=True, least=1, most=MAX_BATCH)
    data_timeout: float = option(
        1200.0,
        "save and stop after this many seconds without samples from the data workers",
        free=True,
        least=1,
        most=MAX_SECONDS,
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
