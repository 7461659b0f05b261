"""Muon's matrices are orthogonalized once each, on any arrangement of processes, with the results of one process."""

import pytest
from marks import slow
from ranks import run_ranks_of

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
