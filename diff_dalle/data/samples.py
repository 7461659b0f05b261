"""Positions → samples: read, decoded, cropped and tokenized. This is what the worker processes run.

A sample that cannot be used is replaced by the next usable one of its stream, the same one every time.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from ..config import InputError
from ..images.decode import BrokenSample, decode_image, image_size
from ..images.preprocessing import decoding_cover, transform
from ..images.transforms import (
    Saliency,
    Size,
    center_crop,
    check_same_shape,
    random_cover,
    random_crop,
    random_window,
    smart_crop,
)
from ..randomness import random_uniform, random_uniforms
from .arrays import MissingEmbedding
from .buckets import BucketOrder
from .captions import caption_kind, read_caption, read_record
from .collection import Collection, Raw, Unavailable
from .order import SampleOrder
from .settings import DataConfig
from .shard_table import IMAGE
from .spec import ImageSpec, Rejected, SampleSpec

MAX_BROKEN = 256  # broken samples skipped for one position; more mean that the data set is broken
MAX_UNAVAILABLE = 3  # samples skipped for one position because storage does not answer: each has taken minutes
# Samples that filters may reject for one position, or that have no embedding: at 0.1 % accepted, 1 position in 20,000
# fails.
MAX_REJECTED = 10_000
LOOKAHEAD = 16  # candidates for a replacement that are looked up at once
REQUESTS = 16  # concurrent remote reads per worker
READ_AHEAD = 1 << 22  # bytes read before their images are decoded, which evicts the reading code from the CPU's caches
NO_PIXELS = np.empty((0, 0, 0), dtype=np.uint8)


@dataclass(frozen=True)
class Recipe:
    """How a sample is made: what it must hold, and the settings that concern it.

    augment: False = nothing about it is random, except a window.
    saliency: finds what a crop should show; see ``smart_crop``.
    """

    spec: SampleSpec
    config: DataConfig
    seed: int
    augment: bool
    saliency: Saliency | None = None

    @property
    def is_random(self) -> bool:
        """Whether crops or flips are random."""
        config = self.config
        augmented = config.random_crop or config.random_flip or config.aspect.crops_at_random or self.saliency
        return bool((self.spec.image and self.spec.image.window) or (self.augment and augmented))


@dataclass(frozen=True)
class Broken:
    """A broken sample that was replaced, or one without an embedding."""

    shard: int
    member: int
    reason: str
    is_missing: bool = False


@dataclass
class Lost:
    """Samples that were skipped.

    broken:   the broken ones, and those without embeddings.
    rejected: the number of samples that each filter rejected; reasons: for the last one.
    """

    broken: list[Broken] = field(default_factory=list)
    rejected: Counter[str] = field(default_factory=Counter)
    reasons: dict[str, str] = field(default_factory=dict)
    missing: int = 0
    unavailable: int = 0

    def add(self, shard: int, member: int, error: BrokenSample) -> None:
        if isinstance(error, Rejected):
            self.rejected[error.filter] += 1
            self.reasons[error.filter] = str(error)
        else:
            is_missing = isinstance(error, MissingEmbedding)
            self.broken.append(Broken(shard, member, str(error), is_missing))
            self.missing += is_missing
            self.unavailable += isinstance(error, Unavailable)

    @property
    def too_many(self) -> bool:
        return (
            len(self.broken) - self.missing >= MAX_BROKEN
            or self.missing >= MAX_REJECTED
            or self.unavailable >= MAX_UNAVAILABLE
            or self.rejected.total() >= MAX_REJECTED
        )


@dataclass(frozen=True)
class Chunk:
    """Samples on their way to the training process.

    index:    [n] int64 positions.
    images:   [n, H, W, C] uint8; [n, 0, 0, 0] when the spec asks for no images.
    cond:     conditions, named as by ``Conditioning.present``; a control is uint8 [n, H, W, C].
    captions: the texts that were tokenized; "" each when the spec asks for no captions.
    lost:     the samples that were replaced.
    failure:  why the chunk is empty, when a shard changed or no sample could replace a broken one.
    """

    index: Tensor
    images: Tensor
    cond: dict[str, Tensor] = field(default_factory=dict)
    captions: tuple[str, ...] = ()
    lost: Lost = field(default_factory=Lost)
    failure: InputError | None = None

    def pin_memory(self) -> Chunk:
        return replace(
            self,
            index=self.index.pin_memory(),
            images=self.images.pin_memory(),
            cond={name: value.pin_memory() for name, value in self.cond.items()},
        )


@dataclass(frozen=True)
class _Sample:
    """A decoded sample: pixels [H, W, C] uint8 and its caption, empty where not asked for; the other conditions by
    name, the control [H, W, C] uint8."""

    pixels: np.ndarray
    caption: str
    values: dict[str, np.ndarray | np.int64]


class Samples(Dataset[Chunk]):
    """A map from positions to samples; torch's DataLoader asks for many at once (``__getitems__``).

    Stateless but for caches, and safe to send to another process.
    """

    def __init__(self, collection: Collection, order: SampleOrder, recipe: Recipe):
        self.collection, self.order, self.recipe = collection, order, recipe
        self.caption_kind = caption_kind(recipe.config.caption_field)

    def __getitems__(self, positions: Sequence[int]) -> Chunk:
        try:
            return self.chunk(positions)
        except InputError as error:  # DataLoader would turn an exception in a worker into a traceback in a string
            return Chunk(torch.tensor(positions), torch.empty(0), failure=error)

    def chunk(self, positions: Sequence[int]) -> Chunk:
        """The samples at ``positions``. Raises InputError when a sample cannot be used and none can replace it."""
        image = self._image_spec(positions)
        shape = image.shape if image and image.read else NO_PIXELS.shape
        images = np.empty((len(positions), *shape), dtype=np.uint8)
        samples, lost = [], Lost()
        draws, places = self._draws(positions), self._places(*self.order.samples_at(positions))
        for i, raw in enumerate(self._read_all(places)):
            try:
                sample = self._decode(raw, image, draws[i], positions[i])
            except BrokenSample as error:
                sample = self._replacement(positions[i], places[i], error, image, draws[i], lost)
            images[i] = sample.pixels
            samples.append(sample)
        return Chunk(
            torch.tensor(positions, dtype=torch.int64),
            torch.from_numpy(images),
            self._conditions(samples),
            tuple(sample.caption for sample in samples),
            lost,
        )

    def _image_spec(self, positions: Sequence[int]) -> ImageSpec | None:
        """The spec of the images at these positions; with buckets, of their bucket's size."""
        image = self.recipe.spec.image
        if image is None or not isinstance(self.order, BucketOrder):
            return image
        sizes = {self.order.size_at(position) for position in positions}
        if len(sizes) != 1:
            raise ValueError(f"samples of different buckets cannot form a batch: their sizes are {sorted(sizes)}")
        return replace(image, size=sizes.pop())

    def size_of(self, shard: int, member: int) -> Size:
        """(height, width) of the image of a usable sample."""
        assert self.recipe.spec.image is not None
        return self.order.size_of(shard, member) if isinstance(self.order, BucketOrder) else self.recipe.spec.image.size

    def unaugmented(self, shard: int, member: int, raw: Raw) -> tuple[np.ndarray, str]:
        """Pixels [H, W, C] uint8 and caption of a usable sample, as ``fetch`` has read it, of a recipe without anything
        random. Raises BrokenSample when it cannot be used."""
        assert self.recipe.spec.image is not None
        sample = self._decode(raw, replace(self.recipe.spec.image, size=self.size_of(shard, member)), [], 0)
        return sample.pixels, sample.caption

    def _conditions(self, samples: Sequence[_Sample]) -> dict[str, Tensor]:
        spec = self.recipe.spec
        cond: dict[str, Tensor] = {}
        captions = [sample.caption for sample in samples]
        for caption in spec.read_captions:
            cond |= zip(caption.fields, caption.tokenize(captions, caption.length), strict=True)
        cond |= {
            name: torch.from_numpy(np.stack([each.values[name] for each in samples])) for name in samples[0].values
        }
        for states, mask in (embedding.fields for embedding in spec.embeddings if embedding.length):
            cond[mask] = cond[states].any(2)  # tokens of zeros are padding
        return cond

    def _draws(self, positions: Sequence[int]) -> list[list[float]]:
        """[n, 6] in [0, 1): a random crop's scale, top and left; the flip; a window's top and left. [n, 0] if none of
        these is random."""
        if not self.recipe.is_random:
            return [[]] * len(positions)
        purposes = ("crop size", "crop top", "crop left", "flip", "window top", "window left")
        return random_uniforms(self.recipe.seed, purposes, positions).tolist()

    def _places(self, shards: np.ndarray, members: np.ndarray) -> list[tuple[int, int]]:
        return list(zip(shards.tolist(), members.tolist(), strict=True))

    def _replacement(
        self,
        position: int,
        place: tuple[int, int],
        error: BrokenSample,
        image: ImageSpec | None,
        draws: list[float],
        lost: Lost,
    ) -> _Sample:
        """The first usable sample after ``position`` in its stream.

        place, error: of the sample to be replaced. lost: collects the skipped samples.
        Raises InputError when too many consecutive samples are broken or rejected.
        """
        here = Lost()
        for step in itertools.count(1):
            here.add(*place, error)
            lost.add(*place, error)
            if here.too_many:
                break
            if step % LOOKAHEAD == 1:
                ahead = self._places(*self.order.successors(position, step, LOOKAHEAD))
            place = ahead[(step - 1) % LOOKAHEAD]
            try:
                record = None
                if self.recipe.spec.filters:  # of samples they reject, only the json is read
                    record = self._accepted(self.collection.fetch(*place, ["json"]))
                return self._decode(self.collection.fetch(*place), image, draws, position, record)
            except BrokenSample as reason:
                error = reason
        last = self.collection.describe(*place)
        if here.rejected.total() < MAX_REJECTED:
            raise InputError(f"{len(here.broken)} consecutive samples cannot be used, the last {last}: {error}")
        (name, count), *_ = here.rejected.most_common(1)
        raise InputError(
            f"the filter {name!r} rejected {count:,} of {here.rejected.total() + len(here.broken):,} consecutive "
            f"samples and none was usable, the last {last}: {here.reasons[name]}; relax the filter"
        )

    def _read_all(self, places: Sequence[tuple[int, int]]) -> Iterator[Raw]:
        """Read samples in order; remote ones concurrently."""
        if not any(map(self.collection.in_place, {shard for shard, _ in places})):
            ahead, size = [], 0
            for place in places:
                ahead.append(raw := self.collection.fetch(*place))
                size += sum(map(len, raw.members.values()))
                if size >= READ_AHEAD:
                    yield from ahead
                    ahead, size = [], 0
            yield from ahead
            return
        with ThreadPoolExecutor(REQUESTS) as pool:
            yield from pool.map(lambda place: self.collection.fetch(*place), places)

    def _accepted(self, raw: Raw) -> dict:
        """The sample's json object. Raises Rejected, naming the filter, unless all filters accept it."""
        raw.check()
        record = read_record(raw.members["json"])
        for condition in self.recipe.spec.filters:
            condition.check(record)
        return record

    def _decode(
        self, raw: Raw, image: ImageSpec | None, draws: list[float], position: int, record: dict | None = None
    ) -> _Sample:
        """A sample from its members. Raises Rejected unless all filters accept it, and BrokenSample when one of its
        members cannot be used.

        record: its json object, if the filters have accepted it already.
        """
        recipe, spec = self.recipe, self.recipe.spec
        raw.check()
        if spec.filters and record is None:
            record = self._accepted(raw)
        caption = ""
        if spec.read_captions:
            chance = self._draw(position, "old caption") if recipe.augment else None
            caption = read_caption(raw.members[self.caption_kind], recipe.config.caption_field, record, chance)
        values: dict[str, np.ndarray | np.int64] = {}
        if spec.num_classes:
            values["labels"] = _read_label(raw.members["cls"], spec.num_classes)
        for each in spec.embeddings:
            found = each.read(raw.members, raw.embeddings)
            values[each.fields[0]] = each.grid.unpacked(found, image.size) if each.grid and image else found
        pixels = self._pixels(raw.members[IMAGE], image, draws, position) if image and image.read else NO_PIXELS
        if image and spec.control:
            like, control = replace(image, channels=spec.control.channels), raw.members[spec.control.member.lower()]
            values["control"] = self._pixels(control, like, draws, position)
            check_same_shape(image_size(raw.members[IMAGE]), image_size(control), image.size)
        return _Sample(pixels, caption, values)

    def _pixels(self, data: bytes, image: ImageSpec, draws: list[float], position: int) -> np.ndarray:
        """[H, W, C] uint8, cropped and flipped. Raises BrokenSample when the image cannot be decoded."""
        recipe, config = self.recipe, self.recipe.config
        flipped = recipe.augment and config.random_flip and draws[3] < 0.5
        if config.transforms:
            pixels = self._transformed(data, image.size, position)
        else:
            cropped = recipe.augment and config.random_crop
            cover = random_cover(image.size, draws[0]) if cropped else image.size
            decoded, full = self._decoded(data, cover)
            if recipe.saliency:
                pixels = smart_crop(decoded, full, image.size, recipe.saliency, draws[:3] if recipe.augment else None)
            elif cropped or (recipe.augment and config.aspect.crops_at_random):
                pixels = random_crop(decoded, full, image.size, cover, draws[1:3])
            else:
                pixels = center_crop(decoded, full, image.size)
        if image.window:
            pixels = random_window(pixels, image.window, draws[4:])
        if image.channels == 1:
            pixels = np.asarray(Image.fromarray(np.ascontiguousarray(pixels)).convert("L"))[..., None]
        return pixels[:, ::-1] if flipped else pixels

    def _decoded(self, data: bytes, cover: Size | None) -> tuple[Image.Image, Size]:
        """An image and its full size, decoded for one that covers ``cover``."""
        config = self.recipe.config
        cover = None if config.exact_decode else cover
        return decode_image(data, config.max_pixels, cover, config.decode_scale, config.decoder)

    def _transformed(self, data: bytes, size: Size, position: int) -> np.ndarray:
        """[H, W, 3] uint8 after the transforms; scaled to cover ``size`` and cropped if they end at another one."""
        transforms = self.recipe.config.transforms
        decoded, full = self._decoded(data, decoding_cover(transforms, size))

        def draw(purpose: str) -> float:
            return self._draw(position, purpose)()

        return center_crop(*transform(decoded, full, transforms, draw if self.recipe.augment else None), size)

    def _draw(self, position: int, purpose: str) -> Callable[[], float]:
        """A number in [0, 1) for a position, made when it is asked for."""
        return lambda: float(random_uniform(self.recipe.seed, purpose, [position])[0])


def _read_label(data: bytes, num_classes: int) -> np.int64:
    text = data.decode("ascii", "replace").strip()
    if not (text.isdigit() and len(text) < 20 and int(text) < num_classes):
        raise BrokenSample(f"its class is {text[:20]!r}, but must be an integer below num_classes {num_classes}")
    return np.int64(text)
