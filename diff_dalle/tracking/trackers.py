"""The table of trackers, and several of them as one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from .. import storage
from ..config import Fault, named, option, redact, settings
from .console import ConsoleTracker
from .files import CsvLog, JsonLog, SampleGrids, TensorboardTracker, TextLog
from .loader import LoaderConfig
from .saver import SaverConfig, check_savers, create_savers
from .tracker import Run, Saved, Table, Tracker, import_extra
from .wandb import RESUMES, WandbTracker, logged_run

TRACKERS: dict[str, Callable[[Run], Tracker]] = {
    "console": ConsoleTracker,
    "log": TextLog,
    "csv": CsvLog,
    "jsonl": JsonLog,
    "samples": SampleGrids,
    "tensorboard": TensorboardTracker,
    "wandb": WandbTracker,
}


@settings
class TrackingConfig:
    """Logging"""

    trackers: tuple[str, ...] = option(
        ("console", "log", "csv", "jsonl", "samples"),
        "trackers: console; log (log.txt), csv, jsonl (progress.*) and samples (image grids) in the log directory;"
        " tensorboard and wandb (extras)",
        free=True,
        choices=TRACKERS,
    )
    samples_dir: str = option(
        "", "folder for image grids; empty = samples in the log directory", free=True, needs=("trackers", "samples")
    )
    wandb_project: str = option(
        "diff_dalle", "wandb project (WANDB_MODE=offline keeps the run on disk)", free=True, needs=("trackers", "wandb")
    )
    wandb_entity: str = option(
        "", "wandb user or team; empty = the one logged in", free=True, needs=("trackers", "wandb")
    )
    wandb_run_name: str = option(
        "", "name of the wandb run; empty = chosen by wandb", free=True, needs=("trackers", "wandb")
    )
    wandb_run_id: str = option(
        "", "id of the wandb run to continue; empty = that of the log directory", free=True, needs=("trackers", "wandb")
    )
    wandb_resume: str = option(
        "auto",
        "auto = a resumed training continues its wandb run; never = every session is a new one; must = the run "
        "wandb_run_id has to exist",
        choices=RESUMES,
        free=True,
        needs=("trackers", "wandb"),
    )
    savers: tuple[SaverConfig, ...] = option((), "where to keep checkpoints beside the log directory", free=True)
    load: LoaderConfig | None = option(
        None, "source of the checkpoint or weights that a new log directory starts from", free=True
    )

    def faults(self) -> Iterator[Fault]:
        if self.wandb_resume == "must" and not self.wandb_run_id:
            yield Fault("wandb_resume", f"is must, but {named('wandb_run_id')} is empty: name the run to continue")
        if self.wandb_resume == "never" and self.wandb_run_id:
            yield Fault("wandb_run_id", f"is given, but {named('wandb_resume')} is never: leave one of them out")
        yield from check_savers(self.savers, "savers")
        for name in self.trackers:
            if self.trackers.count(name) > 1:
                yield Fault("trackers", f"lists {name} twice: give each tracker once")

    def wandb_run_path(self, logdir: str) -> str:
        """The wandb run that a session in a log directory continues, as entity/project/id; "" if it is not known."""
        run_id = self.wandb_run_id or (logged_run(logdir) if self.wandb_resume == "auto" else "")
        return f"{self.wandb_entity}/{self.wandb_project}/{run_id}" if run_id and self.wandb_entity else ""


class Trackers(Tracker):
    """Forwards every call to its members.

    An ``optional`` member that fails is reported once, by the others, and then removed.
    """

    def __init__(self, members: Mapping[str, Tracker]):
        self.members = dict(members)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self._forward("log", step, scalars)

    def images(self, step: int, name: str, grid: np.ndarray) -> None:
        self._forward("images", step, name, _pixels(grid))

    def table(self, step: int, name: str, table: Table) -> None:
        for row in table.rows():
            for cell in row:
                if not isinstance(cell, str):
                    _pixels(cell)
        self._forward("table", step, name, table)

    def figure(self, step: int, name: str, image: np.ndarray) -> None:
        self._forward("figure", step, name, _pixels(image))

    def progress(self, step: int) -> None:
        self._forward("progress", step)

    def note(self, text: str) -> None:
        """`Tracker.note`, without the secrets that paths may carry."""
        self._forward("note", redact(text))

    def saved(self, saved: Saved) -> None:
        self._forward("saved", saved)

    def hurry(self) -> None:
        self._forward("hurry")

    def finish(self) -> None:
        self._forward("finish")

    def _forward(self, method: str, *arguments: Any) -> None:
        for name, member in list(self.members.items()):
            try:
                getattr(member, method)(*arguments)
            except Exception as error:  # no error of a service's client may end a run of weeks
                if not member.optional:
                    raise
                del self.members[name]
                reason = f"{type(error).__name__}: {error}"
                self.note(f"Tracker {name} is turned off after an error; training continues: {reason}")


def _pixels(image: np.ndarray) -> np.ndarray:
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
        raise TypeError(f"an image must be uint8 [H, W, 3], not {image.dtype} {list(image.shape)}")
    return np.ascontiguousarray(image)


def check_trackers(config: TrackingConfig) -> None:
    """Raise InputError for a tracker whose package is not installed."""
    for name in config.trackers:
        if module := getattr(TRACKERS[name], "module", ""):
            import_extra(module, name)


def create_trackers(
    config: TrackingConfig,
    logdir: str,
    settings: Mapping[str, object],
    step: int = 0,
    total_steps: int | None = None,
    epoch_samples: int = 1,
    meta: Mapping[str, str] | None = None,
) -> Trackers:
    """The trackers of a run that starts at ``step``, for the first rank only; see `Run` for the arguments.

    Raises InputError for a missing extra, and when a service rejects the run.
    """
    storage.make_dirs(logdir)
    run = Run(
        logdir,
        _redacted(settings),
        step,
        total_steps,
        config.wandb_project,
        config.wandb_entity,
        config.wandb_run_name,
        config.wandb_run_id,
        config.wandb_resume,
        epoch_samples,
        meta or {"config.json": json.dumps(settings, indent=1)},
        config.samples_dir,
    )
    members = {name: TRACKERS[name](run) for name in config.trackers}
    trackers = Trackers(members)
    # Before the others, so that these show what is noted at the end, and wandb's run has not ended yet.
    trackers.members = {**create_savers(config.savers, run, members, trackers.note), **members}
    return trackers


def _redacted(value):
    """Settings for a service: the same without secrets in any text."""
    if isinstance(value, Mapping):
        return {key: _redacted(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_redacted(item) for item in value]
    return redact(value) if isinstance(value, str) else value
