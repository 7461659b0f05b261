"""Buckets by aspect ratio: their sizes, which image goes where, and batches of them."""

import json
import math
import pickle
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image
from refusing import refused
from shard_making import (
    Letters,
    assert_same,
    assert_shared,
    captions_of,
    encoded,
    load,
    make_tar,
    random_image,
    take,
)

from diff_dalle.config import from_dict, to_dict
from diff_dalle.data import survey
from diff_dalle.data.buckets import AspectBuckets, AspectConfig, kept_share
from diff_dalle.data.inspection import InspectionConfig, inspect_shards
from diff_dalle.data.loader import DataConfig, Loader
from diff_dalle.data.spec import CaptionSpec, ImageSpec, SampleSpec
from diff_dalle.images.transforms import Window, covering_size

RATIOS = ("1/1", "1/2", "1/3", "2/3", "3/4", "1/5", "2/5", "3/5", "4/5", "1/6", "5/6", "9/16")  # as published


def published(side: int, factor: int = 32) -> AspectBuckets:
    return AspectConfig(RATIOS, bucket_factor=factor).buckets(side * side)


# ---------------------------------------------------------------------------------------------------------- the sizes


def test_the_published_ratios_give_the_published_sizes():
    """Height and width; 4/5 and 5/6 coincide, so 12 ratios with their reciprocals, 23, give 21."""
    tall = [(1056, 512), (1312, 416), (928, 608), (864, 640), (1696, 320), (1184, 480), (960, 576), (832, 672)]
    tall += [(1856, 288), (1024, 576)]
    table = published(768)
    assert table.sizes == ((768, 768), *tall, *((width, height) for height, width in tall))
    assert len(table.ratios) == 23 and len(table.sizes) == 21


@pytest.mark.parametrize(("side", "count"), [(1024, 23), (768, 21), (384, 19), (256, 17)])
def test_sizes_have_about_the_pixels_of_the_square(side, count):
    """Rounded down on both sides by less than the factor."""
    table = published(side)
    assert len(set(table.sizes)) == len(table.sizes) == count
    for height, width in table.sizes:
        assert height % 32 == width % 32 == 0
        assert height * width <= side * side < (height + 32) * (width + 32)
        assert (width, height) in table.sizes


@pytest.mark.parametrize("factor", [8, 16, 32, 64])
def test_no_side_is_below_the_factor(factor):
    table = published(64, factor)
    assert factor <= min(map(min, table.sizes)) <= max(24, factor) and table.sizes[0] == (64, 64)
    assert published(16, 32).sizes == ((32, 32),)


def test_sizes_are_exact_where_floating_point_is_not():
    """sqrt(768² · 9 / 16) is 576 exactly; a side that is a hair too small would lose a whole factor."""
    for number in range(1, 400):
        ratio = Fraction(number * number)
        (height, width), *_ = AspectBuckets([ratio], (7 * number) ** 2, 7).sizes
        assert (height, width) == (7, 7 * number * number)


def test_reciprocals_are_added_once():
    table = AspectBuckets([Fraction(2), Fraction(1, 2), Fraction(1)], 64 * 64, 8)
    assert table.ratios == (2, Fraction(1, 2), 1)
    decimal = AspectConfig(("0.5", "1.0", "1.5/1")).buckets(64 * 64)
    assert decimal.ratios == (Fraction(1, 2), 1, Fraction(3, 2), 2, Fraction(2, 3))


# --------------------------------------------------------------------------------------------------- the assignment


def size_of(table, height, width):
    return table.sizes[table.nearest(np.array([[height, width]]))[0]]


def test_an_image_goes_to_the_nearest_ratio():
    table = published(768)
    assert size_of(table, 500, 500) == (768, 768)
    assert size_of(table, 600, 900) == (608, 928) and size_of(table, 900, 600) == (928, 608)
    assert size_of(table, 1080, 1920) == (576, 1024) and size_of(table, 10, 900) == (288, 1856)
    with np.errstate(all="raise"):  # broken: found out when it is read
        assert size_of(table, 0, 0) == (768, 768)


