"""What it costs a training step to be watched: by the flight recorder, and by the lifeline between the ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch

from diff_dalle.batch import Batch
from diff_dalle.distributed.lifeline import Lifeline
from diff_dalle.distributed.rendezvous import ProcessInfo
from diff_dalle.training.loop import TrainLoop

from .train_step import training_loop


def _loop(recorded: bool) -> tuple[TrainLoop, Batch]:
    torch.manual_seed(0)
    loop, batch = training_loop()
    for trainee in () if recorded else loop.trainees:
        trainee.flight.record = lambda *_: None  # type: ignore[method-assign]
    return loop, batch


def unwatched() -> Callable[[], object]:
    """The loop's update without its flight recorder."""
    loop, batch = _loop(recorded=False)
    return lambda: loop.update(batch)


def watched() -> Callable[[], object]:
    """The loop's update in a process that holds both ends of a lifeline: of rank 0 and of rank 1."""
    store = torch.distributed.HashStore()
    places = [ProcessInfo("single", rank, 2) for rank in (0, 1)]
    ends = [Lifeline(place, "127.0.0.1", store, 10.0, 100.0, lambda news: None) for place in places]
    if ends[0].wait_for_all(10.0):
        raise RuntimeError("the two ends of the lifeline do not meet")
    loop, batch = _loop(recorded=True)

    def step() -> list[Lifeline]:
        loop.update(batch)
        return ends

    return step


def gate() -> dict[str, tuple[float, float]]:
    """Maximum difference of the weights after two steps: none."""
    weights = []
    for recorded in (False, True):
        loop, batch = _loop(recorded)
        loop.update(batch)
        loop.update(batch)
        weights.append(torch.cat([p.detach().flatten() for p in loop.trainees[0].task.model.parameters()]))
    return {"weights": ((weights[0] - weights[1]).abs().max().item(), 0.0)}
