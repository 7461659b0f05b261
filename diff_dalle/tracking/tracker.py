"""The interface of everything that shows or records the progress of a run.

To add one: write a file with a subclass of `Tracker` whose constructor takes a `Run`, and enter it in
``trackers.TRACKERS``. A package that only it needs is imported with `import_extra`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType

import numpy as np

from ..errors import InputError


@dataclass(frozen=True)
class Run:
    """What trackers know of a run.

    logdir:      folder of the run, local or remote.
    settings:    the resolved configuration as nested plain values.
    step:        updates done when this session starts; 0 = a new run. What was logged beyond it, by a session that
                 died before its next checkpoint, will be logged again.
    total_steps: updates after which the run ends, counted from its beginning; None = not known.
    project, entity, name: where and how a shared service lists the run; empty = its own choice.
    """

    logdir: str
    settings: Mapping[str, object] = field(default_factory=dict)
    step: int = 0
    total_steps: int | None = None
    project: str = ""
    entity: str = ""
    name: str = ""


class Tracker:
    """Shows or records progress. This base does nothing with what it is told: all that a rank but the first needs.

    optional: a failure while logging switches the tracker off instead of ending the run.
    """

    optional = False

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Values measured after ``step`` updates; may be called several times a step, with different names."""

    def images(self, step: int, name: str, grid: np.ndarray) -> None:
        """A picture made after ``step`` updates: uint8 [H, W, 3]."""

    def figure(self, step: int, name: str, picture: np.ndarray) -> None:
        """A plot of how things stand after ``step`` updates, which replaces the one before: uint8 [H, W, 3]."""
        self.images(step, name, picture)

    def progress(self, step: int) -> None:
        """``step`` updates are done. Called after each of them, so it must cost next to nothing."""

    def note(self, text: str) -> None:
        """A sentence for whoever watches the run or reads about it later."""

    def finish(self) -> None:
        """The session is over; nothing follows."""


def import_extra(module: str, extra: str) -> ModuleType:
    """A module of an optional package. Raises InputError that names the extra when it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InputError(
            f"trackers names {extra}, whose package is not installed ({error}): run"
            f" `pip install 'diff_dalle[{extra}]'`, or take {extra} out of --trackers"
        ) from None
