"""Timing two ways of doing the same thing against each other, on a machine whose speed drifts.

Every run is a fresh process, because identical code in two processes can differ by 20 %. The runs go A B B A, so that
a drift meets both sides alike; medians are compared; and each side is also compared with itself (A/A), which tells how
far a ratio can be trusted. Nothing is timed before both sides have been shown to give the same result.
"""

from __future__ import annotations

import multiprocessing
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import torch

from ..config import option
from ..errors import InputError

Build = Callable[[], Callable[[], object]]


@dataclass(frozen=True)
class Benchmark:
    """A claim of speed. Its functions are module-level ones, since each runs in a process of its own.

    title:          what is done, in one line.
    baseline, ours: set one side up; the function that they return does the work once and has finished when it returns.
    gate:           the differences between the results of both sides: name → (found, largest allowed).
    target:         the ratio ours / baseline of the times that is claimed; 0 = nothing is claimed of them.
    memory_target:  the same of the peak memory that the work adds; 0 = nothing is claimed of it.
    """

    title: str
    baseline: Build
    ours: Build
    gate: Callable[[], Mapping[str, tuple[float, float]]]
    target: float
    memory_target: float = 0.0


@dataclass(frozen=True)
class TimingConfig:
    """Timing"""

    rounds: int = option(2, "times the order A B B A is gone through")
    repeats: int = option(5, "how often each process does the work; its median counts")
    threads: int = option(2, "threads of each process")

    def __post_init__(self):
        for name in ("rounds", "repeats", "threads"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}, but must be at least 1")


@dataclass(frozen=True)
class Timing:
    """Seconds of one piece of work on each side, one value per process, in the order in which they ran."""

    baseline: tuple[float, ...]
    ours: tuple[float, ...]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ours) / statistics.median(self.baseline)

    @property
    def ratio_of_fastest(self) -> float:
        """Nearer to the truth than the medians' on a machine that others use too: they only ever make runs slower."""
        return min(self.ours) / min(self.baseline)

    def control(self, side: Sequence[float]) -> float:
        """A side against itself: its runs dealt to two parts in the order A B B A, median over median. 1 = no noise."""
        outer = [seconds for i, seconds in enumerate(side) if i % 4 in (0, 3)]
        inner = [seconds for i, seconds in enumerate(side) if i % 4 in (1, 2)]
        return statistics.median(outer) / statistics.median(inner)

    def report(self) -> str:
        rows = []
        for name, side in (("baseline", self.baseline), ("ours", self.ours)):
            median, least, most = (1000 * value for value in (statistics.median(side), min(side), max(side)))
            control = self.control(side)
            rows.append(f"{name:8}  {median:.1f} ms (from {least:.1f} to {most:.1f}), against itself {control:.2f}")
        return "\n".join([*rows, f"ours / baseline {self.ratio:.2f} (fastest runs {self.ratio_of_fastest:.2f})"])


def in_fresh_process(function: Callable, *args):
    """``function(*args)`` in a process of its own; its exceptions are raised here."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def median_seconds(build: Build, repeats: int, threads: int) -> float:
    """Median time of one piece of work, after one that is not counted."""
    torch.set_num_threads(threads)
    work, seconds = build(), []
    for _ in range(1 + repeats):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def peak_memory(build: Build, threads: int) -> int:
    """Bytes by which one piece of work raises the process's largest size in memory."""
    torch.set_num_threads(threads)
    work, unit = build(), 1 if sys.platform == "darwin" else 1024
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    work()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit


def compare_memory(benchmark: Benchmark, config: TimingConfig) -> str:
    """One line: the peak memory of both sides, each in a fresh process, and their ratio."""
    baseline, ours = (
        in_fresh_process(peak_memory, build, config.threads) for build in (benchmark.baseline, benchmark.ours)
    )
    return f"peak memory {ours / 2**20:,.0f} MiB against {baseline / 2**20:,.0f}: ratio {ours / baseline:.2f}"


def check(benchmark: Benchmark, run: Callable = in_fresh_process) -> None:
    """Raises InputError when the results of both sides differ by more than the benchmark allows."""
    wrong = {name: found for name, found in run(benchmark.gate).items() if not found[0] <= found[1]}
    if wrong:
        names = ", ".join(f"{name} by {found:.1e} (allowed: {most:.0e})" for name, (found, most) in wrong.items())
        raise InputError(f"the two sides give different results, so their times say nothing: {names}")


def compare(benchmark: Benchmark, config: TimingConfig, run: Callable = in_fresh_process) -> Timing:
    """Both sides' times, of results that are alike: see ``check``."""
    check(benchmark, run)
    seconds = {"baseline": [], "ours": []}
    for side in ("baseline", "ours", "ours", "baseline") * config.rounds:
        seconds[side].append(run(median_seconds, getattr(benchmark, side), config.repeats, config.threads))
    return Timing(tuple(seconds["baseline"]), tuple(seconds["ours"]))
