"""Sharded networks train as whole ones do, and every rank holds its share only."""

import pytest
from sharded_jobs import SHARDED
from test_parallel import run_ranks_of

TRAINING = """
def main():
    with launch(DistributedConfig(device="cpu", start_timeout=120)) as world:
        alone = World(SINGLE, torch.device("cpu"))
        one = Trainee(make_task(make_network()), SLOW, "fp32", alone)
        expected = train(one, alone)
        replicated = Trainee(make_task(build_shared(make_network, world)), SLOW, "fp32", world)
        sharded = Trainee(make_task(make_sharded(make_network, world, {mode!r}, {settings})), SLOW, "fp32", world)
        for trainee in (replicated, sharded):
            found = train(trainee, world)
            error = (found - expected).abs().max()
            assert error <= 1e-5, error
        shares = world.gather(held(sharded) / held(replicated))
        assert max(shares) <= {share}, shares
        world.print("fine")
run_script(main)
"""


@pytest.mark.parametrize(
    ("size", "mode", "settings", "share"),
    [(2, "fsdp", "", 0.6), (4, "fsdp", "forward_prefetch=2, backward_prefetch=2", 0.35)],
)
def test_losses_are_those_of_one_process_and_memory_is_a_share(tmp_path, size, mode, settings, share):
    """20 steps in fp32 with accumulation; bytes of parameters, averages and optimizer of every rank."""
    body = SHARDED + TRAINING.format(mode=mode, settings=settings, share=share)
    assert "fine" in run_ranks_of(tmp_path, body, size)


def test_groups_hold_copies_of_the_weights(tmp_path):
    body = SHARDED + TRAINING.format(mode="hsdp", settings="shard_processes=2, reshard_after_forward=False", share=0.6)
    assert "fine" in run_ranks_of(tmp_path, body, 4)