def test_ratios_are_compared_by_difference_or_by_logarithm():
    """Between 1 and 3: the arithmetic mean is 2, the geometric mean 1.732."""
    linear, log = (
        AspectConfig(("1", "3"), bucket_factor=8, bucket_distance=d).buckets(64**2) for d in ("linear", "log")
    )
    square, wide = (64, 64), (32, 104)
    assert [size_of(linear, 100, width) for width in (199, 201)] == [square, wide]
    assert [size_of(log, 1000, width) for width in (1731, 1733)] == [square, wide]
    assert [size_of(log, height, 1000) for height in (1731, 1733)] == [square, wide[::-1]]
    assert size_of(linear, 1500, 1000) == wide[::-1]  # 2/3, the middle of 1 and 1/3, is at 1500


def test_a_share_of_the_images_goes_to_any_ratio():
    """A function of the seed and of the number among all images, however they lie in shards."""
    table = AspectConfig(("1/1", "1/2"), bucket_factor=8).buckets(64 * 64)
    images = np.tile([[64, 64]], (9000, 1))
    (numbers,) = table.assign([images], 3, 0.3)
    counts = np.bincount(numbers, minlength=3) / 9000
    assert np.abs(counts - [0.8, 0.1, 0.1]).max() < 0.02
    parts = table.assign([images[:10], images[:0], images[10:]], 3, 0.3)
    assert [len(part) for part in parts] == [10, 0, 8990] and (np.concatenate(parts) == numbers).all()
    assert not (table.assign([images], 4, 0.3)[0] == numbers).all()
    assert not table.assign([images], 3, 0.0)[0].any()
    assert np.abs(np.bincount(table.assign([images], 3, 1.0)[0]) / 9000 - 1 / 3).max() < 0.02


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"multi_aspect_ratio": ("1/0",)}, "'1/0', but a ratio is WIDTH/HEIGHT or a number, above 0"),
        *(({"multi_aspect_ratio": (ratio,)}, f"'{ratio}'") for ratio in ["0/1", "-1/2", "1e999999999", "1:2", "1/2/3"]),
        ({"multi_aspect_ratio": ("1/2", "1/1", "2/4")}, "has 2/4 and 1/2, which are equal"),
        ({"bucketeer_random_ratio": 1.1}, "bucketeer_random_ratio is 1.1, but must be at least 0 and at most 1"),
        ({"bucket_factor": 0}, "bucket_factor is 0, but must be at least 1"),
    ],
)
def test_impossible_ratios_are_refused(settings, message):
    with refused(message):
        AspectConfig(**settings)


def test_a_file_may_hold_ratios_and_numbers():
    found = from_dict(DataConfig, {"aspect": {"multi_aspect_ratio": ["1/1", 1.5, 2]}})
    assert found.aspect.multi_aspect_ratio == ("1/1", "1.5", "2")
    assert from_dict(DataConfig, to_dict(found)) == found


@pytest.mark.parametrize("name", ["random_crop", "resample"])
def test_what_contradicts_buckets_is_refused(name):
    with refused(f"{name} and aspect.multi_aspect_ratio exclude each other"):
        DataConfig(aspect=AspectConfig(("1/1",)), **{name: True})


# -------------------------------------------------------------------------------------------------------- the crop


def test_the_share_of_pixels_that_cropping_keeps():
    images = np.array([[100, 100], [100, 200], [300, 100], [64, 64]])
    sizes = np.array([[64, 64], [64, 64], [64, 64], [32, 64]])
    np.testing.assert_allclose(kept_share(images, sizes), [1, 1 / 2, 1 / 3, 1 / 2])
    generator, table = np.random.default_rng(0), published(512)
    images = generator.integers(200, 900, (200, 2))
    sizes = np.array(table.sizes)[table.nearest(images)]
    exact = [
        size[0] * size[1] / math.prod(covering_size(tuple(i), tuple(size)))
        for i, size in zip(images.tolist(), sizes.tolist(), strict=True)
    ]
    np.testing.assert_allclose(kept_share(images, sizes), exact, rtol=0.02)
    assert kept_share(images, sizes).mean() > 0.9 > 0.7 > kept_share(images, np.array([[1, 1]])).mean()


