"""Progress on Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from .. import storage
from ..errors import InputError
from .tracker import Run, Tracker, import_extra

ID_FILE = "wandb_run_id.txt"


class WandbTracker(Tracker):
    """A run on Weights & Biases, or in a local folder with WANDB_MODE=offline.

    The run's id is stored in the log directory, so that a resumed training continues the same run. The x axis of charts
    is the training step: after a resume, repeated steps are drawn on top of each other.
    """

    optional = True

    def __init__(self, run: Run):
        self.wandb = import_extra("wandb", "wandb")
        id_path = storage.join(run.logdir, ID_FILE)
        run_id = storage.read_text(id_path).strip() if storage.exists(id_path) else None
        try:
            self.run = self.wandb.init(
                project=run.project,
                entity=run.entity or None,
                name=run.name or None,
                id=run_id,
                resume="allow",
                config=dict(run.settings),
                allow_val_change=True,  # free settings may differ in a resumed run
                dir=None if storage.is_remote(run.logdir) else storage.local_path(run.logdir),
            )
        except self.wandb.errors.Error as error:
            raise InputError(
                f"wandb does not start ({error}): set WANDB_MODE=offline to keep the run on disk, or remove wandb from"
                " --trackers"
            ) from error
        storage.write_bytes(id_path, self.run.id.encode())
        self.run.define_metric("*", step_metric="step")

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self.run.log({"step": step, **scalars})

    def images(self, step: int, name: str, grid: np.ndarray) -> None:
        self.run.log({"step": step, name: self.wandb.Image(grid)})

    def finish(self) -> None:
        self.run.finish()
