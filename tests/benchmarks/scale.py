"""Scale: the data of many processes simulated; the same training step on 1, 2 and 4 processes of this machine; how much
of the exchange of gradients the backward pass of two processes hides; and the plan of many GPUs."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from diff_dalle.batch import Batch, Conditioning
from diff_dalle.commands.info import parse_info
from diff_dalle.diffusion.diffusion_config import create_gaussian_diffusion
from diff_dalle.distributed.launch import DistributedConfig, launch
from diff_dalle.distributed.rendezvous import free_port
from diff_dalle.distributed.world import ALONE, World
from diff_dalle.evaluation.report import markdown_table
from diff_dalle.models.precision import training_precision
from diff_dalle.tasks.denoising import DenoisingTask
from diff_dalle.training.loop import TrainLoop
from diff_dalle.training.trainee import Trainee

from . import scale_data, scale_plan
from .regression import loop_of

WARM_UP = 2  # steps; DistributedDataParallel arranges its buckets anew after the first
Result = TypeVar("Result")
Seconds = dict[tuple[int, bool], list[float]]  # of steps, by (images per process, whether gradients are exchanged)


def cores() -> list[int]:
    """The numbers of the cores that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [*range(os.cpu_count() or 1)]


@dataclass(frozen=True)
class Jobs:
    """What is measured.

    flags:   of the training run whose steps are timed.
    batches: images per process.
    sizes:   numbers of processes, in the order of the jobs.
    repeats: steps of each kind in a job, a multiple of 2.
    """

    flags: tuple[str, ...] = ("--preset", "shapes_32")
    batches: tuple[int, ...] = (32, 128)
    sizes: tuple[int, ...] = (1, 2, 4, 4, 2, 1)
    repeats: int = 4

    def __str__(self) -> str:
        pinned = ", pinned to a core" if hasattr(os, "sched_setaffinity") else ""
        precision = training_precision(parse_info(list(self.flags)).training.precision, torch.device("cpu"))
        return (
            f"training steps of `{' '.join(self.flags)}` in {precision}, measured on {len(cores())} cores; each "
            f"process has one thread{pinned}, and as many random images and captions as every other; jobs of "
            f"{', '.join(map(str, self.sizes))} processes one after another, medians of all steps; gradients pass "
            "through the loopback device, whose copies take time of the same cores. *Efficiency*: images/s of n "
            "processes on c cores over min(n, c) times those of one; *without exchange*: of n processes that share "
            "nothing but the machine, as much as its cores allow."
        )


def training(world: World, flags: Sequence[str], batch_size: int) -> tuple[TrainLoop, Batch]:
    """The loop of a generator's training command without its data, and the batch of each step of this rank."""
    run = parse_info(list(flags))
    session = run.recipe(world.size).open(world)
    task = DenoisingTask(session.network(), create_gaussian_diffusion(run.diffusion), run.denoising)
    trainee = Trainee(task, run.optim, run.training.precision, world)
    loop = loop_of(trainee, run.training, world)
    generator = torch.Generator().manual_seed(world.rank)
    images = torch.randn(batch_size, run.model.channels, run.image_size, run.image_size, generator=generator)
    tokens = torch.randint(session.tokenizer.vocab_size, (batch_size, run.model.text.text_length), generator=generator)
    cond = Conditioning(tokens=tokens, mask=torch.ones_like(tokens, dtype=torch.bool))
    return loop, Batch(images, cond, world.rank + world.size * torch.arange(batch_size))


