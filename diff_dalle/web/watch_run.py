"""What the folder of a run says about its training so far. Nothing is written, and a run may be writing meanwhile."""

from __future__ import annotations

import contextlib
import csv
import json
import math
import os
import re
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np

from .. import storage
from ..checkpoints.record import load_record
from ..checkpoints.run_lock import FILE as LOCK
from ..checkpoints.run_lock import STALE_SECONDS
from ..config import InputError, quantity

LOGS = ("progress.jsonl", "progress.csv")  # the first that exists is read
RECENT = 10  # log lines whose throughput makes the forecast
_GRID = re.compile(r"(.+)_(\d{6,})\.png")

Point = tuple[int, float]  # step, value
Row = tuple[int, dict[str, float]]


@dataclass(frozen=True)
class WatchedRun:
    """A run as its folder shows it.

    kind:    of network; "" = not known.
    series:  points by increasing step, by the name under which they were logged: finite values only.
    grids:   paths of image grids by name and, by increasing, step.
    goals:   the settings ``iterations`` and ``samples`` of its training, 0 = no limit.
    running: whether its process has given a sign of life lately.
    notes:   sentences about what could not be read.
    """

    logdir: str
    kind: str
    series: Mapping[str, Sequence[Point]]
    grids: Mapping[str, Mapping[int, str]]
    goals: tuple[int, int]
    running: bool
    notes: Sequence[str]

    @property
    def step(self) -> int:
        """The last step that is logged."""
        return max((points[-1][0] for points in self.series.values()), default=0)

    @property
    def samples(self) -> int:
        """Training samples at the last log line that counts them."""
        return int(self.series["samples"][-1][1]) if "samples" in self.series else 0

    @property
    def batch(self) -> float:
        """Samples per step of all processes, by the last two log lines; 0 = not known yet."""
        counted = [(0, 0.0), *self.series.get("samples", ())][-2:]
        (then, before), (step, samples) = counted[0], counted[-1]
        return (samples - before) / (step - then) if step > then and samples > before else 0.0

    @property
    def samples_per_second(self) -> float:
        """Throughput over the last log lines, each of which stands for as many samples; 0 = not known yet."""
        recent = [value for _, value in self.series.get("samples_per_second", ())[-RECENT:] if value > 0]
        return statistics.harmonic_mean(recent) if recent else 0.0

    @property
    def last_step(self) -> int | None:
        """The step at which training ends, as ``TrainingConfig.last_step``; None = not known."""
        iterations, samples = self.goals
        by_samples = 0
        if samples and self.batch:
            counted = self.series["samples"][-1][0]
            by_samples = counted + math.ceil(max(0, samples - self.samples) / self.batch)
        return min((steps for steps in (iterations, by_samples) if steps), default=None)

    @property
    def seconds_left(self) -> float | None:
        """Training time that is left at the present throughput; None = not known."""
        if self.last_step is None:
            return None
        steps = max(0, self.last_step - self.step)
        if steps and not (self.batch and self.samples_per_second):
            return None
        return steps * self.batch / self.samples_per_second if steps else 0.0

    @property
    def parts(self) -> list[str]:
        """What stands before the names of the losses: "" alone, or one text for each of several networks."""
        found = (name.removesuffix("loss") for name in self.series if re.fullmatch(r"(.+/)?loss", name))
        return sorted({part.removesuffix("held_out/") for part in found})

    def curve(self, name: str, by: str = "step") -> list[tuple[float, float]]:
        """Points of a series over steps, or over ``by`` "samples"; none if it is not logged."""
        points = self.series.get(name, ())
        if by == "step" or not points:
            return list(points)
        steps, samples = np.array([(0, 0), *self.series.get("samples", ())], dtype=float).T
        return [(float(np.interp(step, steps, samples)), value) for step, value in points]


def read_watched(logdir: str) -> WatchedRun:
    """The run in a folder, local or remote.

    A last line that is still being written is left for the next call. Lines that cannot be read are counted in a note.
    Where steps are logged twice, since the run was resumed, the later ones count. Raises InputError for a folder
    without a run.
    """
    notes: list[str] = []
    kind, config = _identity(logdir, notes)
    log = next((path for name in LOGS if storage.exists(path := storage.join(logdir, name))), None)
    if log is None:
        if not kind:
            raise InputError(f"{logdir} holds no run to watch: give a log directory, which has run.json or {LOGS[0]}")
        notes.append(f"Nothing is logged yet in {LOGS[0]} or {LOGS[1]}, the trackers jsonl and csv.")
    series = _series(_rows(log, notes)) if log else {}
    training = config.get("training")
    goals = training if isinstance(training, dict) else {}
    iterations, samples = (int(_number(goals.get(name)) or 0) for name in ("iterations", "samples"))
    return WatchedRun(logdir, kind, series, _grids(logdir), (iterations, samples), _is_running(logdir), notes)


