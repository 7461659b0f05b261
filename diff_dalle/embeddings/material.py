"""What embeddings are made of: samples of shards as frozen networks encode them, of which here the settings, images and
captions of the embeddings of a CLIP."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from .. import storage
from ..config import Fault, faults_of, named, option, redact, settings
from ..config.bounds import MAX_BATCH
from ..data.captions import caption_kind, caption_option, read_caption
from ..data.collection import Collection, Raw, collect
from ..data.fingerprint import shard_name
from ..data.settings import DataConfig
from ..data.shard_table import IMAGE
from ..data.shards import ShardFiles
from ..data.sidecars import Sidecar
from ..data.spec import Required
from ..distributed.world import World
from ..images.decode import decode_image
from ..images.signal import from_uint8
from ..images.transforms import center_crop
from ..models.options import PRECISIONS
from .clip import CLIPS
from .contract import Clip
from .sources import NAMES, OF_CLIPS, Record


@settings
class EmbeddingsConfig:
    """Computing embeddings"""

    data_dir: tuple[str, ...] = option((), "shards: folders, tars, globs, brace ranges, URLs or pipe:COMMAND")
    clip_make: str = option("diff_dalle", "maker of the CLIP", choices=CLIPS)
    clip_path: str = option(
        "",
        "the CLIP: a checkpoint of train_classifier.py; of open_clip, MODEL/TAG, MODEL:FILE or MODEL/TAG:FILE with a "
        "local file of weights; of openai, ViT-L/14",
    )
    out_dir: str = option("", "folder for the embeddings, local or remote, with a subfolder for each kind")
    what: tuple[str, ...] = option(
        ("image",),
        "kinds of embeddings: image and text, of unit norm, and text_states, a text's token states, which condition "
        "decoders",
        choices=OF_CLIPS,
    )
    caption_field: str = caption_option()
    name_by: str = option(
        "number",
        "end of file names: the last number of the shard's name, as in img_emb_00012.npy, or the whole name",
        choices=("number", "name"),
    )
    index_width: int = option(
        0,
        "last characters of a key that number its row; 0 = rows in the order of the tar",
        least=0,
        most=20,
    )
    dtype: str = option("float16", "data type of the files", choices=("float16", "float32"))
    batch_size: int = option(64, "samples per batch of the CLIP", least=1, most=MAX_BATCH)
    precision: str = option(
        "auto", "precision of the CLIP; auto = bf16 on GPUs that support it, else fp32", choices=PRECISIONS
    )
    max_pixels: int = option(
        DataConfig.max_pixels, "maximum width × height of an image; larger ones count as broken", least=1
    )
    index_cache: str = option(
        DataConfig.index_cache,
        "folder for the index of the shards; empty = beside the shards, else in the user's cache",
    )

    def faults(self) -> Iterator[Fault]:
        if not self.what or len(set(self.what)) < len(self.what):
            yield Fault("what", "must name each kind of embedding once", ",".join(self.what) or None)
        yield from faults_of(lambda: caption_kind(self.caption_field))


class Material(ABC):
    """The samples of shards of which some kinds of embeddings are made.

    out_dir:   the folder in which each kind gets one of its own. batch_size: samples that are encoded at once.
    records:   of their folders, by kind, of one type and ``index_width``. paths: of the file of each shard, by kind.
    precision: of the encoders.
    threads:   that encode batches, of ``pool``. On a CPU each batch is the work of one thread and all cores have a
               batch of their own: with several threads for one batch, the last digits would depend on their number, and
               so on that of the processes.
    one:       what a sample must have, for messages.
    place:     the setting of ``out_dir``.
    apart:     what to change where two shards would share a file; finer: where a value is not finite.
    """

    one: str
    place: str
    apart: str
    finer: str

    def __init__(
        self,
        out_dir: str,
        batch_size: int,
        collection: Collection,
        records: Mapping[str, Record],
        precision: str,
        device: torch.device,
    ):
        self.out_dir, self.batch_size, self.collection, self.precision = out_dir, batch_size, collection, precision
        shards = {shard_name(shard.path): shard.size for shard in collection.shards}
        self.records = {kind: replace(record, shards=shards) for kind, record in records.items()}
        on_cpu = device.type == "cpu"
        self.threads = torch.get_num_threads() if on_cpu else 1
        self.pool = ThreadPoolExecutor(self.threads, initializer=_use_one_thread if on_cpu else None)
        self.paths = {kind: self._paths(kind) for kind in records}

    @abstractmethod
    def read(self, shard: int, member: int, raw: Raw) -> Any:
        """From a usable sample to what is encoded. Raises BrokenSample."""

    @abstractmethod
    def encode(self, parts: Sequence) -> Mapping[str, np.ndarray]:
        """A list of what ``read`` returns, not empty → embeddings of each kind, floating-point."""

    def ordered(self, shard: int, members: list[int]) -> list[int]:
        """The samples of a shard in the order in which they form batches."""
        return members

    def folder(self, kind: str) -> str:
        return storage.join(self.out_dir, NAMES[kind])

    def _paths(self, kind: str) -> list[str]:
        sidecar = Sidecar(storage.join(self.folder(kind), self.records[kind].pattern))
        return list(sidecar.paths([shard.path for shard in self.collection.shards], self.apart).values())


def _use_one_thread() -> None:
    torch.set_num_threads(1)  # of the thread that calls it


class ClipMaterial(Material):
    """Members of the shards that a CLIP encodes.

    members: their kind, and what they hold, for messages. made_from: the same, for the records.
    """

    place = named("out_dir")
    finer = f"set {named('precision')} fp32, or {named('dtype')} float32"
    apart = f"set {named('name_by')} name, or give each folder of shards an {named('out_dir')} of its own"

    def __init__(
        self,
        config: EmbeddingsConfig,
        clip: Clip,
        kinds: Sequence[str],
        members: Mapping[str, str],
        made_from: str,
        world: World,
    ):
        self.config, self.clip = config, clip
        files = ShardFiles(index_cache=config.index_cache)
        collection = collect(config.data_dir, Required(members), files, world=world)
        shapes = {kind: (clip.embed_dim,) for kind in kinds} | {"text_states": (clip.text_length, clip.text_width)}
        records = {
            kind: Record(
                what=kind,
                clip=redact(clip.name),
                identity=clip.identity,
                shape=shapes[kind],
                dtype=config.dtype,
                pattern=f"{NAMES[kind]}_{{{'name' if config.name_by == 'name' else ''}}}.npy",
                index_width=config.index_width,
                made_from=made_from,
                counts={},
                missing={},
            )
            for kind in kinds
        }
        super().__init__(config.out_dir, config.batch_size, collection, records, clip.precision, world.device)


class Images(ClipMaterial):
    one = "an image"

    def __init__(self, config: EmbeddingsConfig, clip: Clip, world: World):
        size = clip.image_size
        made_from = f"images, the shorter side resized to {size} pixels, center crop of {size} × {size}"
        super().__init__(config, clip, ["image"], {IMAGE: "images"}, made_from, world)

    def read(self, shard: int, member: int, raw: Raw) -> np.ndarray:
        size = (self.clip.image_size,) * 2
        return center_crop(*decode_image(raw.members[IMAGE], self.config.max_pixels, size), size)

    def encode(self, parts: Sequence) -> Mapping[str, np.ndarray]:
        return {"image": self.clip.encode_images(from_uint8(np.stack(parts))).cpu().numpy()}


class Texts(ClipMaterial):
    one = "a caption"

    def __init__(self, config: EmbeddingsConfig, clip: Clip, kinds: Sequence[str], world: World):
        self.member = caption_kind(config.caption_field)
        super().__init__(config, clip, kinds, {self.member: "captions"}, captions_of(config.caption_field), world)

    def read(self, shard: int, member: int, raw: Raw) -> str:
        return read_caption(raw.members[self.member], self.config.caption_field)

    def encode(self, parts: Sequence) -> Mapping[str, np.ndarray]:
        embedding, states, _ = self.clip.encode_text(parts)
        found = {"text": embedding, "text_states": states}
        return {kind: found[kind].cpu().numpy() for kind in self.records}


def captions_of(field: str) -> str:
    """What texts are made from, for records. field: as in ``DataConfig``."""
    return f"captions ({field})"
