"""What only shows after long: memory and files that grow, and a run that changes its number of processes on the way."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from script_running import json_lines

from .contract import Group, Skipped, require
from .place import SAVED_EVERY, Place
from .processes import Job, environment, mpiexec
from .soak import OUTPUT

GROUP = Group("long")
PARTS = ((1, 24, 0, 0), (2, 6, 1, 2), (4, 3, 1, 0), (2, 4, 2, 1), (1, 5, 0, 2))  # processes, microbatch, workers, …
ELASTIC_BATCH = 24
SOAK_MINUTES, QUICK_SOAK_MINUTES = 30.0, 0.5
SOAK_STEPS, QUICK_SOAK_STEPS = 100_000, 1_000
MAX_GROWTH = 0.02  # of resident memory, from the second quarter of a soak to its last
MAX_BYTES_PER_STEP = 600  # of the log directory: what log lines take


@GROUP.fault("1 → 2 → 4 → 2 → 1 processes", "same samples, noise and loss within 1e-5, logs without a seam")
def elastic(place: Place) -> str:
    """Micro-batch, workers and prefetch change with every part."""
    done = 0
    for part, (processes, microbatch, workers, prefetch) in enumerate(PARTS):
        done += SAVED_EVERY - (part == 2)
        flags = {"batch_size": ELASTIC_BATCH // processes, "num_workers": workers, "prefetch": prefetch + 1}
        if (ELASTIC_BATCH // processes) % microbatch == 0:
            flags["microbatch"] = microbatch
        launcher: Sequence[str] = mpiexec(processes) if processes > 1 else ()
        place.run(launcher=launcher, iterations=done, **flags).succeeded(f"on {processes} processes")
    text = place.close(batch_size=ELASTIC_BATCH, iterations=done)
    rows = json_lines(place.logdir / "progress.jsonl")
    require([row["samples"] for row in rows] == [ELASTIC_BATCH * (i + 1) for i in range(done)], "samples have a seam")
    csv = (place.logdir / "progress.csv").read_text().splitlines()
    require(len(csv) == done + 1, f"progress.csv has {len(csv) - 1} rows of {done} steps")
    return f"{done} steps, {text}"


def growth(values: Sequence[float]) -> float:
    """Growth from the first third of a series to its last, as a fraction."""
    third = max(1, len(values) // 3)
    early, late = statistics.median(values[:third]), statistics.median(values[-third:])
    return (late - early) / max(early, 1.0)


def _soak(place: Place, task: str, amount: float) -> str:
    report = place.path / "soak.json"
    script, *flags = place.command()[3:]
    command = [sys.executable, "-m", "drills.soak", task, str(amount), str(report), script, *flags]
    limit = 4 * 60 * amount + 600 if task == "sample" else amount + 600
    Job(command, place.path / OUTPUT, environment()).wait(limit).succeeded()
    rows = json.loads(Path(report).read_text())
    rows = rows[len(rows) // 4 :]  # caches and buffers have filled, and a first checkpoint is there
    memory, files = growth([row["memory"] for row in rows]), growth([row["files"] for row in rows])
    disk = (rows[-1]["disk"] - rows[0]["disk"]) / max(1, rows[-1]["done"] - rows[0]["done"])
    held = f"{rows[-1]['memory'] / 2**20:.0f} MiB {memory:+.2%}"
    seen = f"{rows[-1]['done']:,} done; memory {held}, open files {files:+.1%}, disk {disk:.0f} B each"
    require(memory <= MAX_GROWTH and files <= 0 and disk <= MAX_BYTES_PER_STEP, f"it grows: {seen}")
    return seen


@GROUP.fault("a long training run in one process", "memory, open files and disk are flat")
def long_training(place: Place) -> str:
    return _soak(place, "train", QUICK_SOAK_STEPS if place.quick else SOAK_STEPS)


@GROUP.fault("training and sampling for long", "memory, open files and disk are flat", every_kind=False)
def long_sampling(place: Place) -> str:
    if place.kind != "generator":
        raise Skipped("only a generator samples by itself")
    return _soak(place, "sample", QUICK_SOAK_MINUTES if place.quick else SOAK_MINUTES)
