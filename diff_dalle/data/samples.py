"""The samples at given positions: read, decoded, cropped and tokenized. What the worker processes run.

A sample that cannot be used is replaced by the next one of its stream, the same one every time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError
from ..images.decode import BrokenSample, decode_image
from ..images.transforms import Window, center_crop, random_cover, random_crop, random_window
from ..randomness import random_uniform
from .captions import read_caption
from .collection import Collection, Raw
from .order import Order

REPLACEMENTS = 256  # in a row; more of them means that the data is broken, not a sample
REQUESTS = 16  # remote reads under way at once in one worker

Tokenize = Callable[[Sequence[str], int], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Recipe:
    """How a sample is made from its members.

    size:          (height, width) wanted.
    window:        what is cut out of an image of that size; None = all of it is taken.
    caption_field: where the caption is; "" = none is needed.
    text_length:   tokens a caption is cut and padded to.
    num_classes:   classes that the ``cls`` member may name; 0 = none is needed.
    exact_decode:  decode jpegs in full.
    """

    size: tuple[int, int]
    window: Window | None
    seed: int
    caption_field: str
    text_length: int
    num_classes: int
    random_crop: bool
    random_flip: bool
    exact_decode: bool
    max_pixels: int


@dataclass(frozen=True)
class Broken:
    """A sample that was replaced, and why."""

    shard: int
    member: int
    reason: str


@dataclass(frozen=True)
class Chunk:
    """Samples on their way to the training process.

    images: [n, H, W, 3] uint8. tokens, mask, labels: as in ``Conditioning``. index: [n] int64 positions.
    failure: why there is nothing in it, when something went wrong that no other sample can make up for.
    """

    images: Tensor | None = None
    tokens: Tensor | None = None
    mask: Tensor | None = None
    labels: Tensor | None = None
    index: Tensor | None = None
    broken: tuple[Broken, ...] = ()
    failure: str = ""

    def pin_memory(self) -> Chunk:
        tensors = {name: value.pin_memory() for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **tensors)


class Samples:
    """A map from positions to samples, of which torch's DataLoader asks for many at once (``__getitems__``).

    Without state, safe to send to a process.
    """

    def __init__(self, collection: Collection, order: Order, recipe: Recipe, tokenize: Tokenize | None):
        self.collection, self.order, self.recipe, self.tokenize = collection, order, recipe, tokenize

    def __getitems__(self, positions: Sequence[int]) -> Chunk:
        try:
            return self.chunk(positions)
        except InputError as error:  # through a process border an exception would become a traceback in a string
            return Chunk(failure=str(error))

    def chunk(self, positions: Sequence[int]) -> Chunk:
        """The samples at ``positions``. InputError when one of them cannot be replaced either."""
        window = self.recipe.window
        height, width = (window.size, window.size) if window else self.recipe.size
        images = np.empty((len(positions), height, width, 3), dtype=np.uint8)
        captions, labels, broken = [], [], []
        draws = self._draws(positions)
        for i, raw in enumerate(self._read_all(self._places(positions))):
            try:
                images[i], caption, label = self._make(raw, draws[i])
            except BrokenSample:
                images[i], caption, label, bad = self._replacement(positions[i], draws[i])
                broken += bad
            captions.append(caption)
            labels.append(label)
        tokens, mask = self.tokenize(captions, self.recipe.text_length) if self.tokenize else (None, None)
        return Chunk(
            images=torch.from_numpy(images),
            tokens=tokens,
            mask=mask,
            labels=torch.tensor(labels) if self.recipe.num_classes else None,
            index=torch.tensor(positions, dtype=torch.int64),
            broken=tuple(broken),
        )

    def _draws(self, positions: Sequence[int]) -> np.ndarray:
        """[n, 6] in [0, 1): what a random crop covers, its top, its left; the flip; a window's top and left."""
        purposes = ("crop size", "crop top", "crop left", "flip", "window top", "window left")
        return np.stack([random_uniform(self.recipe.seed, purpose, positions) for purpose in purposes], axis=1)

    def _places(self, positions: Sequence[int]) -> list[tuple[int, int]]:
        shards, members = self.order.samples_at(positions)
        return list(zip(shards.tolist(), members.tolist(), strict=True))

    def _replacement(self, position: int, draw: np.ndarray) -> tuple[np.ndarray, str, int, list[Broken]]:
        """The first usable sample at ``position`` or after it in its stream, and the broken ones before it."""
        broken = []
        for k in range(REPLACEMENTS):
            place = self._places([position + self.order.streams * k])[0]
            try:
                return *self._make(self._read(place), draw), broken
            except BrokenSample as error:
                broken.append(Broken(*place, str(error)))
        last = self.collection.describe(*place)
        raise InputError(f"{REPLACEMENTS} samples in a row cannot be used, the last {last}: {broken[-1].reason}")

    def _read(self, place: tuple[int, int]) -> Raw:
        return self.collection.read(place[0], self.collection.spans(*place))

    def _read_all(self, places: Sequence[tuple[int, int]]) -> Iterator[Raw]:
        """Read samples in order; remote ones several at once."""
        remote = [i for i, (shard, _) in enumerate(places) if self.collection.in_place(shard)]
        if not remote:
            yield from map(self._read, places)
            return
        spans = [self.collection.spans(*place) for place in places]  # not in threads: it may load a table
        with ThreadPoolExecutor(REQUESTS) as pool:
            ahead = {i: pool.submit(self.collection.read, places[i][0], spans[i]) for i in remote}
            for i, place in enumerate(places):
                yield ahead[i].result() if i in ahead else self._read(place)

    def _make(self, raw: Raw, draw: np.ndarray) -> tuple[np.ndarray, str, int]:
        """Pixels [H, W, 3] uint8, caption and class of a sample. BrokenSample when they cannot be had."""
        recipe = self.recipe
        if raw.problem:
            raise BrokenSample(raw.problem)
        caption = read_caption(raw.caption, recipe.caption_field) if recipe.caption_field else ""
        label = _read_label(raw.label, recipe.num_classes) if recipe.num_classes else 0
        cover = random_cover(recipe.size, draw[0]) if recipe.random_crop else recipe.size
        image, full = decode_image(raw.image, recipe.max_pixels, None if recipe.exact_decode else cover)
        if recipe.random_crop:
            pixels = random_crop(image, full, recipe.size, draw[:3])
        else:
            pixels = center_crop(image, full, recipe.size)
        if recipe.window:
            pixels = random_window(pixels, recipe.window, draw[4:])
        return (pixels[:, ::-1] if recipe.random_flip and draw[3] < 0.5 else pixels), caption, label


def _read_label(data: bytes, num_classes: int) -> int:
    text = data.decode("ascii", "replace").strip()
    if not (text.isdigit() and len(text) < 20 and int(text) < num_classes):
        raise BrokenSample(f"its class {text[:20]!r} is not a number below --num_classes {num_classes}")
    return int(text)
