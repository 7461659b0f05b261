"""Loading end to end: from files to float batches, with one worker and two, and the memory of a worker."""

from __future__ import annotations

import io
import itertools
import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from diff_dalle.batch import Batch
from diff_dalle.data.loader import DataConfig, Loader
from diff_dalle.data.spec import ImageSpec, SampleSpec
from diff_dalle.data.tar import write_tar
from diff_dalle.evaluation.report import markdown_table

from . import loader
from .loader import decode_full_size, loader_of_jpegs
from .timing import temporary_folder

STREAM, STREAM_BATCH = 12, 32  # batches that a repetition takes from workers, and their size
SMALL, SMALL_PER_SHARD = 50_000, 10_000  # samples of the memory table
FASTEST: dict[str, Any] = {"decoder": "simplejpeg", "decode_scale": 1}


class _Files(Dataset[tuple[np.ndarray, dict]]):
    """Guided-Diffusion's data set: a listed folder of images, each read, decoded and normalized in float32."""

    def __init__(self, folder: Path):
        self.files = sorted(folder.iterdir())

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, number: int) -> tuple[np.ndarray, dict]:
        with self.files[number].open("rb") as file:
            pixels = decode_full_size(file)
        return (pixels.astype(np.float32) / 127.5 - 1).transpose(2, 0, 1), {}


def from_files() -> Callable[[], torch.Tensor]:
    """Guided-Diffusion's way in one process: all images as one batch of torch's DataLoader."""
    folder = temporary_folder()
    for i, data in enumerate(loader.jpegs()):
        (folder / f"{i:05d}.jpg").write_bytes(data)
    source = DataLoader(_Files(folder), batch_size=loader.COUNT, drop_last=True)
    return lambda: next(iter(source))[0]


def from_shards(fastest: bool = False) -> Callable[[], torch.Tensor]:
    """The same batch by our loader with its default settings, or the fastest ones, which need simplejpeg."""
    data = loader_of_jpegs(shuffle=False, streams=1, **(FASTEST if fastest else {}))
    return lambda: data.batch_at(range(loader.COUNT)).images


def gate(fastest: bool = False) -> Mapping[str, tuple[float, float]]:
    """Both give the same images in the same order to 40 dB PSNR."""
    difference = 127.5 * (from_files()() - from_shards(fastest)())
    return {"mean squared difference": (float(difference.square().mean()), 255**2 / 10**4)}


def stream(num_workers: int) -> Callable[[], list[Batch]]:
    """The next batches of an endless stream that so many workers prepare."""
    batches = loader_of_jpegs(STREAM_BATCH, num_workers=num_workers).batches(0)
    return lambda: list(itertools.islice(batches, STREAM))


def workers_gate() -> Mapping[str, tuple[float, float]]:
    """One worker and two give the batches that none gives."""
    expected, *found = (torch.cat([batch.images for batch in stream(workers)()]) for workers in range(3))
    return {f"{i} workers": (float((images - expected).abs().max()), 0.0) for i, images in enumerate(found, 1)}


def memory_table(count: int = SMALL) -> str:
    """The memory of this process and of its only worker after each fifth of ``count`` small samples."""
    rows = []
    batches = _small_samples(count).batches(0)
    for done in range(1, 6):
        for _ in itertools.islice(batches, count // 5 // STREAM_BATCH):
            pass
        (worker,) = multiprocessing.active_children()
        own = [f"{mebibytes:.1f}" for pid in ("self", worker.pid) for mebibytes in _memory(pid)]
        rows.append([f"{done * count // 5:,}", *own])
    return markdown_table(["samples", "main RSS", "main private", "worker RSS", "worker private"], rows)


def _small_samples(count: int) -> Loader:
    """A loader with one worker of shards with ``count`` different images of 16 pixels."""
    folder = temporary_folder()
    for first in range(0, count, SMALL_PER_SHARD):
        numbers = range(first, min(first + SMALL_PER_SHARD, count))
        write_tar(str(folder / f"{first:06d}.tar"), (_small_sample(i) for i in numbers))
    return Loader(DataConfig((str(folder),), num_workers=1), SampleSpec(ImageSpec((16, 16))), batch_size=STREAM_BATCH)


def _small_sample(number: int) -> tuple[str, Mapping[str, bytes]]:
    buffer = io.BytesIO()
    Image.new("RGB", (16, 16), (number % 256, number // 256 % 256, 99)).save(buffer, "JPEG")
    return f"{number:06d}", {"jpg": buffer.getvalue(), "txt": b"an image"}


def _memory(pid: int | str | None) -> Iterator[float]:
    """MiB of memory of a process (Linux): all that is resident, and the part that it shares with none."""
    fields = dict(
        line.split(":") for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines() if line.endswith("kB")
    )
    kib = {name: int(text.split()[0]) for name, text in fields.items()}
    yield kib["Rss"] / 1024
    yield (kib["Private_Clean"] + kib["Private_Dirty"]) / 1024