@contextlib.contextmanager
def joined(rank: int, size: int, port: int, core: int) -> Iterator[World]:
    """This process as a rank of a job on this machine, started as torchrun does, with one thread, on one core."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})
    with launch(DistributedConfig(device="cpu", threads=1)) as world:
        yield world


def on_processes(size: int, work: Callable[..., Result], *args) -> list[Result]:
    """What ``work(world, *args)`` returns on each rank of a job of fresh processes."""
    port, numbers = free_port(), cores()
    with ProcessPoolExecutor(size, mp_context=multiprocessing.get_context("spawn")) as pool:
        places = [(rank, size, port, numbers[rank % len(numbers)]) for rank in range(size)]
        return [each.result() for each in [pool.submit(_work, place, work, args) for place in places]]


def _work(place: tuple[int, int, int, int], work: Callable[..., Result], args: Sequence) -> Result:
    with joined(*place) as world:
        return work(world, *args)


def steps(world: World, flags: Sequence[str], batches: Sequence[int], repeats: int) -> Seconds:
    """Times of steps with and without exchange, which take turns. All ranks begin each step together."""
    found: Seconds = {}
    for batch in batches:
        sides = {exchanged: training(world if exchanged else ALONE, flags, batch) for exchanged in (True, False)}
        for exchanged in [*sides] * WARM_UP + [True, False, False, True] * (repeats // 2):
            loop, data = sides[exchanged]
            world.barrier()
            start = time.perf_counter()
            loop.update(data)
            found.setdefault((batch, exchanged), []).append(time.perf_counter() - start)
    return {kind: seconds[WARM_UP:] for kind, seconds in found.items()}


@dataclass(frozen=True)
class Rates:
    """Images/s of all processes of a job: with the exchange of gradients, and of processes that exchange none."""

    exchanging: float
    alone: float

    @staticmethod
    def of(ranks: Sequence[Seconds], batch: int) -> Rates:
        """Of the median times of all ranks."""
        return Rates(*(sum(batch / statistics.median(each[batch, on]) for each in ranks) for on in (True, False)))

    def efficiencies(self, one: Rates, size: int, cores: int) -> tuple[float, float]:
        """Both, over what ``size`` processes on so many cores reach if each core gives what it gives to ``one``."""
        most = min(size, cores)
        return self.exchanging / (most * one.exchanging), self.alone / (most * one.alone)


def scaling_table(found: Mapping[int, Sequence[Seconds]], batches: Sequence[int], cores: int) -> str:
    """found: number of processes → times of each rank. One process must be among them."""
    rows = []
    for batch in batches:
        one = Rates.of(found[1], batch)
        for size, ranks in sorted(found.items()):
            rates = Rates.of(ranks, batch)
            count = f"{size} processes on {cores} cores" if size > cores else str(size)
            milliseconds = [1000 * size * batch / rate for rate in (rates.exchanging, rates.alone)]
            efficiency, allowed = rates.efficiencies(one, size, cores)
            values = [f"{milliseconds[0]:.0f}", f"{milliseconds[1]:.0f}", f"{rates.exchanging:,.1f}"]
            rows.append([batch, count, *values, f"{efficiency:.3f}", f"{allowed:.3f}"])
    header = ["images per process", "processes", "ms a step", "ms without exchange", "images/s in all", "efficiency"]
    return markdown_table([*header, "efficiency without exchange"], rows)


def weak_scaling(jobs: Jobs) -> str:
    found: dict[int, list[Seconds]] = {}
    for size in jobs.sizes:
        for rank, seconds in enumerate(on_processes(size, steps, jobs.flags, jobs.batches, jobs.repeats)):
            before = found.setdefault(size, [{} for _ in range(size)])[rank]
            before |= {kind: before.get(kind, []) + values for kind, values in seconds.items()}
    return scaling_table(found, jobs.batches, len(cores()))


# -------------------------------------------------------------------------------------- the exchange of gradients


@dataclass(frozen=True)
class Traced:
    """A training run whose exchange is traced. flags: its own. batch: images per process. steps: of which the one with
    the median overlap is shown."""

    flags: tuple[str, ...]
    batch: int
    steps: int = 3


RUNS = Traced(("--preset", "shapes_32"), 32), Traced(("--preset", "generator_64_small"), 2)
ASSUMED = (
    "all-reduces of gradients in a step, by the events of torch's profiler on rank 0 of two processes placed as above. "
    "*Begins*: after the end of the backward pass, or before it (−); *exposed*: after it."
)


@dataclass(frozen=True)
class Bucket:
    """Gradients that are exchanged together. size: in bytes. begin, end: of the all-reduce, in milliseconds since the
    end of the backward pass; negative = before."""

    size: int
    begin: float
    end: float

    @property
    def after(self) -> tuple[float, float]:
        """The part of the all-reduce after the backward pass."""
        return max(self.begin, 0.0), max(self.end, 0.0)

    @property
    def exposed(self) -> float:
        return self.after[1] - self.after[0]


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of the union of intervals (begin, end)."""
    total, reached = 0.0, -math.inf
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


