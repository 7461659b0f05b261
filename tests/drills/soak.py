"""Trains, or trains and samples, for long in one process and measures what it holds:
``python -m drills.soak TASK AMOUNT REPORT SCRIPT FLAGS``.

TASK is train (AMOUNT = steps) or sample (AMOUNT = minutes).
"""

from __future__ import annotations

import gc
import json
import os
import resource
import runpy
import shutil
import sys
import time
from pathlib import Path

MEASUREMENTS = 100
OUTPUT = "soak.txt"  # what this process prints
PROMPTS = ("a red circle", "two blue squares")


def measured(logdir: Path, done: int) -> dict[str, int]:
    """Resident memory and disk in bytes, and open files."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    sizes = [path.stat().st_size for path in logdir.rglob("*") if path.is_file() and path.name != OUTPUT]
    memory = pages * resource.getpagesize()
    return {"done": done, "memory": memory, "files": len(os.listdir("/proc/self/fd")), "disk": sum(sizes)}


def _with(flags: list[str], **changed) -> list[str]:
    """Flags in pairs of name and value, with some changed."""
    given = dict(zip(flags[::2], flags[1::2], strict=True))
    given |= {f"--{name}": str(value) for name, value in changed.items()}
    return [word for pair in given.items() for word in pair]


def _run(script: str, flags: list[str]) -> None:
    sys.argv = [script, *flags]
    runpy.run_path(script, run_name="__main__")


def soak_training(steps: int, script: str, flags: list[str]) -> list[dict[str, int]]:
    """One run of many steps, with few checkpoints."""
    from diff_dalle.training.loop import TrainLoop

    logdir, every = Path(flags[flags.index("--logdir") + 1]), max(1, steps // MEASUREMENTS)
    rows: list[dict[str, int]] = []
    original = TrainLoop.update

    def update(self, batch):
        original(self, batch)
        if self.step % every == 0:
            rows.append(measured(logdir, self.step))

    TrainLoop.update = update  # type: ignore[method-assign]
    saves = {"save_interval": every, "keep_checkpoints": 1, "log_interval": max(1, every // 2)}
    _run(script, _with(flags, iterations=steps, batch_size=2, **saves))  # what leaks does so by the step
    return rows


def soak_sampling(minutes: float, script: str, flags: list[str]) -> list[dict[str, int]]:
    """Short runs, each followed by sampling from what it has trained."""
    from diff_dalle.sampling.pipeline import load

    logdir = Path(flags[flags.index("--logdir") + 1])
    rows: list[dict[str, int]] = []
    ends, done = time.monotonic() + 60 * minutes, 0
    while time.monotonic() < ends or len(rows) < 4:
        _run(script, _with(flags, num_workers=0))
        (path,) = logdir.glob("ema*12.pt")
        load(str(path)).sample(list(PROMPTS), progress=False)
        shutil.rmtree(logdir)
        done += 1
        rows.append(measured(logdir.parent, done))
    return rows


def main() -> None:
    task, amount, report, script, *flags = sys.argv[1:]
    rows = soak_training(int(amount), script, flags) if task == "train" else soak_sampling(float(amount), script, flags)
    Path(report).write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
