import pickle
from collections import Counter

import numpy as np
import pytest
import torch
from shard_making import Letters, captions_of, encoded, load, random_image, sample, take, tar_bytes

from diff_dalle.config import InputError
from diff_dalle.data.buckets import BucketOrder, Buckets
from diff_dalle.data.collection import collect
from diff_dalle.data.loader import Loader
from diff_dalle.data.shard_table import IMAGE
from diff_dalle.data.shards import ShardFiles
from diff_dalle.data.sources import find_shards
from diff_dalle.data.spec import CaptionSpec, ImageSpec, Required, SampleSpec
from diff_dalle.images.decode import decode_image

SIZES = ((16, 16), (12, 24), (24, 12), (8, 32))


def random_buckets(counts, weights=(0.5, 0.3, 0.19, 0.01), seed=0) -> Buckets:
    generator = np.random.default_rng(seed)
    return Buckets(SIZES, tuple(generator.choice(len(weights), n, p=weights) for n in counts))


def totals(buckets: Buckets) -> np.ndarray:
    return np.bincount(np.concatenate(buckets.numbers), minlength=len(buckets.sizes))


def buckets_of(order: BucketOrder, buckets: Buckets, positions) -> np.ndarray:
    """The bucket of the sample at each position, from the assignment."""
    shards, members = order.samples_at(positions)
    return np.array([buckets.numbers[s][m] for s, m in zip(shards, members, strict=True)])


# ------------------------------------------------------------------------------------------------------- the order


@pytest.mark.parametrize("batch, shuffle", [(1, True), (6, False), (16, True)])
def test_a_global_batch_is_of_one_bucket_and_has_its_size(batch, shuffle):
    buckets = random_buckets([40, 0, 60, 25])
    order = BucketOrder(buckets, 3, batch, streams=4, window=2, shuffle=shuffle)
    assert order.samples == 125
    found = buckets_of(order, buckets, np.arange(batch * 200)).reshape(200, batch)
    assert (found == found[:, :1]).all()
    sizes = [order.size_at(position) for position in range(0, batch * 200, batch)]
    assert sizes == [SIZES[bucket] for bucket in found[:, 0]]
    assert order.size_at(batch * 7 + batch - 1) == sizes[7]


@pytest.mark.parametrize("batch, shuffle", [(4, True), (16, True), (16, False)])
def test_every_bucket_visits_each_of_its_samples_once_per_epoch_and_loses_none(batch, shuffle):
    buckets = random_buckets([30, 50, 20])
    order = BucketOrder(buckets, 5, batch, streams=4, window=4, shuffle=shuffle)
    shards, members = order.samples_at(np.arange(batch * 150))
    of_bucket = buckets_of(order, buckets, np.arange(batch * 150))
    for bucket, count in enumerate(totals(buckets)):
        here = of_bucket == bucket
        visits = list(zip(shards[here].tolist(), members[here].tolist(), strict=True))
        everything = {(s, m) for s, numbers in enumerate(buckets.numbers) for m in np.flatnonzero(numbers == bucket)}
        assert len(everything) == count > 0 and len(visits) > 2 * count
        for start in range(0, len(visits) - count + 1, count):  # consecutive, across the borders of batches
            assert set(visits[start : start + count]) == everything
        if shuffle and count > 9:
            assert visits[:count] != visits[count : 2 * count]


@pytest.mark.parametrize("weights", [(0.5, 0.3, 0.19, 0.01), (0.997, 0.001, 0.001, 0.001), (0.25,) * 4])
def test_after_any_number_of_batches_every_bucket_has_had_its_share(weights):
    buckets = random_buckets([2000, 1000], weights)
    order = BucketOrder(buckets, 1, 8, 8, 4)
    share = totals(buckets) / 3000
    turns = np.array([SIZES.index(order.size_at(8 * batch)) for batch in range(3000)])
    counts = np.cumsum(turns[:, None] == np.arange(4), axis=0)
    deviation = np.abs(counts - share * np.arange(1, 3001)[:, None])
    assert (deviation < 1 + 4 * share + 1e-9).all() and deviation.max() < 2.5


