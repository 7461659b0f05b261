"""The order of batches of several image sizes."""

import pickle

import numpy as np
import pytest
from refusing import refused

from diff_dalle.data.buckets import BucketOrder

SIZES = ((16, 16), (12, 24), (24, 12), (8, 32))


def random_buckets(counts, weights=(0.5, 0.3, 0.19, 0.01)) -> list[np.ndarray]:
    """The bucket of each sample of shards with these numbers of samples."""
    generator = np.random.default_rng(0)
    return [generator.choice(len(weights), n, p=weights) for n in counts]


def ordered(buckets, seed=1, batch=8, streams=8, window=4, **options) -> BucketOrder:
    return BucketOrder(SIZES, buckets, seed, batch, streams, window, **options)


def totals(buckets) -> np.ndarray:
    return np.bincount(np.concatenate(buckets), minlength=len(SIZES))


def places(order, positions) -> list[tuple[int, int]]:
    return list(zip(*map(np.ndarray.tolist, order.samples_at(positions)), strict=True))


def buckets_of(order: BucketOrder, buckets, positions) -> np.ndarray:
    """The bucket of the sample at each position, from the assignment."""
    return np.array([buckets[shard][member] for shard, member in places(order, positions)])


@pytest.mark.parametrize("batch, shuffle", [(1, True), (6, False), (16, True)])
def test_a_global_batch_is_of_one_bucket_and_has_its_size(batch, shuffle):
    buckets = random_buckets([40, 0, 60, 25])
    order = ordered(buckets, 3, batch, 4, 2, shuffle=shuffle)
    assert order.samples == 125
    found = buckets_of(order, buckets, np.arange(batch * 200)).reshape(200, batch)
    assert (found == found[:, :1]).all()
    sizes = [order.size_at(position) for position in range(0, batch * 200, batch)]
    assert sizes == [SIZES[bucket] for bucket in found[:, 0]]
    assert order.size_at(batch * 7 + batch - 1) == sizes[7]


@pytest.mark.parametrize("batch, shuffle", [(4, True), (16, True), (16, False)])
def test_every_bucket_visits_each_of_its_samples_once_per_epoch_and_loses_none(batch, shuffle):
    buckets = random_buckets([30, 50, 20])
    order = ordered(buckets, 5, batch, 4, shuffle=shuffle)
    found = places(order, np.arange(batch * 150))
    of_bucket = buckets_of(order, buckets, np.arange(batch * 150))
    for bucket, count in enumerate(totals(buckets)):
        visits = [place for place, b in zip(found, of_bucket, strict=True) if b == bucket]
        everything = {(s, m) for s, numbers in enumerate(buckets) for m in np.flatnonzero(numbers == bucket)}
        assert len(everything) == count > 0 and len(visits) > 2 * count
        for start in range(0, len(visits) - count + 1, count):  # consecutive, across the borders of batches
            assert set(visits[start : start + count]) == everything
        if shuffle and count > 9:
            assert visits[:count] != visits[count : 2 * count]


@pytest.mark.parametrize("weights", [(0.5, 0.3, 0.19, 0.01), (0.997, 0.001, 0.001, 0.001), (0.25,) * 4])
def test_after_any_number_of_batches_every_bucket_has_had_its_share(weights):
    buckets = random_buckets([2000, 1000], weights)
    order = ordered(buckets)
    share = totals(buckets) / 3000
    turns = np.array([SIZES.index(order.size_at(8 * batch)) for batch in range(3000)])
    counts = np.cumsum(turns[:, None] == np.arange(4), axis=0)
    deviation = np.abs(counts - share * np.arange(1, 3001)[:, None])
    assert (deviation < 1 + 4 * share + 1e-9).all() and deviation.max() < 2.5


def test_the_seed_decides_which_bucket_begins():
    buckets = random_buckets([400], (0.4, 0.3, 0.2, 0.1))
    starts = [[ordered(buckets, seed, 4).size_at(4 * k) for k in range(6)] for seed in range(40)]
    assert len({tuple(start) for start in starts}) > 20 and len({start[0] for start in starts}) == 4
    assert starts[7] == [ordered(buckets, 7, 4).size_at(4 * k) for k in range(6)]


def test_a_position_means_the_same_however_it_is_asked_for():
    buckets = random_buckets([50, 70])
    expected = places(ordered(buckets), np.arange(800))
    order = pickle.loads(pickle.dumps(ordered(buckets)))
    assert [order.sample_at(position) for position in range(799, -1, -13)] == expected[::-13]
    scattered = np.random.default_rng(0).permutation(800)
    assert places(order, scattered) == [expected[p] for p in scattered]


def test_positions_far_ahead_continue_the_schedule():
    """The batch is found directly: what it is must agree with a walk from any earlier point."""
    buckets = random_buckets([300, 200])
    for start in (10**6, 10**12):
        order = ordered(buckets, 2, 4)
        turns = [order._turn(batch) for batch in range(start, start + 300)]
        for bucket in range(4):
            numbers = [turn for b, turn in turns if b == bucket]
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        assert abs(turns[0][1] / start - totals(buckets)[turns[0][0]] / 500) < 1e-4


def test_looking_up_a_position_takes_no_longer_far_ahead():
    """Counted in steps of the schedule, not in seconds."""
    order = BucketOrder([(16, 16 + i) for i in range(100)], [np.arange(5000) % 100], 0, 64, 8, 4)
    steps, due = [], BucketOrder._due
    order._due = lambda *event: steps.append(event) or due(order, *event)
    for batch in (0, 10, 10**5, 10**10):
        steps.clear()
        order._find_turn(batch)
        assert len(steps) <= 100 + 2 * 100 + 1


def test_replacements_are_of_the_same_bucket():
    buckets = random_buckets([50, 70])
    order = ordered(buckets, streams=4)
    for position in range(0, 200, 9):
        (bucket,) = buckets_of(order, buckets, [position])
        shards, members = order.successors(position, 1, 50)
        assert {buckets[s][m] for s, m in zip(shards, members, strict=True)} == {bucket}
        assert len(set(zip(shards.tolist(), members.tolist(), strict=True))) > 1 or totals(buckets)[bucket] == 1


@pytest.mark.parametrize("world", [2, 4])
def test_shards_are_read_by_few_processes_and_nearly_in_order(world):
    """As without buckets, because all buckets permute the shards alike."""
    buckets = random_buckets([100] * 64, (0.4, 0.3, 0.2, 0.1))
    order = ordered(buckets, 3, 16, window=2)
    readers = np.zeros((64, world), dtype=bool)
    for rank in range(world):
        shards, _ = order.samples_at(np.arange(rank, order.samples, world))
        readers[shards, rank] = True
        for i in range(0, len(shards) - 200, 100):
            assert len(np.unique(shards[i : i + 200])) <= 6 * 8 // world
    assert readers.sum(1).mean() <= 1.5


@pytest.mark.parametrize(
    ("buckets", "batch", "message"),
    [
        ([np.array([], dtype=int)], 4, "there are no samples"),
        (random_buckets([5]), 0, "global batch size is 0, but must be at least 1"),
    ],
)
def test_impossible_orders_are_refused(buckets, batch, message):
    with refused(message):
        ordered(buckets, batch=batch)
