"""The ``data`` section of a decoder's file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from ...config import Fault, faults_of, named, option, section, settings
from ...config.bounds import MAX_BATCH, MAX_PROCESSES
from ...data.captions import caption_option
from ...data.sources import ShardRange, divide
from ...images.preprocessing import TransformConfig

INDEX_WIDTH = 4  # of img2dataset's shards
TOLERANCE = 1e-6  # of the sum of the splits: 0.7 + 0.2 + 0.1 is 0.9999999999999999


@settings
class SplitsConfig:
    """Splits"""

    train: float = option(0.75, "fraction of the shards to train on", above=0, most=1)
    val: float = option(
        0.15, "fraction of the shards for the validation loss and the metrics; 0 = neither", least=0, most=1
    )
    test: float = option(0.1, "fraction of the shards whose images are shown beside samples; 0 = none", least=0, most=1)

    def faults(self) -> Iterator[Fault]:
        if abs(sum(vars(self).values()) - 1) > TOLERANCE:
            names = f"{named('train')}, {named('val')} and {named('test')}"
            yield Fault("", f"{names} are {self.train:g}, {self.val:g} and {self.test:g}, but must add up to 1")


@settings
class DataSection:
    """Data"""

    refused: ClassVar[dict[str, str]] = {
        "data_dir": "is called webdataset_base_url here, with {} in place of the shard's number",
    }

    webdataset_base_url: str = option(
        "",
        "path, URL or pipe:COMMAND of a shard, with {} in place of its number",
        required=True,
        free=True,  # checkpoints know the shards themselves
    )
    img_embeddings_url: str | None = option(
        None,
        "folder of image embeddings, a .npy file for each shard; none = from the shards or decoder.clip",
        free=True,
    )
    text_embeddings_url: str | None = option(
        None, "folder of text encodings, a .npy file for each shard; none = from the shards or decoder.clip", free=True
    )
    streams: int = option(
        0,
        "interleaved streams of an epoch, which determine its order; 0 = 8, or the next multiple of the nodes",
        least=0,
        most=MAX_PROCESSES,
    )
    num_workers: int = option(
        4, "data workers per training process; 0 = load in the training process", free=True, least=0, most=MAX_PROCESSES
    )
    batch_size: int = option(64, "samples per process and step", free=True, least=1, most=MAX_BATCH)
    start_shard: int = option(0, "number of the first shard", free=True)
    end_shard: int = option(9_999_999, "number of the last shard; may lie beyond those that exist", free=True)
    shard_width: int = option(6, "zero-padded digits of a shard's number", free=True, least=0, most=20)
    index_width: int | None = option(
        None,
        f"last characters of a sample's key that number its row in the .npy files, 0 = rows in the order of the shard; "
        f"none = as their folder records, else {INDEX_WIDTH}",
        least=0,
        most=20,
    )
    splits: SplitsConfig = section(SplitsConfig)
    shuffle_train: bool = option(True, "new order of shards and samples in each epoch")
    resample_train: bool = option(
        False, "draw the shards of an epoch with replacement; their samples are shuffled, whatever shuffle_train is"
    )
    shuffle_val_test: bool = option(
        False, "a fixed random order of validation and test samples, instead of the shards'"
    )
    preprocessing: tuple[TransformConfig, ...] = option(
        (TransformConfig(),),
        "image transforms, by torchvision's names; images are then scaled to cover the largest training size and "
        "cropped",
        keyed="name",
    )
    caption_field: str = caption_option()
    max_broken: float = option(
        0.02, "maximum fraction of broken samples, which are replaced", free=True, least=0, most=1
    )
    index_cache: str = option("", "folder for the index of the shards; empty = beside the shards", free=True)
    shard_cache: str = option("", "folder for copies of remote shards; empty = the user's cache", free=True)

    def faults(self) -> Iterator[Fault]:
        if self.resample_train and self.shuffle_train:
            other = named("shuffle_train")
            yield Fault(
                "resample_train", f"and {other} are both True, but exclude each other: set one of them to false"
            )
        if self.webdataset_base_url:
            yield from faults_of(self.shards)

    def shards(self) -> ShardRange:
        return ShardRange(self.webdataset_base_url, self.start_shard, self.end_shard, self.shard_width)

    def divided(self, seed: int) -> dict[str, list[str]]:
        """The shards that exist, as "train", "val" and "test"."""
        return divide(self.shards().find(), vars(self.splits), seed)
