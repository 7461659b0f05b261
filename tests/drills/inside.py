"""Runs a script with faults planned for its process: ``python -m drills.inside SCRIPT FLAGS``.

The product has no hooks for the drill: this file replaces functions of the running process before the script starts.
The plan is a JSON list of injections in the environment.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import pkgutil
import runpy
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

PLAN = "DIFF_DALLE_DRILL_PLAN"
FOREVER = 3600.0


@dataclass(frozen=True)
class Injection:
    """What happens at the ``number``-th time (from 1 on) that a process passes a point.

    point:  a key of POINTS, or of POISONS, whose numbers are those of steps.
    action: a key of ACTIONS; of a poison, its value: nan, inf or -inf.
    value:  argument of the action: a path, a number of seconds; of a poison, the number of steps.
    rank:   on this rank only; None = on every one.
    """

    point: str
    number: int
    action: str
    value: str = ""
    rank: int | None = None


def planned(*injections: Injection) -> dict[str, str]:
    """The plan as environment variables."""
    return {PLAN: json.dumps([asdict(each) for each in injections])}


# ------------------------------------------------------------------------------------------------------------- actions


def _write_pid(folder: str) -> None:
    """This process, in a file named by its rank."""
    from diff_dalle.distributed.launch import detect

    Path(folder, str(detect().rank)).write_text(str(os.getpid()))


def _signal_self(number: int) -> Callable[[str], None]:
    return lambda value: os.kill(os.getpid(), number)


def _raise(value: str) -> None:
    raise RuntimeError(value or "an error made by the drill")


def _no_space(value: str) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _fill(folder: str) -> None:
    """Use up the disk of a folder."""
    with open(os.path.join(folder, ".filler"), "ab", buffering=0) as file, contextlib.suppress(OSError):
        for size in (1 << 16, 1 << 10, 1):
            with contextlib.suppress(OSError):
                while file.write(b"\0" * size) == size:
                    pass


def _clock_back(seconds: str) -> None:
    """The clock of this process; the machine's own is left alone."""
    original = time.time
    time.time = lambda: original() - float(seconds)


def _use_files(value: str) -> None:
    """Open files until no more are allowed, and keep them."""
    with contextlib.suppress(OSError):
        while True:
            os.open(os.devnull, os.O_RDONLY)


def _shards(folder: str) -> list[Path]:
    return sorted(Path(folder).glob("*.tar"))