# -------------------------------------------------------------------------------------------------------- the loader

ASPECT = AspectConfig(("1/1", "1/2"), 0.0, bucket_factor=8)  # 16×16, 8 wide × 16 high, 16 wide × 8 high
SHAPES = ((20, 20), (12, 30), (30, 14), (40, 42))
IMAGES = SampleSpec(ImageSpec((16, 16)))
SPEC = replace(IMAGES, captions=(CaptionSpec(Letters(), 20),))


def shape_of(number: int) -> tuple[int, int]:
    return SHAPES[number * number % 7 % 4]


@pytest.fixture
def shards(tmp_path):
    """40 images of several aspect ratios and forms in three shards; sample 11 is broken."""
    number = 0
    for shard, count in enumerate((17, 9, 14)):
        files = []
        for i in range(number, number + count):
            kind, form = [("jpg", "JPEG"), ("png", "PNG"), ("webp", "WEBP")][i % 3]
            image = b"no image" if i == 11 else encoded(random_image(*shape_of(i), i), form)
            record = json.dumps({"score": i}).encode()
            files += [(f"{i:04d}.{kind}", image), (f"{i:04d}.txt", f"caption of {i:04d}".encode())]
            files += [(f"{i:04d}.json", record)]
        make_tar(tmp_path / f"{shard}.tar", files)
        number += count
    return tmp_path


def loader(folder, spec=SPEC, aspect=ASPECT, **options) -> Loader:
    return load(folder, spec, 3, aspect=aspect, **{"max_broken": 1.0, **options})


def numbers_of(batch) -> list[int]:
    return [int(caption[-4:]) for caption in captions_of(batch)]


def size_of_batch(batch) -> tuple[int, ...]:
    return tuple(batch.images.shape[2:])


def assert_nearest(batch):
    """Each of its images is nearest to its size."""
    assert {expected_size(number) for number in numbers_of(batch)} == {size_of_batch(batch)}


def expected_size(number: int) -> tuple[int, int]:
    height, width = shape_of(number)
    return (16, 16) if abs(width / height - 1) < 0.25 else (16, 8) if height > width else (8, 16)


def test_each_batch_has_the_size_of_its_images(shards):
    data = loader(shards)
    assert data.samples == 40
    seen, sizes = Counter(), set()
    for batch in take(data, 0, 60):
        assert_nearest(batch)
        seen.update(numbers_of(batch))
        sizes.add(size_of_batch(batch))
    assert len(sizes) == 3 and set(seen) == set(range(40)) - {11}
    assert max(seen.values()) - min(seen.values()) <= 4  # 6 epochs; the replacement of 11 counts twice
    orders = [load(shards, SPEC, seed, aspect=ASPECT).order.samples_at(np.arange(40)) for seed in (3, 4)]
    assert not np.array_equal(*orders)


@pytest.mark.parametrize("position", [0, 24])
def test_ranks_and_workers_and_restarts_see_the_same_samples_and_sizes(shards, position):
    """1, 2 and 1 processes, from any batch of an epoch on, filters and augmentation included."""
    settings = {"aspect": replace(ASPECT, bucketeer_random_ratio=0.3), "dataset_filters": ("score > 2",)}
    batches = assert_shared(partial(loader, shards, random_flip=True, **settings), position)
    assert len(set(map(size_of_batch, batches))) > 1


def test_filters_and_buckets_together(shards):
    data = loader(shards, dataset_filters=("score >= 12", "score != 30"))
    kept = set(range(12, 40)) - {30}
    assert data.samples == len(kept) and data.collection.counts.tolist() == [5, 9, 13]
    seen = set()
    for batch in take(data, 0, 30):
        assert_nearest(batch)
        seen |= set(numbers_of(batch))
    assert seen == kept and data.broken == 0