def test_the_seed_decides_which_bucket_begins():
    buckets = random_buckets([400], (0.4, 0.3, 0.2, 0.1))
    starts = [[BucketOrder(buckets, seed, 4, 8, 4).size_at(4 * k) for k in range(6)] for seed in range(40)]
    assert len({tuple(start) for start in starts}) > 20 and len({start[0] for start in starts}) == 4
    assert starts[7] == [BucketOrder(buckets, 7, 4, 8, 4).size_at(4 * k) for k in range(6)]


def test_a_position_means_the_same_however_it_is_asked_for():
    buckets = random_buckets([50, 70])
    expected = list(zip(*BucketOrder(buckets, 1, 8, 8, 4).samples_at(np.arange(800)), strict=True))
    order = pickle.loads(pickle.dumps(BucketOrder(buckets, 1, 8, 8, 4)))
    assert [order.sample_at(position) for position in range(799, -1, -13)] == expected[::-13]
    scattered = np.random.default_rng(0).permutation(800)
    assert list(zip(*order.samples_at(scattered), strict=True)) == [expected[p] for p in scattered]


def test_positions_far_ahead_continue_the_schedule():
    """The batch is found directly: what it is must agree with a walk from any earlier point."""
    buckets = random_buckets([300, 200])
    for start in (10**6, 10**12):
        order = BucketOrder(buckets, 2, 4, 8, 4)
        turns = [order._turn(batch) for batch in range(start, start + 300)]
        for bucket in range(4):
            numbers = [turn for b, turn in turns if b == bucket]
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        assert abs(turns[0][1] / start - totals(buckets)[turns[0][0]] / 500) < 1e-4


def test_looking_up_a_position_takes_no_longer_far_ahead():
    """Counted in steps of the schedule, not in seconds."""
    buckets = Buckets(tuple((16, 16 + i) for i in range(100)), (np.arange(5000) % 100,))
    order = BucketOrder(buckets, 0, 64, 8, 4)
    steps, due = [], BucketOrder._due
    order._due = lambda *event: steps.append(event) or due(order, *event)
    for batch in (0, 10, 10**5, 10**10):
        steps.clear()
        order._find_turn(batch)
        assert len(steps) <= 100 + 2 * 100 + 1


def test_a_bucket_smaller_than_a_batch_repeats_its_samples_evenly():
    buckets = Buckets(SIZES, (np.array([0] * 97 + [1] * 3),))
    order = BucketOrder(buckets, 0, 16, 8, 4)
    found = Counter(member for _, member in zip(*order.samples_at(np.arange(16 * 1000)), strict=True))
    assert set(found) == set(range(100)) and min(found.values()) >= 150 and max(found.values()) <= 170


def test_replacements_are_of_the_same_bucket():
    buckets = random_buckets([50, 70])
    order = BucketOrder(buckets, 1, 8, streams=4, window=4)
    for position in range(0, 200, 9):
        bucket = buckets.numbers[order.sample_at(position)[0]][order.sample_at(position)[1]]
        shards, members = order.successors(position, 1, 50)
        assert {buckets.numbers[s][m] for s, m in zip(shards, members, strict=True)} == {bucket}
        assert len(set(zip(shards.tolist(), members.tolist(), strict=True))) > 1 or totals(buckets)[bucket] == 1


@pytest.mark.parametrize("world", [2, 4])
def test_shards_are_read_by_few_processes_and_nearly_in_order(world):
    """As without buckets, because all buckets permute the shards alike."""
    buckets = random_buckets([100] * 64, (0.4, 0.3, 0.2, 0.1))
    order = BucketOrder(buckets, 3, 16, streams=8, window=2)
    readers = np.zeros((64, world), dtype=bool)
    for rank in range(world):
        shards, _ = order.samples_at(np.arange(rank, order.samples, world))
        readers[shards, rank] = True
        for i in range(0, len(shards) - 200, 100):
            assert len(np.unique(shards[i : i + 200])) <= 6 * 8 // world
    assert readers.sum(1).mean() <= 1.5


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Buckets(SIZES, (np.array([0, 4]),)), "shard 0 has samples in buckets 0 to 4, but must use .* 0 to 3"),
        (lambda: Buckets(SIZES, (np.array([]), np.array([-1, 2]))), "shard 1 has samples in buckets -1 to 2"),
        (lambda: Buckets(SIZES, (np.array([0.5]),)), "bucket numbers of shard 0 are float64, but must be integers"),
        (lambda: BucketOrder(Buckets(SIZES, (np.array([]),)), 0, 4, 8, 4), "there are no samples"),
        (lambda: BucketOrder(random_buckets([5]), 0, 0, 8, 4), "global batch size is 0"),
    ],
)
def test_impossible_buckets_are_refused(make, message):
    with pytest.raises(InputError, match=message):
        make()


