"""The flight recorder: what is needed to compute a step again whose gradient was not finite.

Each line of ``flight.jsonl`` is one such step of one trainee: its number (as in the logs, counted from 1), gradient
norms and loss scales, and for each rank the positions of its samples with their timestep and loss. A session that
resumes before a recorded step records it again; the last line counts.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..batch import Batch
from .task import Task

FILE = "flight.jsonl"
CAPACITY = 64  # steps kept between two readings


@dataclass(frozen=True)
class FlightStep:
    """One step on one rank. step: counted from 1; position: of this rank's samples; samples: a list of values, one for
    each of them, by name; scalars: values of the step by name."""

    step: int
    position: list[int]
    samples: dict[str, list[float]]
    scalars: dict[str, float]


class FlightRecorder:
    """The latest steps that were not finite, in a ring on the device: only ``read`` waits for it."""

    def __init__(self, device: torch.device):
        self.device, self.keep_all = device, False  # keep_all: also steps that are finite
        self.count = torch.zeros(1, dtype=torch.int64, device=device)  # of bad steps since the last reading
        self.whole = self.real = torch.zeros(0)  # the ring: [CAPACITY + 1, step and positions], [CAPACITY + 1, values]
        self.names: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())

    def record(
        self, step: int, bad: Tensor, position: Tensor, samples: Mapping[str, Tensor], scalars: Mapping[str, Tensor]
    ) -> None:
        """Keep a step if ``bad``, a scalar on the device, is not 0.

        position: [N] int64; samples: [N] each; scalars: [] each, all on the device. N and the names stay the same.
        """
        whole = F.pad(position, (1, 0), value=step)
        real = torch.cat([value.detach().float().reshape(-1) for value in (*samples.values(), *scalars.values())])
        if not self.real.numel():
            self.names = tuple(samples), tuple(scalars)
            self.whole, self.real = (row.new_zeros(CAPACITY + 1, len(row)) for row in (whole, real))
        # Always written; a good step is overwritten by the next one, because it does not advance the count.
        slot = self.count % (CAPACITY + 1)
        self.whole.index_copy_(0, slot, whole[None])
        self.real.index_copy_(0, slot, real[None])
        self.count += 1 if self.keep_all else (bad != 0).long()

    def read(self) -> tuple[list[FlightStep], int]:
        """The bad steps since the last call, oldest first, and how many before them were not kept. Waits for the
        device."""
        total = int(self.count)
        self.count.zero_()
        if not total:
            return [], 0
        slots = [number % (CAPACITY + 1) for number in range(max(0, total - CAPACITY), total)]
        whole, real = self.whole[slots].tolist(), self.real[slots].tolist()
        return [self._step(*rows) for rows in zip(whole, real, strict=True)], total - len(slots)

    def _step(self, whole: list[int], real: list[float]) -> FlightStep:
        (step, *position), (samples, scalars) = whole, self.names
        n = len(position)
        columns = {name: real[i * n : (i + 1) * n] for i, name in enumerate(samples)}
        return FlightStep(step, position, columns, dict(zip(scalars, real[len(samples) * n :], strict=True)))


def flight_line(trainee: str, ranks: Sequence[FlightStep], missed: int) -> str:
    """A line of the file: the same step on all ranks. Values that are not finite become strings.

    missed: number of steps directly before it that were not kept.
    """
    first = ranks[0]
    scalars = {name: _plain(value) for name, value in first.scalars.items()}
    rows: list[dict[str, Any]] = [
        {"position": each.position, **{name: [_plain(v) for v in values] for name, values in each.samples.items()}}
        for each in ranks
    ]
    before = {"missed": missed} if missed else {}
    return json.dumps({"step": first.step, "trainee": trainee, **before, **scalars, "ranks": rows}) + "\n"


def _plain(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


class NonFinite:
    """The first finding of a search in order of computation; ``place`` is "" until there is one."""

    def __init__(self) -> None:
        self.place = ""

    def look(self, value: Any, place: str) -> None:
        """Search a tensor, or tensors in lists and dicts."""
        if not self.place and _is_bad(value):
            self.place = place


def _is_bad(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.is_floating_point() and not bool(value.isfinite().all())
    if isinstance(value, Mapping):
        return any(map(_is_bad, value.values()))
    return isinstance(value, (list, tuple)) and any(map(_is_bad, value))


@contextlib.contextmanager
def search_non_finite(task: Task, batches: Sequence[Batch]) -> Iterator[NonFinite]:
    """Search the samples, the weights, and what is computed from them inside the block: the output of each module and
    the gradient of each parameter. Every value is waited for, so it is slow."""
    found = NonFinite()
    for batch in batches:
        for name, value in (("image", batch.images), *batch.cond.present().items()):
            rows = [] if not _is_bad(value) else _bad_rows(value, batch.index)
            found.look(value, f"the samples: {name} at position {', '.join(map(str, rows[:8]))}")
    for name, parameter in task.named_parameters():
        found.look(parameter, f"the weights before the step: {name}")

    def output_of(name: str, module: nn.Module):
        # The losses, which are the task's own output, have NaN where a value does not apply to a sample.
        place = f"the forward pass: the output of {name or 'the task'} ({type(module).__name__})"
        return lambda _, __, output: found.look(output if module is not task else output.get("loss"), place)

    def gradient_of(name: str):
        return lambda gradient: found.look(gradient, f"the backward pass: the gradient of {name}")

    handles = [module.register_forward_hook(output_of(name, module)) for name, module in task.named_modules()]
    handles += [p.register_hook(gradient_of(name)) for name, p in task.named_parameters() if p.requires_grad]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _bad_rows(value: Tensor, index: Tensor) -> list[int]:
    finite = value.isfinite().flatten(1).all(1) if value.ndim > 1 else value.isfinite()
    return index[torch.nonzero(~finite.cpu())[:, 0]].tolist()
