"""The adaptive loss weight and the adaptive schedule."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from forking import run_ranks
from log_snr_making import make_trainee, train
from torch.testing import assert_close

from diff_dalle.diffusion import LogSnrConfig, LogSnrProcess
from diff_dalle.diffusion.adaptive import Adaptive, AdaptiveSchedule, AdaptiveWeight
from diff_dalle.distributed.launch import ProcessInfo
from diff_dalle.distributed.world import World

EDGES = np.linspace(-10, 10, 299)


def random_losses(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    log_snr = torch.rand(count, generator=generator, dtype=torch.float64) * 24 - 12
    return log_snr, torch.rand(count, generator=generator) ** 3 * 4


def both():
    return LogSnrProcess(LogSnrConfig(log_snr_schedule="adaptive", loss_weighting=("adaptive",)))


def test_updates_are_the_sequential_ones():
    """Batches in which many losses share a bucket are equivalent to one-by-one updates."""
    weight, expected = AdaptiveWeight(), np.ones(300)
    for seed, size in enumerate((1, 7, 900, 3)):
        log_snr, losses = random_losses(size, seed)
        log_snr = torch.where(torch.arange(size) % 3 == 0, 0.1, log_snr)  # many in one bucket
        weight.update(log_snr, losses)
        for x, loss in zip(log_snr.tolist(), losses.tolist(), strict=True):
            bucket = np.searchsorted(EDGES, x)
            expected[bucket] = 0.99 * expected[bucket] + 0.01 * loss
        np.testing.assert_allclose(weight.state(), expected, rtol=1e-12)


def test_the_weight_is_one_over_the_running_loss():
    weight = AdaptiveWeight()
    assert weight.values.tolist() == [1.0] * 300
    x = torch.tensor([-11.0, -3.0, 3.0, 11.0], dtype=torch.float64)
    assert weight(x).tolist() == [1] * 4
    weight.update(x[1:2].repeat(300), torch.full((300,), 0.25))
    loss = 0.99**300 + (1 - 0.99**300) * 0.25
    assert weight(x).tolist() == pytest.approx([1, 1 / loss, 1, 1])
    process = LogSnrProcess(LogSnrConfig(loss_weighting=("adaptive", "p2"), loss_shift=1.5))
    process.observe(x[2:3], torch.tensor([11.0]))
    expected = 1 / (1 + 2.25 * torch.exp(x))
    shifted = x + 2 * np.log(1.5)
    expected[EDGES.searchsorted(shifted.numpy()) == EDGES.searchsorted(3.0)] /= 1.1
    assert_close(process.loss_weight(x), expected.float())


def test_the_schedule_follows_the_losses():
    """At first uniform in log-SNR; then each bucket is drawn in proportion to its loss."""
    schedule, t = AdaptiveSchedule(), (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000
    assert_close(schedule(t), 10 - 20 * t)
    log_snr = torch.linspace(-9.95, 9.95, 200, dtype=torch.float64).repeat(500)
    losses = 0.01 + 1 / (1 + torch.exp(log_snr))
    schedule.update(log_snr, losses)
    drawn = schedule(t)
    assert (drawn.diff() < 0).all() and drawn.abs().max() <= 10
    share = torch.histogram(drawn, torch.linspace(-10, 10, 101, dtype=torch.float64)).hist / len(t)
    values = schedule.state()
    assert_close(share, values / values.sum(), atol=2e-5, rtol=1e-3)
    assert share[0] > 30 * share[-1] > 0


def test_a_schedule_without_losses_left_stays_defined():
    schedule = AdaptiveSchedule()
    schedule.load(torch.cat([torch.zeros(99, dtype=torch.float64), torch.ones(1, dtype=torch.float64)]))
    t = torch.linspace(0, 1, 1001, dtype=torch.float64)
    assert schedule(t).isfinite().all() and schedule(t)[[0, -1]].tolist() == [10, -10]
    assert (schedule(t)[1:999] > 9.7).all()


def test_non_finite_losses_are_discarded():
    found, clean = Adaptive(torch.zeros(1)), Adaptive(torch.zeros(1))
    found.update(torch.tensor([-1.0, 1, 1, -1]), torch.tensor([torch.nan, 3, torch.inf, -torch.inf]))
    clean.update(torch.tensor([1.0]), torch.tensor([3.0]))
    assert torch.equal(found.values, clean.values)


def test_resuming_is_exact():
    """A new process with the saved state draws the same times and weights, and goes on in the same way."""
    process, fresh = both(), both()
    process.observe(*random_losses(500))
    state = process.state_dict()
    assert process.observes and {name: len(value) for name, value in state.items()} == {
        "adaptive_schedule": 100,
        "adaptive_weight": 300,
    }
    fresh.load_state_dict(state)
    for each in (process, fresh):
        each.observe(*random_losses(50, seed=1))
    t = torch.rand(100, dtype=torch.float64)
    assert torch.equal(process.log_snr(t), fresh.log_snr(t))
    assert torch.equal(process.loss_weight(process.log_snr(t)), fresh.loss_weight(fresh.log_snr(t)))
    assert torch.equal(state["adaptive_weight"], both_after().state_dict()["adaptive_weight"])  # a copy, not a view
    assert not LogSnrProcess().observes and LogSnrProcess().state_dict() == {}


def both_after():
    process = both()
    process.observe(*random_losses(500))
    return process


def test_sampling_does_not_depend_on_the_state():
    """It is not in a checkpoint's weights."""
    fresh, later = both(), both_after()
    assert np.array_equal(fresh.steps(7).alphas_cumprod, later.steps(7).alphas_cumprod)


# ------------------------------------------------------------------------------------------------------------- training

STEPS = 12
JOB = f"""
import sys, torch
from diff_dalle.distributed.launch import DistributedConfig, launch, run_script
from log_snr_making import make_trainee, train
def main():
    with launch(DistributedConfig(device="cpu", start_timeout=120)) as world:
        trainee = make_trainee(world)
        train(trainee, {STEPS})
        torch.save((trainee.task.extra_state(), trainee.task.model.state_dict()), f"{{sys.argv[1]}}/{{world.rank}}.pt")
run_script(main)
"""


def test_two_processes_and_micro_batches_have_the_state_of_one(tmp_path):
    (tmp_path / "job.py").write_text(JOB)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PMI_", "OMPI_", "SLURM_"))}
    tests = str(Path(__file__).parent.parent)
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([tests, *sys.path])}
    result = run_ranks([str(tmp_path / "job.py"), str(tmp_path)], env)
    assert result.returncode == 0, result.stderr
    one = make_trainee(World(ProcessInfo("single"), torch.device("cpu")))
    train(one, STEPS, micro=8)
    (first, weights), (second, _) = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    for name, value in one.task.extra_state().items():
        assert torch.equal(first[name], second[name]) and (value != 1).sum() > 10
        assert_close(first[name], value, rtol=1e-5, atol=0)
    assert_close(weights, one.task.model.state_dict(), rtol=1e-5, atol=1e-6)