def test_crops_are_random_by_position_or_in_the_center(shards):
    def images(crop="random", **options):
        batches = take(loader(shards, aspect=replace(ASPECT, bucket_crop=crop), **options), 0, 6)
        return torch.cat([batch.images.flatten() for batch in batches])

    center, at_random = images("center"), images()
    batch = take(loader(shards, aspect=replace(ASPECT, bucket_crop="center")), 0, 1)[0]
    plain = load(shards, SampleSpec(ImageSpec(size_of_batch(batch))), streams=1, shuffle=False)
    assert torch.equal(batch.images, plain.batch_at(numbers_of(batch)).images)
    assert len(center) == len(at_random) and not torch.equal(center, at_random)
    assert torch.equal(at_random, images())
    assert torch.equal(center, images("center")) and torch.equal(center, images(augment=False))


def test_a_random_crop_is_a_part_of_the_covering_image(tmp_path):
    """A ramp of 16 × 64 pixels in a square: any 16 of its columns, and never scaled."""
    ramp = Image.fromarray(np.tile(np.arange(64, dtype=np.uint8)[None, :, None] * 3, (16, 1, 3)))
    make_tar(tmp_path / "a.tar", [(f"{i}.png", encoded(ramp, "PNG")) for i in range(4)])
    data = loader(tmp_path, IMAGES, AspectConfig(("1/1",), bucket_factor=8))
    pixels = ((data.batch_at(range(200)).images + 1) * 127.5).round().int()
    starts = pixels[:, 0, 0, 0]
    assert torch.equal(pixels[:, 0], (starts[:, None, None] + 3 * torch.arange(16)).expand(-1, 16, -1))
    assert set(starts.tolist()) > {0, 144} and len(set(starts.tolist())) > 35


def test_held_out_images_go_to_the_nearest_ratio(shards):
    aspect = replace(ASPECT, bucketeer_random_ratio=1.0)
    for batch in take(loader(shards, aspect=aspect, augment=False, shuffle=False), 0, 20):
        assert_nearest(batch)
    sizes = [{expected_size(n) for n in numbers_of(batch)} for batch in take(loader(shards, aspect=aspect), 0, 20)]
    assert any(len(each) > 1 for each in sizes)


def test_the_first_samples_have_one_size(shards):
    data = loader(shards)
    first = data.first(11)
    assert len(first) == 11 and size_of_batch(first) == data.order.size_at(0)
    assert_same(first.select(slice(0, 4)), take(data, 0, 1)[0])
    plain = loader(shards, aspect=AspectConfig())
    assert_same(plain.first(11), plain.batch_at(range(11)))
    for each in (data, plain):
        assert each.first_captions(11) == captions_of(each.first(11))


def test_batches_larger_than_a_chunk_have_one_size(shards):
    data = loader(shards, batch_size=80, num_workers=2)
    assert [len(batch) for batch in take(data, 0, 2)] == [80] * 2
    with refused("position 12 is not a multiple of the global batch size 80"):
        take(data, 12, 1)
    with pytest.raises(ValueError, match="samples of different buckets"):
        data.batch_at(range(200))


def test_windows_and_missing_images(shards):
    spec = SampleSpec(ImageSpec((16, 16), window=Window(8, 4)))
    assert {batch.images.shape for batch in take(loader(shards, spec), 0, 8)} == {(4, 3, 8, 8)}
    with refused("multi_aspect_ratio is set, but no images are read"):
        loader(shards, replace(SPEC, image=None))
    with refused("crop_size is 12, but must be at most 8"):
        loader(shards, SampleSpec(ImageSpec((16, 16), window=Window(12, 4))))


# ------------------------------------------------------------------------------------------------- the sizes of images


