"""Runs a script with faults planned for its process: ``python -m diff_dalle.drill.inside SCRIPT FLAGS``.

The product has no hooks for the drill: this file replaces functions of the running process before the script starts.
The plan is a JSON list of injections in the environment.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import runpy
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from .poison import POISONS

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
    from ..distributed.launch import detect

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


def _rewrite(folder: str) -> None:
    """Other content of the same length: the samples in another order would be read at the old offsets."""
    for path in _shards(folder):
        data = path.read_bytes()
        half = len(data) // 1024 * 512
        path.write_bytes(data[half:] + data[:half])


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


def _before(owner, name: str, passed: Pass) -> None:
    """Let calls of a function pass a point first."""
    original = getattr(owner, name)

    def wrapped(*args, **options):
        passed()
        return original(*args, **options)

    setattr(owner, name, wrapped)


def _after(owner, name: str, passed: Pass) -> None:
    original = getattr(owner, name)

    def wrapped(*args, **options):
        result = original(*args, **options)
        passed()
        return result

    setattr(owner, name, wrapped)


def _at_step(passed: Pass) -> None:
    from ..training.loop import TrainLoop

    _before(TrainLoop, "update", passed)


def _at_save(passed: Pass) -> None:
    from ..training.loop import TrainLoop

    _before(TrainLoop, "save", passed)


def _at_write(passed: Pass) -> None:
    """Each write of a checkpoint, index or record, before it."""
    from .. import storage

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


def _at_rename(passed: Pass) -> None:
    _before(os, "replace", passed)


def _at_renamed(passed: Pass) -> None:
    _after(os, "replace", passed)


def _at_sync(passed: Pass) -> None:
    _before(os, "fsync", passed)


def _at_index(passed: Pass) -> None:
    from ..data import index

    _before(index, "examine", passed)


def _at_chunk(passed: Pass) -> None:
    """In a data worker, before it prepares samples."""
    from ..data.samples import Samples

    _before(Samples, "__getitems__", passed)


def _at_checkpoint(passed: Pass) -> None:
    """After a complete checkpoint."""
    from ..checkpoints.run_folder import RunFolder

    _after(RunFolder, "save", passed)


def _at_log(passed: Pass) -> None:
    from ..tracking import files

    _before(files, "append", passed)


POINTS: dict[str, Callable[[Pass], None]] = {
    "step": _at_step,
    "save": _at_save,
    "write": _at_write,
    "rename": _at_rename,
    "renamed": _at_renamed,
    "sync": _at_sync,
    "index": _at_index,
    "chunk": _at_chunk,
    "checkpoint": _at_checkpoint,
    "log": _at_log,
}


def install(plan: list[Injection]) -> None:
    """Replace what the plan needs in this process."""
    from ..distributed.launch import detect

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
