"""Timing of two implementations of the same function against each other, robust to drift of the machine's speed.

Every run is a fresh process, because identical code in two processes can differ by 20 %. Runs alternate in the order
A B B A, so that drift affects both sides equally. Medians are compared, and each side is also compared with itself (A/A
control), which shows the noise of a ratio. Timing starts only after a check that both sides give the same result. Two
sides that differ by a few percent at most are paired: they take turns, repetition by repetition, in the same process.
"""

from __future__ import annotations

import atexit
import importlib.util
import multiprocessing
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from diff_dalle.config import InputError, option
from diff_dalle.models.precision import DTYPES, training_precision

CPU = torch.device("cpu")
Build = Callable[[], Callable[[], Any]]


@dataclass(frozen=True)
class Unfinished:
    """The result of work that leaves something to be done after its time: ``finish``."""

    finish: Callable[[], object]


@dataclass(frozen=True)
class Benchmark:
    """Two implementations to compare. The functions must be module-level, because each runs in its own process.

    title:          one-line description.
    baseline, ours: set up one side and return a function that does the work once, synchronously.
    gate:           differences between the results of both sides: name → (found, maximum).
    target:         maximum ratio ours / baseline of the times; 0 = no time target.
    memory_target:  maximum ratio ours / baseline of the peak memory that the work adds; 0 = no memory target.
    paired:         both sides take turns in the same process, and their ratio is taken in each.
    package:        an optional one that it needs; it is skipped without.
    flops:          FLOPs that one repetition needs; None = its share of the peak is not reported.
    mfu_target:     minimum of our share; 0 = no target.
    precision:      of our side's products, as for training: "auto" or "fp32". The baseline's are in fp32.
    """

    title: str
    baseline: Build
    ours: Build
    gate: Callable[[], Mapping[str, tuple[float, float]]]
    target: float
    memory_target: float = 0.0
    paired: bool = False
    package: str = ""
    flops: Callable[[], int] | None = None
    mfu_target: float = 0.0
    precision: str = "fp32"


@dataclass(frozen=True)
class Table:
    """Numbers that are not the ratio of two repeated works.

    title:   one-line description.
    text:    computes the table, or one after the other; with a budget in seconds where ``timed``.
    package: an optional one that it needs; it is skipped without.
    """

    title: str
    text: Callable[..., str | Iterator[str]]
    package: str = ""
    timed: bool = False


@dataclass(frozen=True)
class TimingConfig:
    """Timing"""

    rounds: int = option(2, "rounds of four processes in the order A B B A")
    repeats: int = option(5, "repetitions per process, of which the median counts")
    threads: int = option(2, "threads per process")
    seconds: int = option(
        300,
        "budget of the table gpu: no row begins after it, none that compiles after 60 % of it, none takes over 30 %",
    )

    def __post_init__(self):
        for name in ("rounds", "repeats", "threads", "seconds"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}, but must be at least 1")


@dataclass(frozen=True)
class Timing:
    """Seconds per repetition, one value per process in order of execution.

    paired: the processes are the same for both sides.
    """

    baseline: tuple[float, ...]
    ours: tuple[float, ...]
    paired: bool = False

    @property
    def ratio(self) -> float:
        if self.paired:
            return statistics.median(ours / base for base, ours in zip(self.baseline, self.ours, strict=True))
        return statistics.median(self.ours) / statistics.median(self.baseline)

    @property
    def ratio_of_fastest(self) -> float:
        """More accurate than the ratio of medians on a shared machine, where other load only makes runs slower."""
        return min(self.ours) / min(self.baseline)

    def control(self, side: Sequence[float]) -> float:
        """The A/A control: a side's runs split into two halves in the order A B B A, ratio of medians. 1 = no noise."""
        outer = [seconds for i, seconds in enumerate(side) if i % 4 in (0, 3)]
        inner = [seconds for i, seconds in enumerate(side) if i % 4 in (1, 2)]
        return statistics.median(outer) / statistics.median(inner)

    def report(self) -> str:
        rows = []
        for name, side in (("baseline", self.baseline), ("ours", self.ours)):
            median, least, most = (1000 * value for value in (statistics.median(side), min(side), max(side)))
            control = self.control(side)
            rows.append(f"{name:8}  {median:.1f} ms (range {least:.1f} to {most:.1f}), A/A control {control:.2f}")
        return "\n".join(
            [*rows, f"ours / baseline {self.ratio:.2f} (of the fastest runs: {self.ratio_of_fastest:.2f})"]
        )


def in_fresh_process(function: Callable, *args):
    """``function(*args)`` in a fresh process; its exceptions are raised in the caller."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def temporary_folder() -> Path:
    """A folder that is removed when the process ends."""
    folder = tempfile.TemporaryDirectory(prefix="diff_dalle_benchmark_")
    atexit.register(folder.cleanup)
    return Path(folder.name)


def median_seconds(build: Build, repeats: int, threads: int) -> float:
    """Median time of one repetition, after one warm-up repetition."""
    torch.set_num_threads(threads)
    work, seconds = build(), []
    for _ in range(1 + repeats):
        start = time.perf_counter()
        result = work()
        seconds.append(time.perf_counter() - start)
        if isinstance(result, Unfinished):
            result.finish()
    return statistics.median(seconds[1:])


def paired_seconds(baseline: Build, ours: Build, repeats: int, threads: int) -> tuple[float, float]:
    """Median time of one repetition of both sides, which take turns in the order A B B A, after a warm-up of each."""
    torch.set_num_threads(threads)
    works = baseline(), ours()
    seconds: tuple[list[float], list[float]] = [], []
    for work in works:
        work()
    for i in range(2 * repeats):
        side = (0, 1, 1, 0)[i % 4]
        start = time.perf_counter()
        works[side]()
        seconds[side].append(time.perf_counter() - start)
    return statistics.median(seconds[0]), statistics.median(seconds[1])


def resident_bytes() -> int:
    """The process's peak resident set size."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def peak_memory(build: Build, threads: int) -> int:
    """Increase of the process's peak resident set size by one repetition, in bytes."""
    torch.set_num_threads(threads)
    work, before = build(), resident_bytes()
    work()
    return resident_bytes() - before


