"""Progress for TensorBoard, in the folder ``tensorboard`` of the log directory."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from .. import storage
from ..errors import InputError, named
from .tracker import Run, Tracker, import_extra


class TensorboardTracker(Tracker):
    """Event files that ``tensorboard --logdir`` shows. Raises InputError for a remote log directory."""

    module = "torch.utils.tensorboard"
    optional = True

    def __init__(self, run: Run):
        summary = import_extra(self.module, "tensorboard")
        if storage.is_remote(run.logdir):
            remedy = f"remove it from {named('trackers')} or set a local {named('logdir')}"
            raise InputError(f"tensorboard cannot write to {run.logdir}: {remedy}")
        # Hides events from purge_step on, which an interrupted session wrote after its last checkpoint.
        purge_step = run.step + 1 if run.step else 0
        self.writer = summary.SummaryWriter(storage.join(run.logdir, "tensorboard"), purge_step=purge_step)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def images(self, step: int, name: str, grid: np.ndarray) -> None:
        self.writer.add_image(name, grid, step, dataformats="HWC")
        self.writer.flush()

    def finish(self) -> None:
        self.writer.close()
