"""The interface of everything that displays or records the progress of a run.

To add a tracker: a file with a subclass of `Tracker` whose constructor takes a `Run`, and an entry in
``trackers.TRACKERS``. Import an optional package with `import_extra`; runs look for its ``module`` at the start.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import BinaryIO

import numpy as np

from ..config import InputError, named

WIDTH = 40  # maximum characters of a name; longer names are shortened in the middle


@dataclass(frozen=True)
class Run:
    """What trackers know about a run.

    logdir:      log directory, local or remote.
    settings:    the resolved configuration as nested plain values.
    step:        updates completed when this session starts; 0 = a new run. Later steps, logged by a session that died
                 before its next checkpoint, will be logged again.
    total_steps: updates after which the run ends, counted from its start; None = unknown.
    project, entity, name: where a service lists the run, and its name there; empty = the service's default.
    run_id, resume: the service's run to continue, see ``WandbTracker``.
    epoch_samples: samples per epoch.
    meta: the texts that configure the run, by file name.
    samples_dir: folder for image grids; empty = "samples" in the log directory.
    """

    logdir: str
    settings: Mapping[str, object] = field(default_factory=dict)
    step: int = 0
    total_steps: int | None = None
    project: str = ""
    entity: str = ""
    name: str = ""
    run_id: str = ""
    resume: str = "auto"
    epoch_samples: int = 1
    meta: Mapping[str, str] = field(default_factory=dict)
    samples_dir: str = ""


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint that is being written.

    trainees: names of what is trained.
    loss:     latest held-out loss, the mean over the trainees; None = there was no evaluation yet.
    best:     whether that is the loss of this checkpoint and the lowest so far.
    forms:    what can be stored of it, by ``save_type``: functions that write one file, for
              which the one of the checkpoint waits.
    """

    step: int
    samples: int
    trainees: tuple[str, ...]
    loss: float | None
    best: bool
    forms: Mapping[str, Callable[[BinaryIO], object]]


@dataclass(frozen=True)
class Table:
    """Texts and pictures of samples, a row for each.

    columns: by their names, the cells of all rows: texts, or pictures (uint8 [H, W, 3]).
    """

    columns: Mapping[str, Sequence[str] | Sequence[np.ndarray] | np.ndarray]

    def rows(self) -> list[tuple[str | np.ndarray, ...]]:
        return list(zip(*self.columns.values(), strict=True))


class Tracker:
    """Displays or records progress. This base class does nothing, which is right for every rank but the first.

    module:   of the optional package that it needs; its extra has the tracker's name in ``TRACKERS``.
    optional: a failure while logging turns the tracker off instead of ending the run.
    """

    module = ""
    optional = False

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Values measured after ``step`` updates; may be called several times per step, with different names."""

    def images(self, step: int, name: str, grid: np.ndarray) -> None:
        """An image after ``step`` updates: uint8 [H, W, 3]."""

    def table(self, step: int, name: str, table: Table) -> None:
        """The samples of an image grid after ``step`` updates, one by one, with their texts. Does nothing where
        there is no form for it."""

    def figure(self, step: int, name: str, image: np.ndarray) -> None:
        """A plot of the state after ``step`` updates, which replaces the previous one: uint8 [H, W, 3]."""
        self.images(step, name, image)

    def progress(self, step: int) -> None:
        """``step`` updates are completed. Called after every update, so it must be cheap."""

    def note(self, text: str) -> None:
        """A message for people who follow the run or read its log."""

    def saved(self, saved: Saved) -> None:
        """A checkpoint is being written. Raises, for a form that needs it, when that fails."""

    def hurry(self) -> None:
        """The session was told to end at once: ``finish`` must not wait for a server."""

    def finish(self) -> None:
        """The session has ended; no call follows."""


def import_extra(module: str, extra: str, user: str = "") -> ModuleType:
    """A module of an optional package. Raises InputError, which names the extra, when it is not installed.

    user: the setting that needs it; empty = the tracker of the extra's name.
    """
    what, remedy = (
        (user, f"leave {user} out") if user else (f"tracker {extra}", f"remove {extra} from {named('trackers')}")
    )
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InputError(
            f"{what} needs a package that is not installed ({error}): run `pip install 'diff_dalle[{extra}]'`, or "
            f"{remedy}"
        ) from None


def format_table(scalars: Mapping[str, float]) -> str:
    """Lines of ``| name | value |``, sorted by name, between two rules.

    Integers are printed in full, other numbers with three significant digits. Names with a dot are left out: they are
    cells of a table (``table.cell``), too many to read here.
    """
    scalars = {name: value for name, value in scalars.items() if "." not in name}
    names = [name if len(name) <= WIDTH else f"{name[:18]}...{name[-19:]}" for name in sorted(scalars)]
    values = [f"{value:.0f}" if float(value).is_integer() else f"{value:.3g}" for _, value in sorted(scalars.items())]
    left, right = max(map(len, names), default=0), max(map(len, values), default=0)
    rule = "-" * (left + right + 7)
    lines = [f"| {name:{left}} | {value:{right}} |" for name, value in zip(names, values, strict=True)]
    return "\n".join([rule, *lines, rule])