def peak_rate(threads: int, precision: str = "fp32", size: int = 2048) -> float:
    """FLOPs per second of a product of two matrices [size, size] or of a convolution of ``size / 8`` channels with as
    many pixels per side, whichever is higher: on CPUs from AMD the product takes twice the time per FLOP in fp32. Each
    is the fastest of ten, after a warm-up. precision: see ``Benchmark``."""
    torch.set_num_threads(threads)
    channels, dtype = size // 8, DTYPES.get(training_precision(precision, CPU), torch.float32)
    a, image = torch.ones(size, size, dtype=dtype), torch.ones(1, channels, channels, channels, dtype=dtype)
    weight = torch.ones(channels, channels, 3, 3, dtype=dtype)
    image, weight = (x.to(memory_format=torch.channels_last) for x in (image, weight))
    product = 2 * size**3, lambda: a @ a
    convolution = 2 * 9 * channels**4, lambda: nn.functional.conv2d(image, weight, padding=1)
    rates = []
    for flops, work in (product, convolution):
        seconds = []
        for _ in range(11):
            start = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - start)
        rates.append(flops / min(seconds[1:]))
    return max(rates)


def utilization(timing: Timing, flops: int, rate: float, baseline_rate: float, target: float = 0.0) -> str:
    """A line with the model FLOPs utilization (Chowdhery et al. 2022, appendix B) of both sides: FLOPs that the model
    needs, however many a side performs, per second of the fastest run, against the machine's rate in the side's
    precision."""
    ours, other = flops / min(timing.ours) / rate, flops / min(timing.baseline) / baseline_rate
    rates = f"{rate / 1e9:,.0f}" + (f" and {baseline_rate / 1e9:,.0f}" if baseline_rate != rate else "")
    line = f"MFU {ours:.0%} against {other:.0%}, of {rates} GFLOP/s, the rate of a large product or convolution"
    return line + (f", target at least {target:.0%}: {verdict(ours >= target)}" if target else "")


def verdict(met: bool) -> str:
    return "met" if met else "missed"


def compare_memory(benchmark: Benchmark, config: TimingConfig) -> str:
    """A line with the peak memory of both sides, each in a fresh process, and their ratio."""
    baseline, ours = (
        in_fresh_process(peak_memory, build, config.threads) for build in (benchmark.baseline, benchmark.ours)
    )
    most, ratio = benchmark.memory_target, ours / baseline
    line = f"peak memory {ours / 2**20:,.0f} MiB against {baseline / 2**20:,.0f}: ratio {ratio:.2f}"
    return f"{line}, target at most {most:.2f}: {verdict(ratio <= most)}"


def check(benchmark: Benchmark, run: Callable = in_fresh_process) -> None:
    """Raises InputError when the results of both sides differ by more than the gate's maximum."""
    wrong = {name: found for name, found in run(benchmark.gate).items() if not found[0] <= found[1]}
    if wrong:
        names = ", ".join(f"{name} by {found:.1e} (maximum {most:.0e})" for name, (found, most) in wrong.items())
        raise InputError(f"the two sides give different results, so their times are not comparable: {names}")


def compare(benchmark: Benchmark, config: TimingConfig, run: Callable = in_fresh_process) -> Timing:
    """Times of both sides. Raises InputError when their results differ: see ``check``."""
    check(benchmark, run)
    if benchmark.paired:
        sides = benchmark.baseline, benchmark.ours
        pairs = [run(paired_seconds, *sides, 2 * config.repeats, config.threads) for _ in range(2 * config.rounds)]
        baseline, ours = zip(*pairs, strict=True)
        return Timing(baseline, ours, paired=True)
    seconds: dict[str, list[float]] = {"baseline": [], "ours": []}
    for side in ("baseline", "ours", "ours", "baseline") * config.rounds:
        seconds[side].append(run(median_seconds, getattr(benchmark, side), config.repeats, config.threads))
    return Timing(tuple(seconds["baseline"]), tuple(seconds["ours"]))


def results(benchmark: Benchmark | Table, config: TimingConfig) -> Iterator[str]:
    """What a benchmark finds, as text to print. Raises InputError as ``check``."""
    if benchmark.package and importlib.util.find_spec(benchmark.package) is None:
        yield f"skipped: the package {benchmark.package} is not installed"
        return
    if isinstance(benchmark, Table):
        text = benchmark.text(config.seconds) if benchmark.timed else benchmark.text()
        yield from [text] if isinstance(text, str) else text
        return
    if benchmark.target:
        timing = compare(benchmark, config)
        yield f"{timing.report()}, target at most {benchmark.target:.2f}: {verdict(timing.ratio <= benchmark.target)}"
        if benchmark.flops is not None:
            rates = [in_fresh_process(peak_rate, config.threads, each) for each in {benchmark.precision: 0, "fp32": 0}]
            yield utilization(timing, in_fresh_process(benchmark.flops), rates[0], rates[-1], benchmark.mfu_target)
    else:
        check(benchmark)
    if benchmark.memory_target:
        yield compare_memory(benchmark, config)
