"""Matrices are dealt evenly, worked on once each, a few at a time, and every holder has its rows of the results."""

import itertools
import random

import pytest
from ranks import run_ranks_of

from diff_dalle.distributed.dealing import dealt


def cost(shape):
    return shape[0] ** 2 * shape[1]


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_the_work_is_even_complete_and_bounded_in_each_turn(ranks):
    generator = random.Random(ranks)
    small = [(generator.choice([4, 9, 30]), generator.choice([3, 9, 36])) for _ in range(120)]
    shapes = (*small, (50, 60))
    turns = dealt(shapes, cost, ranks, 1000)
    assert all(len(turn) == ranks for turn in turns)
    hands = [hand for turn in turns for hand in turn]
    assert sorted(itertools.chain(*hands)) == list(range(121))
    sizes = [[shapes[number][0] * shapes[number][1] for number in hand] for hand in hands]
    assert max(map(sum, sizes)) == 3000 and all(sum(size) <= 1000 or len(size) == 1 for size in sizes)
    work = [sum(cost(sorted(shapes[n])) for turn in turns for n in turn[rank]) for rank in range(ranks)]
    assert max(work) <= 1.34 * max(sum(work) / ranks, cost((50, 60)))


def test_one_rank_has_all_matrices_of_a_shape_and_their_transposes_together():
    shapes = ((4, 9), (9, 9), (9, 4), (6, 6), (4, 9))
    assert dealt(shapes, cost, 1, 1) == [[[1]], [[3]], [[0, 2, 4]]]


EXCHANGES = """
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from diff_dalle.distributed import dealing
from diff_dalle.distributed.dealing import Dealing, Holders
from diff_dalle.distributed.parallel import _mesh, own_rows

SHAPES = ((7, 5), (6, 6), (2, 9), (1, 3), (40, 3), (3, 4))  # rows that the ranks cannot divide, or fewer than ranks

def cost(shape):
    return shape[0] * shape[1]

def check(world, mode, limit, dtype):
    whole = [torch.arange(float(m * n)).view(m, n) + 0.1 * i for i, (m, n) in enumerate(SHAPES)]
    held = whole
    if mode != "ddp":
        mesh = _mesh(ShardingConfig(mode, shard_processes=2).groups(world), "cpu")
        places = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
        held = [distribute_tensor(matrix, mesh, places) for matrix in whole]
    worked, largest = [], 0

    def work(matrices):
        nonlocal largest
        assert all(matrix.dtype == dtype for matrix in matrices)
        worked.extend(tuple(matrix.shape) for matrix in matrices)
        numbers = [matrix.numel() for matrix in matrices]
        largest = max(largest, sum(numbers) if len(numbers) > 1 else 0)
        return [(matrix + matrix.sum(1, keepdim=True)).T.contiguous().T for matrix in matrices]

    parts = local(held)
    made = Dealing(SHAPES, cost, Holders.of(held[0], world), torch.empty(0, dtype=dtype))
    with mock.patch.object(dealing, "LIMIT", limit):
        found = dict(made.results(parts.__getitem__, work))
    for number, matrix in enumerate(whole):
        (expected,) = work([matrix.to(dtype)])
        worked.pop()
        first = own_rows(held[number])[0]
        assert torch.equal(found[number], expected[first : first + len(parts[number])]), (mode, number)
        assert found[number].dtype == dtype
    assert sorted(sum(world.gather(worked), [])) == sorted(SHAPES), (mode, worked)
    assert largest <= limit, (mode, limit, largest)

for mode in {modes!r}:
    for limit in (10, 60, 1000):
        for dtype in (torch.float32, torch.bfloat16):
            check(world, mode, limit, dtype)
world.print("fine")
"""


@pytest.mark.parametrize(("size", "modes"), [(1, ["ddp"]), (2, ["ddp", "fsdp"]), (4, ["ddp", "fsdp", "hsdp"])])
def test_each_holder_has_its_rows_of_what_one_rank_made_of_the_whole(size, modes):
    assert "fine" in run_ranks_of(size, EXCHANGES.format(modes=modes))
