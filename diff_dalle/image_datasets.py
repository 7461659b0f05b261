"""``guided_diffusion.image_datasets``: batches of a folder of images, decoded and cropped by this library.

For captions, webdataset shards and exact resuming, see ``data/``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from . import dist_util, logger, storage
from .config import InputError, quantity
from .images.decode import IMAGE_KINDS, MAX_PIXELS, BrokenSample, decode_image
from .images.transforms import center_crop, random_cover, random_crop

THREADS = 2  # that decode, beside the training


def load_data(
    *,
    data_dir: str,
    batch_size: int,
    image_size: int,
    class_cond: bool = False,
    deterministic: bool = False,
    random_crop: bool = False,
    random_flip: bool = True,
) -> Iterator[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """Endless batches of this rank's share of a folder's images, subfolders included.

    Each is images [batch_size, 3, image_size, image_size] float32 in [-1, 1], and {"y": [batch_size] int64} with
    ``class_cond``: the number of the class, which is what a file's name has before the first "_", in sorted order.

    deterministic: in the order of the paths; else shuffled, by torch's generator.
    random_crop:   crop at random, 80 to 100 % of the shorter side; else the center.
    random_flip:   mirror half of the images.

    Raises InputError for a folder with less than a batch of images, and for an image that cannot be read.
    """
    if not data_dir:
        raise InputError("data_dir is required: a folder of images")
    paths = storage.list_files(data_dir, recursive=True)
    images = [path for path in paths if path.lower().rpartition(".")[2] in IMAGE_KINDS]
    logger.log(f"{data_dir}: {quantity(len(images), 'image')}, {quantity(len(paths) - len(images), 'other file')}")
    names = [path.rpartition("/")[2].partition("_")[0] for path in images]
    classes = {name: number for number, name in enumerate(sorted(set(names)))}
    world = dist_util.world()
    own = [(path, classes[name]) for path, name in zip(images, names, strict=True)][world.rank :: world.size]
    if len(own) < batch_size:
        raise InputError(
            f"{data_dir} has {quantity(len(own), 'image')} ({', '.join(IMAGE_KINDS)}) for this process, but batch_size "
            f"is {batch_size}; shards (.tar) are read by scripts/train_generator.py"
        )
    reader = _Reader(image_size, random_crop, random_flip)
    return _batches(own, batch_size, class_cond, deterministic, reader)


def _batches(
    own: Sequence[tuple[str, int]], batch_size: int, class_cond: bool, deterministic: bool, reader: _Reader
) -> Iterator[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """Threads read a batch while the one before is in use."""
    numbers = torch.Generator().manual_seed(int(torch.randint(2**62, ())))
    with ThreadPoolExecutor(THREADS) as pool:
        upcoming: list[tuple[list[Future], list[int]]] = []
        while True:
            order = range(len(own)) if deterministic else torch.randperm(len(own), generator=numbers).tolist()
            for start in range(0, len(own) - batch_size + 1, batch_size):
                chosen = [own[i] for i in order[start : start + batch_size]]
                uniforms = torch.rand(batch_size, 4, generator=numbers).tolist()
                images = [pool.submit(reader, path, each) for (path, _), each in zip(chosen, uniforms, strict=True)]
                upcoming.append((images, [label for _, label in chosen]))
                if len(upcoming) > 1:
                    yield _stacked(*upcoming.pop(0), class_cond)


def _stacked(images: Sequence[Future], labels: Sequence[int], class_cond: bool):
    pixels = np.stack([image.result() for image in images])
    batch = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 127.5 - 1
    return batch, {"y": torch.tensor(labels)} if class_cond else {}


@dataclass(frozen=True)
class _Reader:
    """A path and four numbers in [0, 1) → uint8 [image_size, image_size, 3]."""

    image_size: int
    crop: bool
    flip: bool

    def __call__(self, path: str, uniforms: Sequence[float]) -> np.ndarray:
        scale, top, left, mirror = uniforms
        size = self.image_size, self.image_size
        try:
            image, full = decode_image(storage.read_bytes(path), MAX_PIXELS)
            if self.crop:
                pixels = random_crop(image, full, size, random_cover(size, scale), (top, left))
            else:
                pixels = center_crop(image, full, size)
        except BrokenSample as error:
            raise InputError(f"{path} is {error}: remove it from the folder") from None
        return pixels[:, ::-1] if self.flip and mirror < 0.5 else pixels
