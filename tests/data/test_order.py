import pickle

import numpy as np
import pytest
from refusing import refused

from diff_dalle.data.order import Order, streams_for
from diff_dalle.distributed.world import deal

COUNTS = [[1], [0, 5, 0, 7], list(range(20)), [300, 1, 1]]


@pytest.mark.parametrize("counts", [*COUNTS, [3], [10] * 7], ids=str)
@pytest.mark.parametrize("streams, window", [(1, 1), (3, 4), (8, 100), (50, 4)])
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_epoch_has_every_sample_once(counts, streams, window, shuffle):
    order = Order(counts, 7, streams, window, shuffle)
    everything = [(shard, member) for shard, count in enumerate(counts) for member in range(count)]
    for epoch in range(3):
        places = order.samples_at(epoch * order.samples + np.arange(order.samples))
        assert sorted(zip(*places, strict=True)) == everything


def test_a_position_means_the_same_however_it_is_asked_for():
    """Alone, in any batch, from any process, after any history and across epochs."""
    counts, size = [10] * 9, 300
    expected = list(zip(*Order(counts, 1, 8, 4).samples_at(np.arange(size)), strict=True))
    assert [Order(counts, 1, 8, 4).sample_at(p) for p in range(0, size, 37)] == expected[::37]
    for world in (1, 2, 4, 8, 16):
        found = [None] * size
        for rank in range(world):
            order = pickle.loads(pickle.dumps(Order(counts, 1, 8, 4)))
            for start in range(rank, size, world * 5):
                mine = np.arange(start, min(start + world * 5, size), world)
                for p, place in zip(mine, zip(*order.samples_at(mine), strict=True), strict=True):
                    found[p] = place
        assert found == expected


def test_seed_and_epoch_change_the_order():
    counts = [20] * 5
    runs = [Order(counts, seed, 8, 4).samples_at(np.arange(100) + start) for seed, start in ((0, 0), (1, 0), (0, 100))]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        same = (runs[one][0] == runs[other][0]) & (runs[one][1] == runs[other][1])
        assert same.mean() < 0.1


def test_every_seed_and_epoch_has_an_order_of_shards_of_its_own():
    """In windows of one shard, nothing but the order of shards decides which one comes next."""
    orders = [Order([2] * 40, seed, streams=1, window=1) for seed in (5, 6)]
    epochs = [order.samples_at(np.arange(80) + 80 * epoch)[0] for order in orders for epoch in range(6)]
    assert len({tuple(shards.tolist()) for shards in epochs}) == 12


def test_every_seed_and_epoch_mixes_a_window_in_its_own_way():
    mixes = [Order([99], seed, 1, 1).samples_at(np.arange(99) + 99 * epoch)[1] for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(members.tolist()) for members in mixes}) == 4


