"""The exchange of gradients in a training step of two processes: how much of it the backward pass hides."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from diff_dalle.distributed.world import World
from diff_dalle.evaluation.report import markdown_table

from .scale_processes import WARM_UP, on_processes, training


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


def tables() -> Iterator[str]:
    for run in RUNS:
        found = sorted(on_processes(2, traces, run)[0], key=lambda trace: trace.overlap)
        trace = found[len(found) // 2]
        yield (
            f"`{' '.join(run.flags)}`, {run.batch} images per process, {trace.parameters / 1e6:,.1f} MB of gradients, "
            f"{trace.backward:,.0f} ms of backward pass: {trace.overlap:.0%} of the communication is within it\n\n"
            f"{trace_table(trace)}"
        )
