"""Matrices are dealt evenly, worked on once each, a few at a time, and every holder has its rows of the results;
Muon's are orthogonalized so, with the results of one process."""

import itertools
import random

import pytest
from marks import slow
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


# ---------------------------------------------------------------------------------------------------------------- Muon


RUNS = """
from diff_dalle.checkpoints.content import replaced
from diff_dalle.distributed import dealing
from diff_dalle.distributed.parallel import Parts
from diff_dalle.training import muon
from diff_dalle.training.optim import LossScale
from diff_dalle.training.task import Task

MUON = OptimConfig("muon", lr=3e-3, muon_lr=2e-2, weight_decay=0.1, ema_rate=(0.9,))
MATRICES, STEPS, BAD = 4, 20, 7  # in step BAD the loss of one sample is not finite

class Fit(Task):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def losses(self, batch, draw):
        loss = (self.model(batch.images) - batch.images.flatten(2).mean(2)).square().mean(1)
        return {{"loss": torch.where(batch.index == 100 * BAD + 5, torch.nan, loss)}}

def build():
    torch.manual_seed(1)  # rows of weights that two or four ranks cannot divide, or fewer than ranks
    layers = [nn.Conv2d(3, 7, 3), nn.SiLU(), nn.Conv2d(7, 6, 1), nn.Flatten(), nn.LayerNorm(24), nn.Linear(24, 40)]
    return nn.Sequential(*layers, nn.SiLU(), nn.Linear(40, 3))

def pieces(world, step):
    index = torch.arange(world.rank, 8, world.size) + 100 * step
    draw = Draw(9, index)
    batch = Batch(draw.normal("image", (3, 4, 4)).tanh(), Conditioning(), index)
    return [(piece, Draw(0, piece.index)) for piece in batch.split(4 // world.size)]

def whole(state):
    return replaced(state, lambda tensor: tensor.full_tensor() if is_sharded(tensor) else tensor)

def run(world, mode="ddp", limit=dealing.LIMIT):
    # Losses, the whole state at the end, and of each call for matrices: their number, and the numbers in them.
    calls = []

    def recorded(matrices):
        calls.append((len(matrices), matrices.numel()))
        return orthogonalized(matrices)

    config = ShardingConfig(mode, shard_processes=2 if mode == "hsdp" else 0)
    parts = lambda network: Parts([network[5]], set(), (), None)
    model = build() if mode == "ddp" else build_sharded(build, parts, world, config)
    trainee = Trainee(Fit(model), MUON, "fp32", world)
    scale = trainee.optimizations[""].loss_scale = LossScale(torch.tensor(2.0**10), torch.zeros(()), True, 5)
    orthogonalized, losses = muon.orthogonalized, []
    with mock.patch.object(muon, "orthogonalized", recorded), mock.patch.object(dealing, "LIMIT", limit):
        for step in range(STEPS):
            trainee.update(pieces(world, step), step)
            losses.append(trainee.scalars()["loss"])
    assert trainee.bad_steps[0] == 1 and scale.scale == 2.0 ** (10 + STEPS // 5 - 2)
    own = [hashlib.sha256(repr(each.tolist()).encode()).hexdigest() for each in local(model.parameters())]
    return losses, whole(trainee.states()), calls, own

losses, state, calls, _ = run(World(SINGLE, torch.device("cpu")))
for mode, limit in {cases!r}:
    found, states, dealt, own = run(world, mode, limit)
    difference = (torch.tensor(found) - torch.tensor(losses)).abs()
    assert difference[BAD].isnan() and difference.isnan().sum() == 1
    world.print(f"| {{mode}} | {{world.size}} | {{difference.nan_to_num().max():.1e}} |")
    assert difference.nan_to_num().max() <= 1e-5, (mode, found, losses)
    torch.testing.assert_close(states, state, rtol=1e-4, atol=1e-5)
    assert sum(count for each in world.gather(dealt) for count, _ in each) == MATRICES * STEPS
    assert all(count == 1 or numbers <= limit for count, numbers in dealt), (mode, limit, dealt)
    shares = {{"ddp": 1, "fsdp": world.size, "hsdp": 2}}[mode]
    assert len(set(map(str, world.gather(own)))) == shares, mode  # the same bits wherever there are copies
world.print("fine")
"""


@pytest.mark.parametrize(
    ("size", "cases"),
    [
        slow(2, [("ddp", 10), ("fsdp", 400)]),
        (4, [("ddp", 2**24), ("fsdp", 10), ("hsdp", 2**24)]),
    ],
)
def test_losses_and_state_are_those_of_one_process(size, cases):
    """Over 20 steps, one of which is skipped, in turns of any length; with weight decay, averages and a loss scale.
    Prints the largest difference in loss."""
    out = run_ranks_of(size, RUNS.format(cases=cases))
    print("\n| parallel | processes | loss |\n| --- | --- | --- |")
    print(out)
    assert "fine" in out
