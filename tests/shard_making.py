"""Small images and shards for the tests of the data room."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from diff_dalle.batch import Batch
from diff_dalle.data.loader import Loader


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
        (folder / f"{shard:05d}.tar").write_bytes(tar_bytes(files))
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
