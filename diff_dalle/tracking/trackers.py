"""Several trackers as one, chosen by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from .. import storage
from ..config import lookup, option
from ..errors import InputError
from .console import ConsoleTracker
from .files import CsvLog, JsonLog, SampleGrids, TextLog
from .tensorboard import TensorboardTracker
from .tracker import Run, Tracker
from .wandb import WandbTracker

TRACKERS: dict[str, Callable[[Run], Tracker]] = {
    "console": ConsoleTracker,
    "log": TextLog,
    "csv": CsvLog,
    "jsonl": JsonLog,
    "samples": SampleGrids,
    "tensorboard": TensorboardTracker,
    "wandb": WandbTracker,
}


@dataclass(frozen=True)
class TrackingConfig:
    """Logging"""

    trackers: tuple[str, ...] = option(
        ("console", "log", "csv", "jsonl", "samples"),
        "where progress goes: console; log (log.txt), csv and jsonl (progress.*) and samples (pictures) in the log"
        " directory; the extras tensorboard and wandb",
        free=True,
    )
    wandb_project: str = option("diff_dalle", "project on wandb (WANDB_MODE=offline keeps the run on disk)", free=True)
    wandb_entity: str = option("", "user or team on wandb; empty = the one logged in", free=True)
    wandb_run_name: str = option("", "name of the run on wandb; empty = chosen by wandb", free=True)

    def __post_init__(self):
        for name in self.trackers:
            lookup(TRACKERS, name, "tracker")
            if self.trackers.count(name) > 1:
                raise InputError(f"trackers names {name} twice")


class Trackers(Tracker):
    """Passes everything on to its members.

    A member that is ``optional`` and fails is reported once, through the others, and left out from then on.
    """

    def __init__(self, members: Mapping[str, Tracker]):
        self.members = dict(members)

    def log(self, step: int, scalars: Mapping[str, float | Tensor]) -> None:
        """As `Tracker.log`; values may also be tensors of one element."""
        plain = {name: value if isinstance(value, int) else float(value) for name, value in scalars.items()}
        self._tell(lambda member: member.log(step, plain))

    def images(self, step: int, name: str, grid: np.ndarray | Tensor) -> None:
        """As `Tracker.images`; the grid may also be a tensor."""
        pixels = _pixels(grid)
        self._tell(lambda member: member.images(step, name, pixels))

    def figure(self, step: int, name: str, picture: np.ndarray | Tensor) -> None:
        """As `Tracker.figure`; the picture may also be a tensor."""
        pixels = _pixels(picture)
        self._tell(lambda member: member.figure(step, name, pixels))

    def progress(self, step: int) -> None:
        self._tell(lambda member: member.progress(step))

    def note(self, text: str) -> None:
        self._tell(lambda member: member.note(text))

    def finish(self) -> None:
        self._tell(lambda member: member.finish())

    def _tell(self, call: Callable[[Tracker], None]) -> None:
        for name, member in list(self.members.items()):
            try:
                call(member)
            except Exception as error:  # whatever a service's client raises must not end a run of weeks
                if not member.optional:
                    raise
                del self.members[name]
                reason = f"{type(error).__name__}: {error}"
                self.note(f"Tracker {name} is switched off, training goes on without it: {reason}")


def _pixels(picture: np.ndarray | Tensor) -> np.ndarray:
    picture = picture.cpu().numpy() if isinstance(picture, Tensor) else picture
    if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] != 3:
        raise TypeError(f"a picture must be uint8 [H, W, 3], not {picture.dtype} {list(picture.shape)}")
    return np.ascontiguousarray(picture)


def create_trackers(
    config: TrackingConfig, logdir: str, settings: Mapping[str, object], step: int = 0, total_steps: int | None = None
) -> Trackers:
    """The trackers of a run that starts at ``step``; see `Run` for the arguments. For the first rank only.

    Raises InputError for a missing extra, and when a service refuses the run.
    """
    storage.make_dirs(logdir)
    names = (config.wandb_project, config.wandb_entity, config.wandb_run_name)
    run = Run(logdir, settings, step, total_steps, *names)
    return Trackers({name: TRACKERS[name](run) for name in config.trackers})