def _identity(logdir: str, notes: list[str]) -> tuple[str, dict[str, Any]]:
    """Kind and config of run.json, ("", {}) where it is missing or damaged."""
    try:
        record = load_record(logdir)
    except InputError as error:
        notes.append(f"{error}.")
        return "", {}
    return (record.identity.kind, record.identity.config) if record else ("", {})


def _rows(log: str, notes: list[str]) -> list[Row]:
    """The rows of a log by increasing step."""
    text = storage.read_bytes(log).decode("utf-8", "replace")  # a crash may leave anything
    lines = [line for line in text[: text.rfind("\n") + 1].splitlines() if line.strip()]
    columns = _cells(lines.pop(0)) if log.endswith(".csv") and lines else None
    rows: list[Row] = []
    damaged = 0
    for row in (_row(line, columns) for line in lines):
        step = row.pop("step", -1.0)
        if step < 0:
            damaged += 1
            continue
        while rows and rows[-1][0] > step:  # resumed at an earlier step
            rows.pop()
        if rows and rows[-1][0] == step:
            rows[-1][1].update(row)  # training and held-out values come in lines of their own
        else:
            rows.append((int(step), row))
    if damaged:
        notes.append(f"{quantity(damaged, 'line')} of {log} cannot be read.")
    return rows


def _row(line: str, columns: Sequence[str] | None) -> dict[str, float]:
    """The numbers of a line by name, none of a damaged one; columns: of a table, None = it is JSON."""
    try:
        row = json.loads(line) if columns is None else dict(zip_longest(columns, _cells(line)))
    except (ValueError, RecursionError):
        return {}
    if not isinstance(row, dict) or None in row:  # more values than columns
        return {}
    found = ((name, _number(value)) for name, value in row.items())
    return {name: value for name, value in found if value is not None}


def _cells(line: str) -> list[str]:
    """The cells of a line of a table, none of a damaged one."""
    try:
        return next(csv.reader([line]))
    except csv.Error:
        return []


def _number(value: Any) -> float | None:
    """A finite number or its text; None for anything else."""
    if isinstance(value, (int, float, str)) and not isinstance(value, bool):
        with contextlib.suppress(ValueError, OverflowError):
            number = float(value)
            return number if math.isfinite(number) else None
    return None


def _series(rows: Iterable[Row]) -> dict[str, list[Point]]:
    series: dict[str, list[Point]] = {}
    for step, values in rows:
        for name, value in values.items():
            series.setdefault(name, []).append((step, value))
    return series


def _grids(logdir: str) -> dict[str, dict[int, str]]:
    """The files NAME_STEP.png of the folder ``samples``."""
    folder = storage.join(logdir, "samples")
    found: dict[str, dict[int, str]] = {}
    try:
        paths = storage.list_files(folder)
    except InputError:  # there is none
        return {}
    for path in paths:
        if match := _GRID.fullmatch(storage.split(path)[1]):
            found.setdefault(match[1], {})[int(match[2])] = path
    return {name: dict(sorted(grids.items())) for name, grids in sorted(found.items())}


def _is_running(logdir: str) -> bool:
    """Whether the run's lock names a process; in a local folder, one that has rewritten it lately."""
    path = storage.join(logdir, LOCK)
    try:
        held = storage.exists(path) and bool(storage.read_bytes(path, 0, 1))
        if held and not storage.is_remote(path):
            return time.time() - os.path.getmtime(storage.local_path(path)) < STALE_SECONDS
    except (InputError, OSError):  # the run has ended meanwhile
        return False
    return held


def thinned(points: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """At most ``most`` points: means of neighbors, as many in each but the last."""
    size = -(-len(points) // most)
    if size <= 1:
        return list(points)
    parts = [points[i : i + size] for i in range(0, len(points), size)]
    return [(statistics.fmean(x for x, _ in part), statistics.fmean(y for _, y in part)) for part in parts]


def labels(logdirs: Sequence[str]) -> list[str]:
    """A short name for each of several folders: the last part of its path, all of it where these are equal."""
    ends = [storage.split(logdir.rstrip("/"))[1] or logdir for logdir in logdirs]
    return [end if ends.count(end) == 1 else logdir for end, logdir in zip(ends, logdirs, strict=True)]
