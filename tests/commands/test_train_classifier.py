"""The settings of a classifier's training."""

from dataclasses import replace

import pytest
import torch

from diff_dalle.config import InputError
from diff_dalle.diffusion.diffusion_config import NoiseConfig
from diff_dalle.diffusion.resample import ContrastiveConfig
from diff_dalle.distributed.world import ALONE, ProcessInfo, World
from diff_dalle.recipes.classifier import ClassifierOptim, ClassifierRun, ClassifierTraining
from diff_dalle.recipes.recipe import wrong_annealing
from diff_dalle.recipes.train import train_recipe
from diff_dalle.training.optim import learning_rate


def make_run(optim=None, **training):
    return ClassifierRun(optim=ClassifierOptim(**optim or {}), training=ClassifierTraining(**training))


@pytest.mark.parametrize(
    ("optim", "iterations", "found"),
    [
        ({}, 1000, (20, 1000)),
        ({"warmup_steps": 5}, 1000, (5, 1000)),
        ({"lr_anneal_steps": 5000}, 1000, (100, 5000)),
        ({"lr_anneal_steps": 0}, 1000, (0, 0)),
        ({"warmup_steps": 0}, 10, (0, 10)),
    ],
)
def test_the_rate_warms_up_and_falls_over_the_run_unless_told_otherwise(optim, iterations, found):
    """The checkpoint holds the resolved value, not -1."""
    optim = make_run(optim, iterations=iterations).recipe().optims[""]
    assert (optim.warmup_steps, optim.lr_anneal_steps) == found


def test_the_rate_rises_in_a_line_and_falls_as_a_cosine():
    optim = make_run({"lr": 1.0}, iterations=1000).recipe().optims[""]
    assert [learning_rate(optim, step) for step in (0, 9, 19, 20)] == pytest.approx([0.05, 0.5, 1.0, 1.0])
    assert [learning_rate(optim, step) for step in (265, 510, 755, 1000)] == pytest.approx(
        [0.5 + 0.5**1.5, 0.5, 0.5 - 0.5**1.5, 0.0]
    )


@pytest.mark.parametrize(
    ("optim", "words"),
    [
        ({"warmup_steps": -2}, "warmup_steps is -2"),
        ({"lr_anneal_steps": -5}, "lr_anneal_steps is -5"),
        ({"lr_anneal_steps": 500}, "lr_anneal_steps is 500, so the learning rate would be 0"),
    ],
)
def test_impossible_rates_are_refused(optim, words):
    with pytest.raises(InputError, match=words):
        make_run(optim, iterations=1000)


@pytest.mark.parametrize("limits", [{"samples": 10**6}, {"iterations": 0, "samples": 10**6}])
def test_a_run_by_samples_says_the_end_of_its_rate(limits):
    """The step at which it ends depends on the number of processes."""
    with pytest.raises(InputError, match="lr_anneal_steps is -1, .* but samples may end the run"):
        make_run(**limits)
    run = make_run({"lr_anneal_steps": 1000}, **limits, batch_size=500)
    optim = run.recipe().optims[""]
    assert (optim.warmup_steps, optim.lr_anneal_steps) == (20, 1000)
    assert not list(wrong_annealing(run.training, optim, processes=2))
    with pytest.raises(InputError, match="0 for the rest of the 2,000 iterations"):
        train_recipe(run.recipe(), World(ProcessInfo("single"), torch.device("cpu")))


def test_a_run_by_hours_alone_has_no_step_for_the_rate_to_end():
    with pytest.raises(InputError, match="lr_anneal_steps is -1, .* but hours may end the run"):
        make_run(iterations=0, hours=1.0)
    with pytest.raises(InputError, match="is 1000, .* 0 for the rest of its hours: set iterations 1000"):
        make_run({"lr_anneal_steps": 1000}, iterations=0, hours=24.0)
    assert make_run({"lr_anneal_steps": 0}, iterations=0, hours=1.0).recipe().optims[""].warmup_steps == 0


def test_one_sample_is_no_batch_and_one_a_process_is():
    run = make_run(batch_size=1)
    with pytest.raises(InputError, match="batch_size is 1, but a contrastive loss needs at least 2"):
        run.recipe().open(ALONE)
    run.recipe().open(World(ProcessInfo("mpi", 0, 2), torch.device("cpu")))


def test_the_noise_that_generators_need_is_said(capsys):
    process = NoiseConfig(diffusion_steps=40, noise_schedule="cosine")
    run = replace(make_run(batch_size=2), diffusion=process)
    run.recipe().open(ALONE)
    assert "the noise of the cosine schedule of 40 steps (--noise_schedule, " in capsys.readouterr().out
    replace(run, contrastive=ContrastiveConfig(noised=False)).recipe().open(ALONE)
    assert "schedule" not in capsys.readouterr().out