@pytest.mark.parametrize("world", [1, 2, 8])
def test_each_shard_is_read_by_about_one_process_and_nearly_in_order(world):
    order = Order([50] * 64, 3, streams=8, window=2)
    readers = np.zeros((64, world), dtype=bool)
    for rank in range(world):
        shards, _ = order.samples_at(np.arange(rank, order.samples, world))
        readers[shards, rank] = True
        one_stream = shards[:: 8 // world]
        for i in range(0, len(one_stream) - 100, 50):  # as many consecutive samples come from two windows at most
            assert len(np.unique(one_stream[i : i + 100])) <= 4
    assert readers.sum(1).mean() <= 1.25  # only the windows that two streams share


def test_without_shuffling_the_streams_read_the_shards_in_order():
    shards, members = Order([4, 4], 0, streams=1, window=4, shuffle=False).samples_at(range(8))
    assert shards.tolist() == [0] * 4 + [1] * 4 and members.tolist() == [0, 1, 2, 3] * 2


def test_the_streams_divide_among_the_nodes():
    for nodes in range(1, 17):
        assert streams_for(nodes) % nodes == 0 and 8 <= streams_for(nodes) < 8 + nodes


@pytest.mark.parametrize("nodes, local", [(1, 3), (2, 8), (3, 1), (5, 3), (8, 1), (12, 3), (16, 8)])
def test_each_shard_is_read_on_one_node(nodes, local):
    """Whatever the number of processes per node, except for the windows that two streams share."""
    streams, counts = streams_for(nodes), [3] * 1000
    order = Order(counts, 1, streams, window=4)
    slots = deal([node for node in range(nodes) for _ in range(local)])
    assert sorted(slots) == list(range(nodes * local))
    readers = np.zeros((len(counts), nodes), dtype=bool)
    for rank, slot in enumerate(slots):
        readers[order.samples_at(np.arange(slot, order.samples, len(slots)))[0], rank // local] = True
    assert readers.any(1).all() and (readers.sum(1) > 1).sum() <= (streams - 1) * order.window


def test_processes_are_dealt_to_nodes_wherever_they_are():
    assert deal([0] * 5) == [0, 1, 2, 3, 4]  # one node: ranks
    assert deal([0, 0, 0, 1, 1, 1]) == [0, 2, 4, 1, 3, 5]
    assert deal([0, 1, 0, 1]) == [0, 1, 2, 3]  # ranks dealt to the nodes in turn
    assert deal([0, 1, 1]) == [0, 1, 2]  # nodes of different sizes


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("samples", [2, 7, 16, 40])
def test_replacements_follow_the_stream_and_reach_every_sample(samples, shuffle):
    """Also where the streams of all epochs hold the same samples."""
    order = Order([samples], 0, streams=8, window=4, shuffle=shuffle)
    for position in (0, 3, 100):
        others_of_stream = max(0, samples // 8 - 1)
        _, stream = order.samples_at(position + 8 * np.arange(1, others_of_stream + 1))
        assert order.successors(position, 1, others_of_stream)[1].tolist() == stream.tolist()
        others = set(range(samples)) - {order.sample_at(position)[1]}
        assert others <= set(order.successors(position, 1, 40 * samples if shuffle else samples - 1)[1].tolist())
        assert order.successors(position, 5, 3)[1].tolist() == order.successors(position, 1, 7)[1][4:].tolist()


def test_memory_is_bounded():
    order = Order([10] * 100, 0, streams=2, window=1)
    order.samples_at(np.arange(3000))
    assert len(order._mixes) <= 4 and len(order._epochs) <= 2


@pytest.mark.parametrize(
    ("counts", "streams", "window", "message"),
    [
        ([1], 0, 4, "streams is 0, but must be at least 1"),
        ([1], 8, 0, "shuffle_window is 0, but must be at least 1"),
        ([0, 0], 8, 4, "there are no samples"),
    ],
)
def test_impossible_orders_are_refused(counts, streams, window, message):
    with refused(message):
        Order(counts, 0, streams, window)


def test_resampling_draws_shards_with_replacement_and_equal_chance():
    order = Order([5] * 50, 3, 8, 4, resample=True)
    shards, _ = order.samples_at(np.arange(200 * order.samples))
    found = np.stack([np.bincount(epoch, minlength=50) for epoch in shards.reshape(200, -1)]) // 5
    assert (found.sum(1) == 50).all() and not (found[0] == found[1]).all()
    share = np.bincount(found.reshape(-1), minlength=4)[:4] / found.size
    assert np.abs(share - np.exp(-1) / np.array([1, 1, 2, 6])).max() < 0.02  # Poisson, for many shards
    assert abs(found.mean(0) - 1).max() < 0.35


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("streams", [1, 8])
def test_resampled_epochs_have_their_length_and_existing_samples(counts, streams):
    order = Order(counts, 5, streams, 3, resample=True)
    shards, members = order.samples_at(np.arange(20 * order.samples))
    assert (members >= 0).all() and (members < np.asarray(counts)[shards]).all()
    for position in range(0, len(shards), 1 + len(shards) // 40):
        found = Order(counts, 5, streams, 3, resample=True).sample_at(position)
        assert found == (shards[position], members[position])


def test_a_drawn_shard_gives_each_sample_once():
    """Twice when it is drawn twice; only the last one of an epoch may be cut."""
    order = Order([6] * 10, 1, 1, 2, resample=True)
    shards, members = order.samples_at(np.arange(order.samples))
    for shard in range(10):
        times = np.bincount(members[shards == shard], minlength=6)
        assert len(set(times.tolist())) == 1