# ------------------------------------------------------------------------------------------------------ the loader


@pytest.fixture
def shards(tmp_path):
    """40 images of several aspect ratios; sample 11 is broken."""
    number = 0
    for shard, count in enumerate((17, 9, 14)):
        files = []
        for i in range(number, number + count):
            height, width = [(40, 40), (30, 61), (50, 24), (44, 46)][i * i % 7 % 4]
            image = b"no image" if i == 11 else encoded(random_image(height, width, i), "PNG")
            files += sample(f"{i:04d}", f"caption of {i:04d}", image)
        (tmp_path / f"{shard}.tar").write_bytes(tar_bytes(files))
        number += count
    return tmp_path


def buckets_by_aspect(folder) -> Buckets:
    """The bucket of the nearest aspect ratio for every sample, from the headers of the images."""
    found = collect(find_shards([str(folder)]), Required({IMAGE: "images", "txt": "captions"}), ShardFiles())
    numbers = []
    for shard, count in enumerate(found.counts):
        row = []
        for member in range(count):
            data = found.fetch(shard, member).members[IMAGE]
            height, width = (40, 40) if data == b"no image" else decode_image(data, 10**6)[1]
            row.append(np.argmin([abs(np.log(height / width * w / h)) for h, w in SIZES]))
        numbers.append(np.array(row))
    return Buckets(SIZES, tuple(numbers))


def loader(folder, batch_size=8, buckets=None, **options) -> Loader:
    spec = SampleSpec(ImageSpec((16, 16)), (CaptionSpec(Letters(), 20),))
    return load(folder, spec, 3, batch_size, buckets=buckets or buckets_by_aspect(folder), **options)


def test_batches_have_the_sizes_of_their_buckets(shards):
    """And in them the samples of the bucket, each as the center crop of that size."""
    buckets = buckets_by_aspect(shards)
    number_of = dict(enumerate(np.concatenate(buckets.numbers).tolist()))
    assert len(set(number_of.values())) == 3
    data = loader(shards, buckets=buckets)
    seen, sizes = [], set()
    for k, batch in enumerate(take(data, 0, 40)):
        assert batch.images.shape == (8, 3, *data.order.size_at(8 * k))
        keys = [int(caption[-4:]) for caption in captions_of(batch)]
        assert {SIZES[number_of[key]] for key in keys} == {tuple(batch.images.shape[2:])}
        seen += keys
        sizes.add(tuple(batch.images.shape[2:]))
    assert set(seen) == set(range(40)) - {11} and len(sizes) == 3 and data.broken > 0
    plain = Loader(data.config, SampleSpec(ImageSpec(data.order.size_at(0))), seed=3, shuffle=False)
    order = [int(plain.describe(position)[-4:]) for position in range(40)]
    first = take(loader(shards, buckets=buckets), 0, 1)[0]
    whole = plain.batch_at([order.index(int(caption[-4:])) for caption in captions_of(first)])
    assert torch.equal(first.images, whole.images)


def test_batches_larger_than_a_chunk_have_one_size(shards):
    batches = take(loader(shards, 80, num_workers=2, max_broken=1.0), 0, 2)
    assert [len(batch) for batch in batches] == [80] * 2


def test_what_does_not_fit_is_refused(shards):
    with pytest.raises(InputError, match="buckets are for 39 samples in 3 shards, but there are 40 in 3"):
        numbers = buckets_by_aspect(shards).numbers
        loader(shards, buckets=Buckets(SIZES, (*numbers[:2], numbers[2][1:])))
    data = loader(shards)
    with pytest.raises(InputError, match="position 12 is not a multiple of the global batch size 8"):
        take(data, 12, 1)
    with pytest.raises(ValueError, match="samples of different buckets"):
        data.batch_at(range(200))
