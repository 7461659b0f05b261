"""What the benchmark of plans compares: the planner's own predictions with the peak and the log of real runs."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from benchmarks import plan as benchmark
from diff_dalle.commands.info import parse_plan
from diff_dalle.recipes.planning.cost import networks_of


@pytest.fixture(scope="module")
def benchmarked(tmp_path_factory):
    """The folder of a small world."""
    folder = tmp_path_factory.mktemp("benchmark")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"SHARDS": 5, "SAMPLES": 16}.items():
            patch.setattr(benchmark, name, value)
        benchmark.write_world(str(folder))
    return str(folder)


@pytest.mark.slow
def test_a_measured_peak(benchmarked):
    found = benchmark.measured_memory("shapes_64_upsampler", benchmarked, 0)
    assert found.planned == pytest.approx(found.found, rel=0.10)
    assert [dataclasses.replace(found, planned=n, found=100).error for n in (105, 75)] == ["+5.0%", "-25.0%"]


@pytest.mark.slow
def test_the_speed_in_question_is_the_planners_own(benchmarked, monkeypatch):
    """What ``Plan`` says of ten steps of the run with its flags; here they reach 1 GFLOP/s."""
    asked = []
    monkeypatch.setattr("diff_dalle.recipes.planning.plan.reached", lambda run: asked.append(run) or 1e9)
    found = benchmark.planned_speed("shapes_64_upsampler", benchmarked, 2)
    (run,) = asked
    (network,) = networks_of(run)
    assert found == pytest.approx(1e9 / network.training_flops(False))
    assert run.distributed.threads == 2 and run.settings.data.num_workers == 1


@pytest.mark.parametrize("preset", [name for name in benchmark.PRESETS if "stage_c" not in name])
def test_the_speed_beside_it_is_that_of_a_run_with_the_same_flags(benchmarked, monkeypatch, preset):
    """As its log says it, without the first line."""
    ran, before = [], torch.get_num_threads()

    def train(recipe, world):
        ran.append(recipe)
        folder = Path(recipe.training.logdir)
        folder.mkdir(parents=True, exist_ok=True)
        lines = [(10, 160, 1.0), (20, 320, 16.0), (30, 480, 80.0)]
        rows = [{"step": step, "samples": n, "samples_per_second": rate} for step, n, rate in lines]
        (folder / "progress.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"step": 30}]))

    monkeypatch.setattr(benchmark, "train_recipe", train)
    monkeypatch.setattr("diff_dalle.distributed.devices.reuse_freed_memory", lambda: None)
    try:
        assert benchmark.trained_speed(preset, benchmarked, 1) == pytest.approx(320 / (160 / 16 + 160 / 80))
    finally:
        torch.set_num_threads(before)
    (run,) = ran
    flags = benchmark.flags_of(preset, benchmark.settings_for(preset, 1), benchmarked)
    planned = parse_plan([*flags, "--gpus", "1"])
    assert run.training.last_step(1) == benchmark.LINES * benchmark.LOGGED == 4 * run.training.log_interval
    expected = planned.recipe()
    assert run.training.batch_size == expected.training.batch_size
    assert run.distributed.threads == expected.distributed.threads
    assert run.network == expected.network


@pytest.mark.parametrize("preset", benchmark.PRESETS)
def test_runs_of_the_benchmark_are_in_fp32(preset, tmp_path):
    run = benchmark.run_of(preset, benchmark.PRESETS[preset], str(tmp_path))
    assert run.training.precision == "fp32" and run.sample_interval == 0


def test_live_tensors_count_once():
    before = benchmark.live_bytes()
    kept = torch.zeros(1000)
    views = [kept[:10], kept.view(10, 100)]
    assert benchmark.live_bytes() - before == 4000 and len(views) == 2
