"""Sharded networks train as whole ones do, and every rank holds its share only."""

import pytest
from sharded_jobs import SHARDED
from test_parallel import run_ranks_of

TRAINING = """
def main():
    with launch(DistributedConfig(device="cpu", start_timeout=120)) as world:
        alone = World(SINGLE, torch.device("cpu"))
        one = Trainee(make_task(make_network()), SLOW, "fp32", alone)
        expected = world.broadcast(train(one, alone) if world.is_main else None)
        whole = world.broadcast(held(one))
        if world.size == 2:
            check(train(Trainee(make_task(build_shared(make_network, world)), SLOW, "fp32", world), world), expected)
        for settings, steps, share in {cases!r}:
            sharded = Trainee(make_task(make_sharded(make_network, world, **settings)), SLOW, "fp32", world)
            check(train(sharded, world, steps), expected[:steps])
            shares = world.gather(held(sharded) / whole)
            assert max(shares) <= share, (settings, shares)
        world.print("fine")

def check(found, expected):
    assert (found - expected).abs().max() <= 1e-5, (found, expected)
run_script(main)
"""


@pytest.mark.parametrize(
    ("size", "cases"),
    [
        (2, [({}, 20, 0.6)]),
        (
            4,
            [
                ({"forward_prefetch": 2, "backward_prefetch": 2}, 20, 0.35),
                ({"mode": "hsdp", "shard_processes": 2, "reshard_after_forward": False}, 4, 0.6),
            ],
        ),
    ],
)
def test_losses_are_those_of_one_process_and_memory_is_a_share(tmp_path, size, cases):
    """20 steps in fp32 of two micro-batches, with activation checkpointing and dropout: losses and gradient norms; and
    the bytes of parameters, averages and optimizer on each rank, relative to those of DDP."""
    assert "fine" in run_ranks_of(tmp_path, SHARDED + TRAINING.format(cases=cases), size)
