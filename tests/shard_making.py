"""Small images and shards for the tests of the data room."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from diff_dalle.batch import Batch
from diff_dalle.data.collection import Collection, collect
from diff_dalle.data.loader import DataConfig, Loader
from diff_dalle.data.shard_table import IMAGE
from diff_dalle.data.shards import ShardFiles
from diff_dalle.data.spec import Required, SampleSpec
from diff_dalle.distributed.world import ALONE

CAPTIONED = Required({IMAGE: "images", "txt": "captions"})


def random_image(height: int = 20, width: int = 24, seed: int = 0) -> Image.Image:
    """A smooth random image, which jpeg and resizing preserve well."""
    rough = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    return Image.fromarray(rough).resize((width, height), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, form: str = "JPEG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def tar_bytes(files: Iterable[tuple[str, bytes]], form: int = tarfile.USTAR_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as tar:
        for name, data in files:
            header = tarfile.TarInfo(name)
            header.size = len(data)
            if name.endswith("/"):
                header.type = tarfile.DIRTYPE
            tar.addfile(header, io.BytesIO(data))
    return buffer.getvalue()


def make_tar(path: Path, files: Iterable[tuple[str, bytes]]) -> None:
    path.write_bytes(tar_bytes(files))


def sample(key: str, caption: str | None = None, image: bytes | None = None) -> list[tuple[str, bytes]]:
    number = int(key) if key.isdigit() else 0
    files = [(f"{key}.jpg", encoded(random_image(seed=number)) if image is None else image)]
    return files + ([(f"{key}.txt", caption.encode())] if caption is not None else [])


def make_shards(folder: Path, counts: Iterable[int]) -> str:
    """Tars with these numbers of samples, consecutive keys and captions ``caption of KEY``."""
    number = 0
    for shard, count in enumerate(counts):
        keys = [f"{number + i:04d}" for i in range(count)]
        files = [file for key in keys for file in sample(key, f"caption of {key}")]
        make_tar(folder / f"{shard:05d}.tar", files)
        number += count
    return str(folder)


def npy_bytes(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


class Letters:
    """A tokenizer whose tokens are bytes."""

    def __call__(self, texts, length):
        rows = [list(text.encode()[:length]) for text in texts]
        tokens = torch.tensor([row + [0] * (length - len(row)) for row in rows])
        return tokens, tokens > 0


def captions_of(batch) -> list[str]:
    return [bytes(row[row > 0].tolist()).decode() for row in batch.cond.tokens]


def take(data: Loader, position: int, count: int) -> list[Batch]:
    batches = data.batches(position)
    taken = [next(batches) for _ in range(count)]
    batches.close()
    return taken


def indexed(source: Path | str, required: Required = CAPTIONED, world=ALONE, **files) -> Collection:
    """files: of ShardFiles."""
    return collect([str(source)], required, ShardFiles(**files), world=world)


def load(folder: Path | str, spec: SampleSpec, seed: int = 0, batch_size: int = 4, **options) -> Loader:
    """options: settings of the data, and arguments of the loader."""
    settings = {field.name: options.pop(field.name) for field in fields(DataConfig) if field.name in options}
    config = DataConfig(**{"data_dir": (str(folder),), "num_workers": 0, "exact_decode": True, **settings})
    return Loader(config, spec, seed, batch_size, **options)


def assert_same(one: Batch, other: Batch) -> None:
    mine, theirs = one.cond.present(), other.cond.present()
    assert torch.equal(one.images, other.images) and torch.equal(one.index, other.index)
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def assert_shared(make: Callable[..., Loader], position: int, size: int = 8, count: int = 4) -> list[Batch]:
    """Batches from a position on, which are the same with workers, on two processes and after a restart."""
    skipped = position // size
    whole = take(make(batch_size=size), 0, skipped + count)[skipped:]
    for one, other in zip(whole, take(make(batch_size=size, num_workers=2), position, count), strict=True):
        assert_same(one, other)
    for rank in (0, 1):
        part = take(make(batch_size=size // 2, rank=rank, world_size=2), position, count)
        for one, other in zip(whole, part, strict=True):
            assert_same(one.select(slice(rank, None, 2)), other)
    return whole