@dataclass(frozen=True)
class Trace:
    """The exchange of a step. backward: milliseconds of the backward pass. parameters: bytes of the trained ones."""

    buckets: tuple[Bucket, ...]
    backward: float
    parameters: int

    @property
    def communicating(self) -> float:
        """Milliseconds in which at least one bucket was exchanged."""
        return covered((bucket.begin, bucket.end) for bucket in self.buckets)

    @property
    def exposed(self) -> float:
        """Those after the backward pass."""
        return covered(bucket.after for bucket in self.buckets)

    @property
    def overlap(self) -> float:
        """The fraction within the backward pass."""
        return 1 - self.exposed / self.communicating


def read_trace(events: Iterable[Any], parameters: Sequence[Tensor]) -> Trace:
    """The exchange of these parameters' gradients, all of one dtype, from the events of torch's profiler in one step.

    gloo's threads record each all-reduce with the tensor's shape. Those after the backward pass has begun are of
    gradients, but for scalars: the loop's own.
    """
    events = list(events)
    backward = [event.time_range for event in events if event.name.startswith("autograd::engine::evaluate_function")]
    begin, end = min(each.start for each in backward), max(each.end for each in backward)
    itemsize = parameters[0].element_size()
    buckets = [
        Bucket(itemsize * math.prod(event.input_shapes[0]), (at.start - end) / 1e3, (at.end - end) / 1e3)
        for event in events
        if event.name == "gloo:all_reduce" and event.input_shapes[0] and (at := event.time_range).start > begin
    ]
    size = itemsize * sum(parameter.numel() for parameter in parameters)
    return Trace(tuple(sorted(buckets, key=lambda bucket: bucket.begin)), (end - begin) / 1e3, size)


def traces(world: World, run: Traced) -> list[Trace]:
    """Of the steps, on rank 0; all ranks profile theirs, so that none waits for another."""
    loop, data = training(world, run.flags, run.batch)
    parameters = [p for optimization in loop.trainees[0].optimizations.values() for p in optimization.parameters]
    for _ in range(WARM_UP):
        loop.update(data)
    found = []
    for _ in range(run.steps):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
            loop.update(data)
        if world.is_main:
            found.append(read_trace(profile.events(), parameters))
    return found


def trace_table(trace: Trace) -> str:
    rows: list[list[object]] = []
    for i, bucket in enumerate(trace.buckets, 1):
        times = [f"{each:.0f}" for each in (bucket.begin, bucket.end - bucket.begin, bucket.exposed)]
        rows.append([i, f"{bucket.size / 1e6:.1f}", *times])
    megabytes = sum(bucket.size for bucket in trace.buckets) / 1e6
    rows.append(["together", f"{megabytes:.1f}", "", f"{trace.communicating:.0f}", f"{trace.exposed:.0f}"])
    return markdown_table(["bucket", "MB", "begins, ms", "ms communicating", "ms exposed"], rows)


def exchange_tables() -> Iterator[str]:
    for run in RUNS:
        found = sorted(on_processes(2, traces, run)[0], key=lambda trace: trace.overlap)
        trace = found[len(found) // 2]
        yield (
            f"`{' '.join(run.flags)}`, {run.batch} images per process, {trace.parameters / 1e6:,.1f} MB of gradients, "
            f"{trace.backward:,.0f} ms of backward pass: {trace.overlap:.0%} of the communication is within it\n\n"
            f"{trace_table(trace)}"
        )


# ---------------------------------------------------------------------------------------------------------- the tables


def tables() -> Iterator[str]:
    """What each table assumes, and then the tables."""
    fleet, jobs, cluster = scale_data.Fleet(), Jobs(), scale_plan.Cluster()
    assumed = {"Data": fleet, "Processes": jobs, "Exchange": ASSUMED, "Plan": cluster}
    yield "\n".join(f"{name}: {text}" for name, text in assumed.items()) + "\n"
    _say("following the data of all processes")
    yield f"Data\n\n{scale_data.tables(fleet)}\n"
    _say("timing jobs of several processes")
    yield f"Processes\n\n{weak_scaling(jobs)}\n"
    _say("tracing the exchange of gradients")
    for text in exchange_tables():
        yield f"Exchange, {text}\n"
    _say("measuring the networks of the presets")
    for text in scale_plan.tables(cluster):
        yield f"Plan, {text}\n"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