def _truncate(folder: str) -> None:
    for path in _shards(folder):
        os.truncate(path, path.stat().st_size // 3)


def reordered(shard: bytes) -> bytes:
    """Other content of the same length: the samples in another order would be read at the old offsets."""
    half = len(shard) // 1024 * 512
    return shard[half:] + shard[:half]


def _rewrite(folder: str) -> None:
    for path in _shards(folder):
        path.write_bytes(reordered(path.read_bytes()))


def _replaced(make: Callable[[Path], None]) -> Callable[[str], None]:
    def replace(folder: str) -> None:
        for path in _shards(folder):
            path.unlink()
            make(path)

    return replace


ACTIONS: dict[str, Callable[[str], None]] = {
    "kill": _signal_self(signal.SIGKILL),
    "stop": _signal_self(signal.SIGSTOP),
    "raise": _raise,
    "no_space": _no_space,
    "sleep": lambda value: time.sleep(float(value or FOREVER)),
    "fill": _fill,
    "use_files": _use_files,
    "clock_back": _clock_back,
    "read_only": lambda folder: os.chmod(folder, 0o555),
    "truncate": _truncate,
    "rewrite": _rewrite,
    "delete": _replaced(lambda path: None),
    "fifo": _replaced(os.mkfifo),
    "folder": _replaced(lambda path: path.mkdir()),
    "remove": lambda path: shutil.rmtree(path),
    "touch": lambda path: Path(path).touch(),
    "pid": _write_pid,
}


# -------------------------------------------------------------------------------------------------------------- points

Pass = Callable[[], None]  # called by a process that passes the point


def _around(owner: str, name: str, after: bool = False) -> Callable[[Pass], None]:
    """Lets calls of a function pass a point, before it or after it has returned. owner: module, or module:class."""

    def install(passed: Pass) -> None:
        holder = pkgutil.resolve_name(owner)
        original = getattr(holder, name)

        def wrapped(*args, **options):
            if not after:
                passed()
            result = original(*args, **options)
            if after:
                passed()
            return result

        setattr(holder, name, wrapped)

    return install


def _at_write(passed: Pass) -> None:
    """Each write of a checkpoint, index or record, before it."""
    from diff_dalle import storage

    class Written:
        def __init__(self, file):
            self._file = file

        def write(self, data):
            passed()
            return self._file.write(data)

        def __getattr__(self, name):
            return getattr(self._file, name)

    original = storage.atomic_writer

    @contextlib.contextmanager
    def writer(path: str):
        with original(path) as file:
            yield Written(file)

    storage.atomic_writer = writer


POINTS: dict[str, Callable[[Pass], None]] = {
    "step": _around("diff_dalle.training.loop:TrainLoop", "update"),
    "save": _around("diff_dalle.training.loop:TrainLoop", "save"),
    "write": _at_write,
    "rename": _around("os", "replace"),
    "renamed": _around("os", "replace", after=True),
    "sync": _around("os", "fsync"),
    "index": _around("diff_dalle.data.index", "examine"),
    "chunk": _around("diff_dalle.data.samples:Samples", "__getitems__"),  # in a data worker, before samples
    "checkpoint": _around("diff_dalle.checkpoints.run_folder:RunFolder", "save", after=True),  # which is complete
    "log": _around("diff_dalle.storage", "append_text"),
}


# ------------------------------------------------------------------------------------------------------- poisons

Steps = range  # numbers of steps, from 1 on


def _poison_images(steps: Steps, value: float) -> None:
    """One pixel of the first image of a step's batch."""
    from diff_dalle.data.loader import Loader

    original = Loader.batches

    def batches(self, position: int, *arguments, **options):
        for number, batch in enumerate(original(self, position, *arguments, **options), start=1):
            if number in steps:
                images = batch.images.clone()
                images[0, 0, 0, 0] = value
                batch = dataclasses.replace(batch, images=images)
            yield batch

    Loader.batches = batches  # type: ignore[method-assign]


class _Step:
    """The number of the update in progress."""

    def __init__(self):
        from diff_dalle.training.trainee import Trainee

        self.number, original = 0, Trainee.update

        def update(trainee, *arguments, **options):
            self.number += 1
            return original(trainee, *arguments, **options)

        Trainee.update = update  # type: ignore[method-assign, assignment]


def _poison_loss(steps: Steps, value: float) -> None:
    """The loss of this rank's first sample."""
    from diff_dalle.tasks.contrastive import ContrastiveTask
    from diff_dalle.tasks.denoising import DenoisingTask

    step = _Step()
    for task, name in ((DenoisingTask, "losses"), (ContrastiveTask, "_named_losses")):
        original = getattr(task, name)

        def poisoned(self, *arguments, original=original):
            named = original(self, *arguments)
            if step.number not in steps:
                return named
            factor = named["loss"].new_ones(len(named["loss"]))
            factor[0] = value
            return {**named, "loss": named["loss"] * factor}

        setattr(task, name, poisoned)


def _poison_gradient(steps: Steps, value: float) -> None:
    """One element of the gradient of one parameter, before it is exchanged with the other ranks."""
    from diff_dalle.training.trainee import Trainee

    step = _Step()
    original = Trainee.update

    def update(trainee, *arguments, **options):
        if step.number + 1 not in steps:
            return original(trainee, *arguments, **options)

        def poisoned(gradient):
            gradient = gradient.clone()
            gradient.view(-1)[0] = value
            return gradient

        parameter = next(p for p in trainee.task.model.parameters() if p.requires_grad)
        handle = parameter.register_hook(poisoned)
        try:
            return original(trainee, *arguments, **options)
        finally:
            handle.remove()

    Trainee.update = update  # type: ignore[method-assign, assignment]


POISONS: dict[str, Callable[[Steps, float], None]] = {
    "images": _poison_images,
    "loss": _poison_loss,
    "gradient": _poison_gradient,
}


# ------------------------------------------------------------------------------------------------------- the plan


def install(plan: list[Injection]) -> None:
    """Replace what the plan needs in this process."""
    from diff_dalle.distributed.launch import detect

    for each in reversed(plan):  # so that what passes the same point happens in the order of the plan
        if each.rank not in (None, detect().rank):
            continue
        if each.point in POISONS:
            steps = range(each.number, each.number + int(each.value or 1))
            POISONS[each.point](steps, float(each.action))
        else:
            POINTS[each.point](_counted(each))


def _counted(injection: Injection) -> Pass:
    passes = 0

    def passed() -> None:
        nonlocal passes
        passes += 1
        if passes == injection.number:
            ACTIONS[injection.action](injection.value)

    return passed


def main() -> None:
    plan = [Injection(**each) for each in json.loads(os.environ.get(PLAN, "[]"))]
    if plan:
        install(plan)
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(sys.argv[0])
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