def lengths_read(monkeypatch) -> list[int]:
    """The lengths of all data from which the size of an image is asked, from now on."""
    lengths, image_size = [], survey.image_size
    monkeypatch.setattr(survey, "image_size", lambda data: lengths.append(len(data)) or image_size(data))
    return lengths


def test_sizes_come_from_headers_and_are_read_once(shards, monkeypatch):
    """An index from before is extended; copies for workers do without the sizes."""
    loader(shards, IMAGES, AspectConfig())
    tables = {path: path.read_bytes() for path in (shards / ".diff_dalle_index").glob("*.npz")}
    reads = lengths_read(monkeypatch)
    data = loader(shards, IMAGES)
    found = data.collection.sizes
    assert [each.tolist() for each in found] == [
        [[0, 0] if i == 11 else list(shape_of(i)) for i in numbers]
        for numbers in (range(17), range(17, 26), range(26, 40))
    ]
    assert reads and all(path.read_bytes() == data for path, data in tables.items())
    reads.clear()
    again = loader(shards, IMAGES).collection.sizes
    assert not reads and all((a == b).all() for a, b in zip(found, again, strict=True))
    assert pickle.loads(pickle.dumps(data.collection)).sizes is None


def test_no_more_is_read_than_a_header_needs(tmp_path, monkeypatch):
    """Of jpegs with 0, 20 and 100 kB of another application's data before their size, a broken one, and a png, which
    may be turned by its end; a webp is read whole."""
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (700, 400, 3), dtype=np.uint8))
    plain, rest = encoded(noise), bytes(2 << 20)
    block = b"\xff\xef" + (20_002).to_bytes(2, "big") + bytes(20_000)
    webp = encoded(noise, "WEBP", quality=95)
    assert len(webp) > 1 << 16
    files = [(f"{i}.jpg", plain[:2] + block * count + plain[2:] + rest) for i, count in enumerate((0, 1, 5))]
    files += [("3.webp", webp), ("4.png", encoded(noise, "PNG")), ("5.jpg", b"\xff\xd8\xff" + bytes(9000))]
    make_tar(tmp_path / "a.tar", files)
    lengths = lengths_read(monkeypatch)
    assert loader(tmp_path, IMAGES).collection.sizes[0].tolist() == [[700, 400]] * 5 + [[0, 0]]
    header_and_end = 8192
    assert lengths == [4096, 4096, 65536, 4096, 65536, 1 << 20, 4096, len(webp), 4096, header_and_end, 4096, 9003]


def test_sideways_images_count_the_right_way_up(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    make_tar(tmp_path / "a.tar", [("a.jpg", encoded(random_image(20, 40), exif=exif))])
    data = loader(tmp_path, IMAGES)
    assert data.collection.sizes[0].tolist() == [[40, 20]] and data.order.size_at(0) == (16, 8)


# --------------------------------------------------------------------------------------------------------- inspection


def test_inspection_shows_the_buckets_and_what_cropping_keeps(shards):
    config = InspectionConfig((str(shards),), image_size=16, aspect=ASPECT, dataset_filters=("score >= 12",))
    lines, _ = inspect_shards(config)
    start = lines.index("samples by width×height of the nearest bucket:")
    counts = Counter(expected_size(number) for number in range(12, 40))
    expected = [(f"{width}×{height}", str(count)) for (height, width), count in counts.most_common()]
    assert sorted(tuple(line.split()[:2]) for line in lines[start + 1 : start + 4]) == sorted(expected)
    assert [int(line.split()[1]) for line in lines[start + 1 : start + 4]] == sorted(counts.values(), reverse=True)
    shapes = np.array([shape_of(number) for number in range(12, 40)])
    sizes = np.array([expected_size(number) for number in range(12, 40)])
    inside, square = kept_share(shapes, sizes).mean(), kept_share(shapes, np.array([[1, 1]])).mean()
    assert lines[start + 4] == f"pixels kept by cropping: {inside:.1%} in buckets, {square:.1%} in squares"
    assert inside > square
