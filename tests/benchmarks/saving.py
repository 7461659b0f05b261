"""How long training waits for a checkpoint: for all of its files, or for the copy that they are written from."""

from __future__ import annotations

from collections.abc import Callable

import torch

from diff_dalle.checkpoints.checkpoint import Identity
from diff_dalle.checkpoints.run_folder import RunFolder
from diff_dalle.distributed.devices import reuse_freed_memory
from diff_dalle.training.loop import TrainLoop

from .timing import Unfinished, temporary_folder
from .train_step import training_loop


def _trained() -> TrainLoop:
    """A loop after two updates, so that the optimizer has a state, with a folder of its own."""
    reuse_freed_memory()  # as in every training command
    torch.manual_seed(0)
    loop, batch = training_loop()
    loop.saving.run = RunFolder(Identity("benchmark", {}), path=str(temporary_folder()))
    for _ in range(2):
        loop.update(batch)
    return loop


def waiting() -> Callable[[], object]:
    """Save, and wait for the files."""
    loop = _trained()

    def save() -> TrainLoop:
        loop.save()
        loop.saving.finish()
        return loop

    return save


def in_background() -> Callable[[], Unfinished]:
    """The loop's own save; the files are waited for outside of the time."""
    loop = _trained()

    def save() -> Unfinished:
        loop.save()
        return Unfinished(loop.saving.finish)

    return save


def gate() -> dict[str, tuple[float, float]]:
    """Maximum difference of the saved weights and averages: none, though training goes on before they are written."""
    found = []
    for goes_on in (False, True):
        loop = _trained()
        _, batch = training_loop()
        loop.save()
        if goes_on:
            loop.update(batch)
        loop.saving.finish()
        run = loop.saving.run
        states = [
            run.load(run.checkpoints[-1], "", role)[0]["state"] for role in ("model", loop.trainees[0].emas[0].role)
        ]
        found.append(torch.cat([value.flatten() for state in states for value in state.values()]))
    return {"saved values": ((found[0] - found[1]).abs().max().item(), 0.0)}
