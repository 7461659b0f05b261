"""Progress and files on Weights & Biases."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .. import storage
from ..config import Fault, InputError, named
from .stores import Store, Write
from .tracker import Run, Table, Tracker, import_extra

ID_FILE = "wandb_run_id.txt"
RESUMES = ("auto", "never", "must")


def logged_run(logdir: str) -> str:
    """The id of the run that a log directory's earlier session logged to; "" if there is none."""
    path = storage.join(logdir, ID_FILE)
    return storage.read_text(path).strip() if storage.exists(path) else ""


class WandbTracker(Tracker):
    """A run on Weights & Biases, or in a local folder with WANDB_MODE=offline.

    The run's id is stored in the log directory. ``Run.resume``: auto = a resumed training continues the same run, or
    that of ``run_id``; never = each session is a new run; must = continue the run ``run_id``, which has to exist. The x
    axis of charts is the training step: after a resume, repeated steps are drawn on top of each other.
    """

    module = "wandb"
    optional = True

    def __init__(self, run: Run):
        self.wandb = import_extra(self.module, "wandb")
        known = {"auto": logged_run(run.logdir) or run.run_id, "never": "", "must": run.run_id}[run.resume]
        try:
            self.run = self.wandb.init(
                project=run.project,
                entity=run.entity or None,
                name=run.name or None,
                id=known or None,
                resume="must" if run.resume == "must" else "allow",
                config=dict(run.settings),
                allow_val_change=True,  # free settings may differ in a resumed run
                dir=None if storage.is_remote(run.logdir) else storage.local_path(run.logdir),
            )
        except self.wandb.errors.Error as error:
            raise InputError(
                f"wandb does not start ({error}): set WANDB_MODE=offline to keep the run on disk, or remove wandb from "
                f"{named('trackers')}"
            ) from error
        storage.write_bytes(storage.join(run.logdir, ID_FILE), self.run.id.encode())
        self.run.define_metric("*", step_metric="step")

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self.run.log({"step": step, **scalars})

    def images(self, step: int, name: str, grid: np.ndarray) -> None:
        self.run.log({"step": step, name: self.wandb.Image(grid)})

    def table(self, step: int, name: str, table: Table) -> None:
        rows = [[cell if isinstance(cell, str) else self.wandb.Image(cell) for cell in row] for row in table.rows()]
        self.run.log({"step": step, name: self.wandb.Table(list(table.columns), rows)})

    def finish(self) -> None:
        self.run.finish()


class WandbFiles(Store):
    """Files of the run that is logged. The client sends them from ``folder`` in the background, repeats what fails, and
    waits for the rest when the run ends; offline, it leaves them there for `wandb sync`."""

    remote, place = True, "wandb"

    def __init__(self, tracker: WandbTracker, folder: str):
        self.tracker, self.folder = tracker, folder

    def add(self, name: str, write: Write) -> None:
        path = os.path.join(self.folder, name)
        storage.make_dirs(os.path.dirname(path))
        with storage.atomic_writer(path) as file:
            write(file)
        self.tracker.run.save(path, base_path=self.folder, policy="now")


def _find_run(path: str, user: str) -> Any:
    """A run of the service, by its path entity/project/id. user: the setting that needs wandb."""
    wandb = import_extra("wandb", "wandb", user)
    try:
        return wandb.Api().run(path)
    except (wandb.errors.Error, ValueError) as error:
        raise InputError(Fault("wandb_run_path", f"{path} cannot be opened ({error}): check it")) from error


def put_into_run(path: str) -> Callable[[str, str], None]:
    """``put(path, name)`` of a run other than the logged one."""
    import_extra("wandb", "wandb", "save_to wandb")

    def put(local: str, name: str) -> None:
        root = local.removesuffix(name.replace("/", os.sep))
        _find_run(path, "save_to wandb").upload_file(local, root)

    return put


def download_from_run(path: str, name: str, folder: str) -> None:
    """Write the file ``name`` of a run as ``folder``/``name``."""
    run = _find_run(path, "load_from wandb")
    try:
        run.file(name).download(root=folder, replace=True)
    except Exception as error:  # the client raises many kinds
        raise InputError(Fault("wandb_file_path", f"{name} of the run {path} cannot be downloaded: {error}")) from error
