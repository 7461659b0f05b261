"""Looking at shards: their captions; and counts of members, caption lengths, image sizes, broken samples, and a grid of
examples.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image
from tqdm import tqdm

from .. import storage
from ..config import Fault, InputError, faults_of, named, option, quantity, redact, section, settings
from ..config.bounds import MAX_BATCH, MAX_SIDE
from ..images.decode import IMAGE_KINDS, BrokenSample, Size, decode_image, picture_facts
from ..images.grid import image_grid
from ..images.transforms import center_crop
from .accounting import reported_in
from .arrays import KINDS
from .buckets import AspectBuckets, AspectConfig, kept_share
from .captions import caption_kind, caption_option, read_caption
from .collection import Collection, collect
from .filters import filters_option, parse_filters
from .first_look import zero_embeddings
from .index import Indexed, count_kinds, index_shards
from .order import Order
from .settings import DataConfig
from .shard_table import IMAGE, split_at_dots
from .shards import ShardFiles
from .sources import find_shards
from .spec import Required
from .survey import rejections, survey_shards


def caption_texts(sources: Sequence[str], caption_field: str, quiet: bool = False) -> Iterator[str]:
    """Every caption of shards in order, with a progress bar unless ``quiet``. Empty and unreadable ones are left out.
    Arguments and errors as for ``DataConfig``."""
    kind = caption_kind(caption_field)
    found = collect(sources, Required({kind: "captions"}), ShardFiles())
    with tqdm(total=found.samples, desc="reading captions", unit="caption", disable=quiet or None) as bar:
        for place in found.in_order():
            bar.update()
            raw = found.fetch(*place)
            with contextlib.suppress(BrokenSample):
                raw.check()
                yield read_caption(raw.members[kind], caption_field)


def read_captions(sources: Sequence[str], caption_field: str, limit: int = 0) -> list[str]:
    """The first ``limit`` captions, 0 = all, as prompts. Raises InputError when there are no shards or no captions."""
    captions = list(itertools.islice(caption_texts(sources, caption_field, quiet=True), limit or None))
    if not captions:
        remedy = f"set another {named('caption_field')}"
        raise InputError(f"{', '.join(sources)} holds no caption that is neither empty nor unreadable: {remedy}")
    return captions


NAMED = 8  # shards in a line
SIDES = (64, 128, 256, 512, 1024)  # histogram edges for the shorter side of images, in pixels
SQUARE = np.array([[1, 1]])
EXAMPLE = 128  # width and height of an example in pixels


@settings
class InspectionConfig:
    """Inspecting shards"""

    data_dir: tuple[str, ...] = option(
        (), "shards: folders, tars, globs, brace ranges, URLs, pipe:COMMAND or .yml lists of these"
    )
    caption_field: str = caption_option()
    dataset_filters: tuple[str, ...] = filters_option()
    look_at: int = option(1000, "samples to decode, spread evenly over all shards; 0 = all", least=0)
    examples: int = option(8, "samples in the grid", least=1, most=MAX_BATCH)
    grid: str = option("inspect.png", "file for a grid of examples with captions; empty = none", was=("picture",))
    max_pixels: int = option(DataConfig.max_pixels, "maximum width × height of an image; larger ones count as broken")
    index_cache: str = option(
        DataConfig.index_cache,
        "folder for the index of the shards; empty = beside the shards, else in the user's cache",
    )
    image_size: int = option(
        256,
        "side in pixels of a square with the buckets' area",
        needs=("multi_aspect_ratio",),
        least=1,
        most=MAX_SIDE,
    )
    aspect: AspectConfig = section(AspectConfig)

    def faults(self) -> Iterator[Fault]:
        yield from faults_of(lambda: caption_kind(self.caption_field))
        yield from faults_of(lambda: parse_filters(self.dataset_filters))


@dataclass(frozen=True)
class Look:
    """A decoded sample: a small center crop, the image's (height, width), the caption, "" when there is none, and what
    decoding changes."""

    pixels: np.ndarray
    size: Size
    caption: str
    notes: tuple[str, ...]


def inspect_shards(config: InspectionConfig) -> tuple[list[str], Image.Image | None]:
    """Lines of text about the shards, and a grid of examples (None when no sample can be decoded).

    Raises InputError when there are no samples at all.
    """
    files = ShardFiles(index_cache=config.index_cache)
    entries = index_shards(find_shards(config.data_dir), files)
    kinds, kind = count_kinds(entries), caption_kind(config.caption_field)
    lines = [*_contents(entries, kinds), *_embeddings(entries, kinds, files), *_packed(entries)]
    if not kinds.keys() & set(IMAGE_KINDS):
        return [*lines, f"no images ({', '.join(IMAGE_KINDS)})"], None
    captioned = kind in kinds
    if not captioned:
        lines.append(f"no captions: no .{kind} members (caption_field)")
    members = {IMAGE: "images", kind: "captions"} if captioned else {IMAGE: "images"}
    filters = parse_filters(config.dataset_filters)
    required = Required(members, filters=filters, sizes=bool(config.aspect.multi_aspect_ratio))
    found = Collection(entries, required, files)
    if not found.samples:
        return [*lines, "no sample has both an image and a caption"], None
    if captioned:
        lines.append(f"{quantity(found.samples, 'sample')} with image and caption, {found.left_out:,} without")
    if required.needs_survey:
        surveys = survey_shards(entries, required, files)
        found.take(surveys)
    if filters:
        lines += [*rejections(filters, surveys), f"{quantity(found.samples, 'sample')} left by the filters"]
        if not found.samples:
            return lines, None
    if found.sizes is not None:
        lines += _aspects(np.concatenate(found.sizes), config.aspect.buckets(config.image_size**2))
    looks, broken = _look(found, config, captioned)
    lines += _findings(looks, broken, captioned)
    examples = looks[:: max(1, len(looks) // config.examples)][: config.examples]
    if not examples:
        return lines, None
    captions = [look.caption or "(no caption)" for look in examples]
    return lines, image_grid(np.stack([look.pixels for look in examples]), captions, columns=4)


def _contents(entries: Sequence[Indexed], kinds: Counter[str]) -> list[str]:
    samples = sum(entry.summary.samples for entry in entries)
    if not samples:
        problem = entries[0].summary.problem or "is empty"
        raise InputError(f"{named('data_dir')} holds no samples; {entries[0].path} {problem}")
    size = sum(entry.summary.size for entry in entries)
    lines = [f"{quantity(len(entries), 'shard')}, {quantity(samples, 'sample')}, {size / 1e6:,.1f} MB"]
    lines.append("members: " + ", ".join(f".{kind} {count:,}" for kind, count in kinds.most_common(12)))
    if dotted := split_at_dots({kind: number for kind, number in kinds.items() if kind[:1].isdigit()}):
        lines.append(dotted)  # of a control's cond.png there is nothing to say
    lines += [f"damaged: {redact(entry.path)} {entry.summary.problem}" for entry in entries if entry.summary.problem]
    return lines


def _embeddings(entries: Sequence[Indexed], kinds: Counter[str], files: ShardFiles) -> list[str]:
    """Of each kind of member that holds embeddings: the shards without any, and how many are the mark of a missing
    one."""
    lines: list[str] = []
    for kind in (kind for kind in kinds if kind.endswith(KINDS)):
        without = [entry for entry in entries if entry.summary.samples and not entry.summary.count([kind])]
        if without:
            names = ", ".join(redact(entry.path) for entry in without[:NAMED])
            rest = ", …" if len(without) > NAMED else ""
            lines.append(f"no .{kind} in {quantity(len(without), 'shard')}: {names}{rest}")
        zeros, looked = zero_embeddings(Collection(entries, Required({kind: "embeddings"}), files), kind)
        if zeros:
            lines.append(f"{zeros:,} of {looked:,} .{kind} looked at are all zeros, the mark of a missing embedding")
    return lines


def _packed(entries: Sequence[Indexed]) -> list[str]:
    """What the packing of these shards reported, where its report lies beside them."""
    folders = sorted({storage.split(entry.path)[0] for entry in entries if storage.reads_by_offset(entry.path)})
    lines: list[str] = []
    for folder in folders:
        if reported := reported_in(folder):
            lines += [f"packed into {redact(folder)}:", *(f"  {line}" for line in reported)]
    return lines


def _look(found: Collection, config: InspectionConfig, captioned: bool) -> tuple[list[Look], list[tuple[str, str]]]:
    """Samples spread evenly over the shards; and the names of the broken ones, with what is wrong."""
    kind = caption_kind(config.caption_field)
    count = min(config.look_at or found.samples, found.samples)
    looks: list[Look] = []
    broken: list[tuple[str, str]] = []
    order = Order(found.counts, seed=0, streams=1, window=1, shuffle=False)
    places = np.stack(order.samples_at(np.arange(count) * found.samples // count), 1)
    for shard, member in tqdm(places.tolist(), desc="decoding", unit="sample", disable=None):
        raw = found.fetch(shard, member)
        try:
            raw.check()
            image, size = decode_image(raw.members[IMAGE], config.max_pixels, (EXAMPLE, EXAMPLE))
            caption = read_caption(raw.members[kind], config.caption_field) if captioned else ""
            notes = picture_facts(raw.members[IMAGE]).notes
            looks.append(Look(center_crop(image, size, (EXAMPLE, EXAMPLE)), size, caption, notes))
        except BrokenSample as reason:
            broken.append((found.describe(shard, member), str(reason)))
    return looks, broken


def _findings(looks: Sequence[Look], broken: Sequence[tuple[str, str]], captioned: bool) -> list[str]:
    lines = [f"decoded {quantity(len(looks) + len(broken), 'sample')}: {len(broken):,} broken"]
    reasons = Counter(reason.partition(":")[0] for _, reason in broken)
    lines += [f"  {count:,} × {reason}" for reason, count in reasons.most_common()]
    lines += [f"  {name}: {reason}" for name, reason in broken[:10]]
    notes = Counter(note for look in looks for note in look.notes)
    lines += [f"{quantity(count, 'image')}: {note}" for note, count in notes.most_common()]
    if not looks:
        return lines
    if captioned:
        for unit, lengths in (
            ("characters", [len(look.caption) for look in looks]),
            ("words", [len(look.caption.split()) for look in looks]),
        ):
            low, median, high, top = np.percentile(lengths, [0, 50, 95, 100]).round().astype(int)
            lines.append(f"captions in {unit}: shortest {low}, median {median}, 95 % up to {high}, longest {top}")
    sides = np.digitize([min(look.size) for look in looks], SIDES)
    names = [f"< {SIDES[0]}", *(f"{a}-{b - 1}" for a, b in itertools.pairwise(SIDES)), f"≥ {SIDES[-1]}"]
    counts = np.bincount(sides, minlength=len(names)).tolist()
    return [*lines, "shorter side in pixels:", *_histogram(names, counts)]


def _histogram(names: Sequence[str], counts: Sequence[int]) -> list[str]:
    """A line with a bar for each that occurs."""
    return [
        f"  {name:>9} {count:6,} {'#' * max(1, round(50 * count / sum(counts)))}"
        for name, count in zip(names, counts, strict=True)
        if count
    ]


def _aspects(images: np.ndarray, buckets: AspectBuckets) -> list[str]:
    """The number of images in each bucket, and the part that cropping keeps. images: [n, 2] height and width."""
    numbers = buckets.nearest(images)
    names = [f"{width}×{height}" for height, width in buckets.sizes]
    counts = np.bincount(numbers, minlength=len(names)).tolist()
    order = sorted(range(len(names)), key=lambda i: -counts[i])
    lines = [
        "samples by width×height of the nearest bucket:",
        *_histogram([names[i] for i in order], [counts[i] for i in order]),
    ]
    readable = (images > 0).all(1)
    if readable.any():
        shares = [kept_share(images, sizes)[readable].mean() for sizes in (np.array(buckets.sizes)[numbers], SQUARE)]
        lines.append(f"pixels kept by cropping: {shares[0]:.1%} in buckets, {shares[1]:.1%} in squares")
    return lines
