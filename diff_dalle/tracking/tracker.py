"""The interface of everything that displays or records the progress of a run.

To add a tracker: a file with a subclass of `Tracker` whose constructor takes a `Run`, and an entry in
``trackers.TRACKERS``. Import optional packages with `import_extra`.
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
    """What trackers know about a run.

    logdir:      log directory, local or remote.
    settings:    the resolved configuration as nested plain values.
    step:        updates completed when this session starts; 0 = a new run. Later steps, logged by a session that died
                 before its next checkpoint, will be logged again.
    total_steps: updates after which the run ends, counted from its start; None = unknown.
    project, entity, name: where a service lists the run, and its name there; empty = the service's default.
    """

    logdir: str
    settings: Mapping[str, object] = field(default_factory=dict)
    step: int = 0
    total_steps: int | None = None
    project: str = ""
    entity: str = ""
    name: str = ""


class Tracker:
    """Displays or records progress. This base class does nothing, which is right for every rank but the first.

    optional: a failure while logging turns the tracker off instead of ending the run.
    """

    optional = False

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Values measured after ``step`` updates; may be called several times per step, with different names."""

    def images(self, step: int, name: str, grid: np.ndarray) -> None:
        """An image after ``step`` updates: uint8 [H, W, 3]."""

    def figure(self, step: int, name: str, image: np.ndarray) -> None:
        """A plot of the state after ``step`` updates, which replaces the previous one: uint8 [H, W, 3]."""
        self.images(step, name, image)

    def progress(self, step: int) -> None:
        """``step`` updates are completed. Called after every update, so it must be cheap."""

    def note(self, text: str) -> None:
        """A message for people who follow the run or read its log."""

    def finish(self) -> None:
        """The session has ended; no call follows."""


def import_extra(module: str, extra: str) -> ModuleType:
    """A module of an optional package. Raises InputError, which names the extra, when it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InputError(
            f"tracker {extra} needs a package that is not installed ({error}): run"
            f" `pip install 'diff_dalle[{extra}]'`, or remove {extra} from --trackers"
        ) from None
