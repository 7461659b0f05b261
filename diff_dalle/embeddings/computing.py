"""Computing the embeddings of all samples of shards once, into sidecar files."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from tqdm import tqdm

from .. import storage
from ..config import faults_of, option, settings
from ..data.captions import caption_kind, caption_option, read_caption
from ..data.collection import Collection, collect
from ..data.loader import DataConfig
from ..data.shard_table import IMAGE, Required
from ..data.shards import ShardFiles
from ..data.sidecars import Sidecar
from ..distributed.world import World
from ..errors import Fault, InputError, named, quantity, redact
from ..images.decode import decode_image
from ..images.pixels import from_uint8
from ..images.transforms import center_crop
from ..models.precision_names import PRECISIONS
from .clip import CLIPS, load_clip
from .contract import Clip
from .record import FILE, NAMES, Record, folder_record
from .shard_embeddings import Encoders, ShardWork

TEXTS = ("text", "text_states")
TOLERANCE = {"fp32": 0.01, "bf16": 0.05, "fp16": 0.05}  # of embeddings made again; float16 rounds by 0.0005
LISTED = 1000  # missing samples that are named in a record
log = logging.getLogger(__name__)


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
    out_dir: str = option("", "folder for the embeddings, local or remote; each kind gets a folder of its own in it")
    what: tuple[str, ...] = option(
        ("image",),
        "kinds of embeddings: image and text, of unit norm, and text_states, those of a text's tokens, which condition "
        "decoders",
        choices=NAMES,
    )
    caption_field: str = caption_option()
    name_by: str = option(
        "number",
        "what of a shard's name ends that of its file: its last number, as in img_emb_00012.npy, or all of it",
        choices=("number", "name"),
    )
    index_width: int = option(
        0, "last characters of a key that are the number of its row; 0 = rows in the order of the tar", least=0
    )
    dtype: str = option("float16", "type of the files' numbers", choices=("float16", "float32"))
    batch_size: int = option(64, "samples that the CLIP encodes at once", least=1)
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


def compute_embeddings(config: EmbeddingsConfig, world: World) -> list[str]:
    """Write the embeddings of all samples of ``data_dir`` into ``out_dir``, a file for each shard, and for each kind of
    embedding a record of how they were made (``record.py``). All processes of ``world`` call it, and share the shards.

    Rows of samples that cannot be read are zeros, the mark of a missing embedding. Files that are there, complete and
    still right stay; called again after an interruption, it goes on. Returns lines about what was made.

    Raises InputError for a missing setting, data without images or captions, and a folder that holds embeddings made
    in another way.
    """
    names = ("data_dir", "clip_path", "out_dir")
    InputError.check(Fault(name, "is not set") for name in names if not getattr(config, name))
    clip = load_clip(config.clip_make, config.clip_path, world.device, config.precision)
    if "text_states" in config.what and not clip.text_width:
        rule = f"has text_states, but the text tower of {clip.name} has none to give: leave it out"
        raise InputError(Fault("what", rule))
    if "image" in config.what:
        groups = [("image",), tuple(kind for kind in config.what if kind in TEXTS)]
    else:
        groups = [config.what]
    return [line for group in groups if group for line in _Job(config, clip, group, world).run()]


class _Job:
    """The embeddings of kinds that are made from the same members: of images, or of texts."""

    def __init__(self, config: EmbeddingsConfig, clip: Clip, kinds: Sequence[str], world: World):
        self.config, self.clip, self.kinds, self.world = config, clip, kinds, world
        self.member = caption_kind(config.caption_field) if kinds[0] in TEXTS else IMAGE
        required = Required({self.member: "captions" if kinds[0] in TEXTS else "images"})
        self.encoders = Encoders(world.device)
        files = ShardFiles()
        self.collection: Collection = collect(config.data_dir, required, files, config.index_cache, world=world)
        self.records = {kind: self._record(kind) for kind in kinds}
        self.paths = {kind: self._paths(kind) for kind in kinds}

    def _folder(self, kind: str) -> str:
        return storage.join(self.config.out_dir, NAMES[kind])

    def _record(self, kind: str) -> Record:
        config, clip = self.config, self.clip
        states = kind == "text_states"
        size = clip.image_size
        made_from = (
            f"images, the shorter side resized to {size} pixels, center crop of {size} × {size}"
            if kind == "image"
            else f"captions ({config.caption_field})"
        )
        return Record(
            what=kind,
            clip=redact(clip.name),
            identity=clip.identity,
            shape=(clip.text_length, clip.text_width) if states else (clip.embed_dim,),
            dtype=config.dtype,
            pattern=f"{NAMES[kind]}_{{{'name' if config.name_by == 'name' else ''}}}.npy",
            index_width=config.index_width,
            made_from=made_from,
            counts={},
            missing={},
        )

    def _paths(self, kind: str) -> list[str]:
        """The file of each shard. InputError where two would share one."""
        sidecar = Sidecar(storage.join(self._folder(kind), self.records[kind].pattern))
        owners: dict[str, str] = {}
        for shard in self.collection.shards:
            path = sidecar.path(shard.path)
            if owners.setdefault(path, shard.path) != shard.path:
                raise InputError(
                    f"{owners[path]} and {shard.path} would share the file {path}: set {named('name_by')} name, or "
                    f"give each folder of shards an {named('out_dir')} of its own"
                )
        return list(owners)

    def run(self) -> list[str]:
        if self.world.is_main:
            for kind in self.kinds:
                self._claim(kind)
        self.world.barrier()
        mine = range(len(self.collection.shards))[self.world.rank :: self.world.size]
        works = [self._work(shard) for shard in mine]
        self._together(works)
        found = [
            (work.shard, len(work.missing), [self._named(work, member) for member in sorted(work.missing)[:LISTED]])
            for work in works
        ]
        missing = sorted(each for part in self.world.gather(found) for each in part)
        named = [sample for _, _, samples in missing for sample in samples]
        return self._finish(sum(count for _, count, _ in missing), named)

    def _named(self, work: ShardWork, member: int) -> tuple[str, str]:
        """A missing sample, and why it is."""
        return self.collection.describe(work.shard, member), work.missing[member]

    def _claim(self, kind: str) -> None:
        """Write the record of a folder that is empty, or holds embeddings made in the same way."""
        folder, record = self._folder(kind), self.records[kind]
        another = f"choose another {named('out_dir')}"
        there = folder_record(folder)
        if there is None:
            if storage.exists(folder) and any(path.endswith(".npy") for path in storage.list_files(folder)):
                raise InputError(f"{folder} holds embeddings without a record ({FILE}): {another}")
            storage.make_dirs(folder)
        elif difference := there.difference(record):
            raise InputError(f"{folder} holds embeddings made in another way ({difference}): {another}")
        record.write(folder, {}, {})

    def _work(self, shard: int) -> ShardWork:
        return ShardWork(
            collection=self.collection,
            shard=shard,
            index_width=self.config.index_width,
            paths={kind: self.paths[kind][shard] for kind in self.kinds},
            shapes={kind: self.records[kind].shape for kind in self.kinds},
            dtype=self.config.dtype,
            batch_size=self.config.batch_size,
            read=self._text if self.kinds[0] in TEXTS else self._image,
            encode=self._encode_texts if self.kinds[0] in TEXTS else self._encode_images,
            encoders=self.encoders,
            tolerance=TOLERANCE[self.clip.precision],
        )

    def _image(self, members: Mapping[str, bytes]) -> np.ndarray:
        size = (self.clip.image_size,) * 2
        return center_crop(*decode_image(members[IMAGE], self.config.max_pixels, size), size)

    def _text(self, members: Mapping[str, bytes]) -> str:
        return read_caption(members[self.member], self.config.caption_field)

    def _encode_images(self, images: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        if not images:
            return {}
        return {"image": self.clip.encode_images(from_uint8(np.stack(images))).cpu().numpy()}

    def _encode_texts(self, texts: Sequence[str]) -> dict[str, np.ndarray]:
        if not texts:
            return {}
        embedding, states, _ = self.clip.encode_text(texts)
        found = {"text": embedding, "text_states": states}
        return {kind: found[kind].cpu().numpy() for kind in self.kinds}

    def _together(self, works: Sequence[ShardWork]) -> None:
        """Do the work batch by batch in step with the other processes: one that has done its own would wait for them
        in a single collective for longer than ``timeout``."""
        steps = self._steps(works)
        while self.world.any(next(steps, False)):
            pass

    def _steps(self, works: Sequence[ShardWork]) -> Iterator[bool]:
        total = sum(int(self.collection.counts[work.shard]) for work in works)
        of = f" (process 1 of {self.world.size})" if self.world.size > 1 else ""
        title = f"embedding {' and '.join(self.kinds)}{of}"
        with tqdm(total=total, desc=title, unit="sample", disable=not self.world.is_main or None) as bar:
            for work in works:
                for done in work.steps():
                    bar.update(done)
                    yield True

    def _finish(self, unreadable: int, named: Sequence[tuple[str, str]]) -> list[str]:
        """Complete the records. Returns lines about what was made."""
        samples = sum(self.collection.totals)
        embedded = self.collection.samples - unreadable
        counts = {"shards": len(self.collection.shards), "samples": samples, "embeddings": embedded}
        counts["missing"] = samples - embedded
        lines = []
        for kind, record in self.records.items():
            folder = self._folder(kind)
            if self.world.is_main:
                record.write(folder, counts, dict(named[:LISTED]))
            made, shards = quantity(embedded, "embedding"), quantity(counts["shards"], "shard")
            lines.append(f"{folder}: {made} {list(record.shape)} in {record.dtype}, {shards}, by {record.clip}")
        if counts["missing"]:
            without = "an image" if self.member == IMAGE else "a caption"
            lines.append(
                f"{quantity(counts['missing'], 'sample')} without an embedding: {self.collection.left_out:,} without "
                f"{without}, {unreadable:,} that cannot be read"
            )
            lines += [f"  {sample}: {reason}" for sample, reason in named[:10]]
        return lines
