"""Decoding against Guided-Diffusion's, the loader against decoding alone, and loading end to end: from files to float
batches, with one worker and two, and the memory of a worker."""

from __future__ import annotations

import functools
import io
import itertools
import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from diff_dalle.batch import Batch
from diff_dalle.data.buckets import AspectConfig
from diff_dalle.data.loader import DataConfig, Loader
from diff_dalle.data.spec import ImageSpec, SampleSpec
from diff_dalle.data.tar import write_tar
from diff_dalle.distributed.devices import reuse_freed_memory
from diff_dalle.evaluation.report import markdown_table
from diff_dalle.images.decode import decode_image
from diff_dalle.images.signal import to_uint8
from diff_dalle.images.transforms import center_crop

from .timing import temporary_folder

SIZE = (64, 64)
SIDES = ((256, 256), (256, 379), (320, 427), (384, 384), (512, 512), (767, 512))  # (height, width) of the jpegs
COUNT, BATCH = 48, 8
ASPECT = AspectConfig(("1/1", "3/4", "2/3"), 0.0, bucket_factor=8, bucket_crop="center")


def photograph(height: int, width: int, seed: int) -> Image.Image:
    """Noise with the spectrum of photographs, amplitude about 1/f (Field 1987), and with pale colors."""
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.fftfreq(width)[None])
    frequency[0, 0] = 1
    noise = np.fft.fft2(np.random.default_rng(seed).standard_normal((3, height, width))) / frequency**1.2
    light = np.fft.ifft2(noise + 3 * noise[:1]).real
    light = 128 + 50 * (light - light.mean()) / light.std()
    return Image.fromarray(light.clip(0, 255).astype(np.uint8).transpose(1, 2, 0))


@functools.cache
def jpegs() -> tuple[bytes, ...]:
    """Images of 256 to 767 pixels, as in data sets of web images, and as large as those: 2.2 bits per pixel."""
    files = []
    for i in range(COUNT):
        buffer = io.BytesIO()
        image = photograph(*SIDES[i % len(SIDES)], seed=i)
        image.save(buffer, "JPEG", quality=75)  # noise takes more bits than photographs do
        files.append(buffer.getvalue())
    return tuple(files)


def decode_full_size(file: BinaryIO) -> np.ndarray:
    """Guided-Diffusion's procedure: decode at full size, halve with a box filter, resize, crop."""
    image = Image.open(file).convert("RGB")
    side = SIZE[0]
    while min(image.size) >= 2 * side:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    factor = side / min(image.size)
    pixels = np.array(image.resize([round(length * factor) for length in image.size], Image.Resampling.BICUBIC))
    top, left = (pixels.shape[0] - side) // 2, (pixels.shape[1] - side) // 2
    return pixels[top : top + side, left : left + side]


def decode_reduced(data: bytes, size: tuple[int, int] = SIZE) -> np.ndarray:
    return center_crop(*decode_image(data, DataConfig.max_pixels, size), size)


def full_size() -> Callable[[], np.ndarray]:
    return functools.partial(_decode_all, lambda data: decode_full_size(io.BytesIO(data)), jpegs())


def reduced() -> Callable[[], np.ndarray]:
    return functools.partial(_decode_all, decode_reduced, jpegs())


def _decode_all(decode, files) -> np.ndarray:
    return np.stack([decode(data) for data in files])


def decoding_gate() -> Mapping[str, tuple[float, float]]:
    """Both give the same images to 40 dB PSNR, which is a mean squared difference of 6.5 levels."""
    difference = full_size()().astype(np.float64) - reduced()()
    return {"mean squared difference": (float(np.mean(difference**2)), 255**2 / 10**4)}


def loader_of_jpegs(batch_size: int = BATCH, shuffle: bool = True, num_workers: int = 0, **settings) -> Loader:
    """A loader of a shard with these images. settings: of ``DataConfig``."""
    reuse_freed_memory()  # as in every training command
    folder = temporary_folder()
    samples = ((f"{i:05d}", {"jpg": data, "txt": b"an image", "json": b"{}"}) for i, data in enumerate(jpegs()))
    write_tar(str(folder / "00000.tar"), samples)
    config = DataConfig((str(folder),), num_workers=num_workers, **settings)
    return Loader(config, SampleSpec(ImageSpec(SIZE)), batch_size=batch_size, shuffle=shuffle)


def shuffled() -> Callable[[], Batch]:
    """The loader in one process, from captioned shards to a batch of float images."""
    return functools.partial(loader_of_jpegs().batch_at, range(COUNT))


def in_batches() -> Callable[[], list[Batch]]:
    """The same images as squares in small batches."""
    return functools.partial(_all_batches, loader_of_jpegs())


def in_buckets() -> Callable[[], list[Batch]]:
    """The same images in batches of one aspect ratio each: their numbers are multiples of the batch size, so each image
    occurs once."""
    return functools.partial(_all_batches, loader_of_jpegs(aspect=ASPECT))


def _all_batches(data: Loader) -> list[Batch]:
    return [data.batch_at(range(start, start + BATCH)) for start in range(0, COUNT, BATCH)]


def bucket_gate() -> Mapping[str, tuple[float, float]]:
    """Both give the images that decoding alone gives at their sizes, all of them."""
    table = ASPECT.buckets(SIZE[0] * SIZE[1])
    full = np.array([decode_image(data, DataConfig.max_pixels)[1] for data in jpegs()])
    sizes = [table.sizes[number] for number in table.nearest(full)]
    found = {}
    for name, build, wanted in (("squares", in_batches, [SIZE] * COUNT), ("buckets", in_buckets, sizes)):
        levels = np.concatenate([to_uint8(batch.images).numpy().mean((1, 2, 3)) for batch in build()()])
        expected = np.sort([decode_reduced(*each).mean() for each in zip(jpegs(), wanted, strict=True)])
        found[f"difference of means, {name}"] = float(np.abs(np.sort(levels) - expected).max()), 1e-3
    return found


def loader_gate() -> Mapping[str, tuple[float, float]]:
    """The loader gives the same images, in another order."""
    levels = np.sort(to_uint8(shuffled()().images).numpy().mean((1, 2, 3)))
    return {"difference of means": (float(np.abs(levels - np.sort(reduced()().mean((1, 2, 3)))).max()), 1e-3)}


# ------------------------------------------------------------------------------------------------------- end to end

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
    for i, data in enumerate(jpegs()):
        (folder / f"{i:05d}.jpg").write_bytes(data)
    source = DataLoader(_Files(folder), batch_size=COUNT, drop_last=True)
    return lambda: next(iter(source))[0]


def from_shards(fastest: bool = False) -> Callable[[], torch.Tensor]:
    """The same batch by our loader with its default settings, or the fastest ones, which need simplejpeg."""
    data = loader_of_jpegs(shuffle=False, streams=1, **(FASTEST if fastest else {}))
    return lambda: data.batch_at(range(COUNT)).images


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
