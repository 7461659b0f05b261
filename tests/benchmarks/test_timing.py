import os
from dataclasses import replace

import pytest
import torch
from torch import nn

from benchmarks import timing as timing_module
from benchmarks.registry import BENCHMARKS
from benchmarks.timing import (
    Benchmark,
    Timing,
    TimingConfig,
    Unfinished,
    compare,
    in_fresh_process,
    median_seconds,
    paired_seconds,
    peak_rate,
    results,
    utilization,
)
from diff_dalle.config import InputError


def build():
    return list


def build_other():
    return list


def gate():
    return {"outputs": (1e-7, 1e-5)}


TOY = Benchmark("nothing", build, build_other, gate, 1.0)


def test_processes_are_fresh():
    first, second = in_fresh_process(os.getpid), in_fresh_process(os.getpid)
    assert len({first, second, os.getpid()}) == 3


def test_runs_go_a_b_b_a_after_the_gate():
    order = []

    def run(function, *args):
        order.append(function.__name__ if not args else args[0])
        return function(*args)

    timing = compare(TOY, TimingConfig(rounds=2, repeats=3, threads=1), run)
    assert order == ["gate", *[build, build_other, build_other, build] * 2]
    assert len(timing.ours) == len(timing.baseline) == 4


def test_a_benchmark_without_its_package_is_skipped(monkeypatch):
    (said,) = results(replace(TOY, package="no_such_package"), TimingConfig())
    assert said == "skipped: the package no_such_package is not installed"
    assert list(results(replace(TOY, package="numpy", target=0.0), TimingConfig())) == []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert list(results(BENCHMARKS["time_to_quality"], TimingConfig())) == [
        "skipped: the package diffusers is not installed"
    ]


def test_ratio_of_medians_and_a_a_control():
    timing = Timing(baseline=(1.0, 4.0, 4.0, 1.0), ours=(2.0, 2.0, 2.0, 9.0))
    assert timing.ratio == pytest.approx(2.0 / 2.5) and timing.ratio_of_fastest == pytest.approx(2.0)
    assert timing.control(timing.baseline) == pytest.approx(0.25)


def test_utilization_is_that_of_the_fastest_run():
    timing = Timing(baseline=(4.0, 9.0), ours=(2.0, 3.0))
    found = utilization(timing, 10**12, 10**12, 10**12, 0.5)
    assert found.startswith("MFU 50% against 25%, of 1,000 GFLOP/s") and found.endswith("target at least 50%: met")
    found = utilization(timing, 10**12, 2 * 10**12, 10**12, 0.26)
    assert found.startswith("MFU 25% against 25%, of 2,000 and 1,000 GFLOP/s") and found.endswith("26%: missed")
    assert peak_rate(threads=1, size=64) > 0


def test_the_peak_is_that_of_the_precision(monkeypatch):
    seen = []
    convolve = nn.functional.conv2d

    def recorded(x, *rest, **named):
        seen.append(x.dtype)
        return convolve(x, *rest, **named)

    monkeypatch.setattr(nn.functional, "conv2d", recorded)
    for fast in (True, False):
        monkeypatch.setattr("diff_dalle.models.precision.has_fast_bf16", lambda fast=fast: fast)
        peak_rate(1, "auto", 64)
    peak_rate(1, "fp32", 64)
    assert list(dict.fromkeys(seen)) == [torch.bfloat16, torch.float32] and seen.count(torch.bfloat16) == 11


def test_each_target_is_met_or_missed(monkeypatch):
    bounds = {0.4: "missed", 0.5: "met"}
    monkeypatch.setattr(timing_module, "compare", lambda *arguments: Timing((4.0,) * 4, (2.0,) * 4))
    monkeypatch.setattr(timing_module, "peak_memory", lambda build, threads: 2**20 * (1 + (build is TOY.baseline)))
    monkeypatch.setattr(timing_module, "in_fresh_process", lambda function, *arguments: function(*arguments))
    for bound, expected in bounds.items():
        lines = list(results(replace(TOY, target=bound, memory_target=bound), TimingConfig()))
        assert [line.rpartition(": ")[2] for line in lines] == [expected, expected]


def test_paired_sides_take_turns_in_each_process():
    calls, processes = [], []

    def turn(name):
        return lambda: lambda: calls.append(name)

    def run(function, *args):
        processes.append(function)
        return function(*args)

    pair = replace(TOY, baseline=turn("A"), ours=turn("B"), paired=True)
    timing = compare(pair, TimingConfig(rounds=1, repeats=2, threads=1), run)
    assert "".join(calls) == 2 * ("AB" + 2 * "ABBA") and processes == [gate, paired_seconds, paired_seconds]
    assert timing.paired and len(timing.ours) == 2


def test_the_ratio_of_pairs_is_taken_in_each_process():
    assert Timing(baseline=(1.0, 10.0, 2.0), ours=(1.1, 12.0, 2.0), paired=True).ratio == pytest.approx(1.1)


@pytest.mark.parametrize("found", [1e-3, float("nan")])
def test_nothing_is_timed_when_results_differ(found):
    def run(function, *args):
        assert not args
        return function()

    with pytest.raises(InputError, match="different results.*gradients"):
        compare(replace(TOY, gate=lambda: {"gradients": (found, 1e-4)}), TimingConfig(threads=1), run)


def test_what_a_repetition_leaves_to_be_done_is_done_outside_its_time(monkeypatch):
    now = [0.0]

    def passes(seconds):
        now[0] += seconds

    def work():
        passes(1)
        return Unfinished(lambda: passes(100))

    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    assert median_seconds(lambda: work, 3, 1) == 1 and now[0] == 4 * 101
