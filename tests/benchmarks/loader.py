"""Image throughput: decoding against Guided-Diffusion's, and the loader against decoding alone."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Mapping
from typing import BinaryIO

import numpy as np
from PIL import Image

from diff_dalle.batch import Batch
from diff_dalle.data.buckets import AspectConfig
from diff_dalle.data.loader import DataConfig, Loader
from diff_dalle.data.spec import ImageSpec, SampleSpec
from diff_dalle.data.tar import write_tar
from diff_dalle.distributed.devices import reuse_freed_memory
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


def from_shards() -> Callable[[], Batch]:
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
    levels = np.sort(to_uint8(from_shards()().images).numpy().mean((1, 2, 3)))
    return {"difference of means": (float(np.abs(levels - np.sort(reduced()().mean((1, 2, 3)))).max()), 1e-3)}
