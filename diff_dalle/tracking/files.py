"""Logs as files in the log directory: log.txt, progress.csv, progress.jsonl, images in samples/, TensorBoard's."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
from collections.abc import Iterator, Mapping
from datetime import datetime

import numpy as np
from PIL import Image

from .. import storage
from ..config import InputError, named
from ..images.output import png_bytes
from .tracker import Run, Table, Tracker, format_table, import_extra


@contextlib.contextmanager
def _damage_named(path: str) -> Iterator[None]:
    """Turn the errors of a damaged line into an InputError."""
    try:
        yield
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(f"{path} is damaged ({error}): repair it, or move it away to start a new one") from error


class TextLog(Tracker):
    """log.txt: tables and time-stamped notes, for people. It only grows."""

    def __init__(self, run: Run):
        self.path = storage.join(run.logdir, "log.txt")
        self.note(f"resumed at step {run.step}" if run.step else "started")

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        storage.append_text(self.path, format_table({"step": step, **scalars}) + "\n")

    def note(self, text: str) -> None:
        storage.append_text(self.path, f"{datetime.now():%Y-%m-%d %H:%M:%S}  {text}\n")


class CsvLog(Tracker):
    """progress.csv: one row per call of ``log``, one column per name.

    A new name adds a column, empty in earlier rows. A resumed run drops the rows after its step. Raises InputError when
    the log directory has a progress.csv that is damaged or lacks the column ``step``.
    """

    def __init__(self, run: Run):
        self.path = storage.join(run.logdir, "progress.csv")
        lines = storage.read_lines(self.path)
        self.columns = next(csv.reader(lines), ["step"])
        if "step" not in self.columns:
            raise InputError(f"{self.path} has no column step, so it was not written by diff_dalle: move it away")
        with _damage_named(self.path):
            rows = [row for row in csv.DictReader(lines) if run.step and float(row["step"]) <= run.step]
        self._write(rows)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        row = {"step": step, **scalars}
        new = [name for name in row if name not in self.columns]
        if new:
            rows = list(csv.DictReader(storage.read_lines(self.path)))
            self.columns += new
            self._write([*rows, row])
        else:
            storage.append_text(self.path, self._text([row]))

    def _write(self, rows: list[dict]) -> None:
        header = dict(zip(self.columns, self.columns, strict=True))
        storage.write_bytes(self.path, self._text([header, *rows]).encode("utf-8"))

    def _text(self, rows: list[dict]) -> str:
        text = io.StringIO()
        csv.DictWriter(text, self.columns, restval="", lineterminator="\n").writerows(rows)
        return text.getvalue()


class JsonLog(Tracker):
    """progress.jsonl: one object per call of ``log``. Values that are not finite become null.

    A resumed run drops the lines after its step. Raises InputError when one is damaged.
    """

    def __init__(self, run: Run):
        self.path = storage.join(run.logdir, "progress.jsonl")
        with _damage_named(self.path):
            lines = storage.read_lines(self.path) if run.step else []
            lines = [line for line in lines if json.loads(line)["step"] <= run.step]
        storage.write_bytes(self.path, "".join(lines).encode("utf-8"))

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        finite = {name: value if math.isfinite(value) else None for name, value in scalars.items()}
        storage.append_text(self.path, json.dumps({"step": step, **finite}) + "\n")


class SampleGrids(Tracker):
    """NAME_STEP.png in ``samples_dir``: every image grid; NAME.txt there: the texts of the latest table, a line each,
    unless all are empty; NAME.png in the log directory: the latest version of each figure."""

    def __init__(self, run: Run):
        self.logdir, self.folder = run.logdir, run.samples_dir or storage.join(run.logdir, "samples")
        storage.make_dirs(self.folder)

    def images(self, step: int, name: str, grid: np.ndarray) -> None:
        _write_png(self.folder, f"{name}_{step:06d}", grid)

    def table(self, step: int, name: str, table: Table) -> None:
        texts = [" ".join(" ".join(cell for cell in row if isinstance(cell, str)).split()) for row in table.rows()]
        if any(texts):
            _write(self.folder, f"{name}.txt", "".join(f"{text}\n" for text in texts).encode())

    def figure(self, step: int, name: str, image: np.ndarray) -> None:
        _write_png(self.logdir, name, image)


def _write_png(folder: str, name: str, pixels: np.ndarray) -> None:
    _write(folder, f"{name}.png", png_bytes(Image.fromarray(pixels)))


def _write(folder: str, name: str, content: bytes) -> None:
    storage.write_bytes(storage.join(folder, name.replace("/", "_")), content)


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
