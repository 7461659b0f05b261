"""Progress as files in the log directory: log.txt, progress.csv, progress.jsonl and pictures under samples/."""

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
from ..errors import InputError
from .scalar_table import format_table
from .tracker import Run, Tracker


def read_lines(path: str) -> list[str]:
    """The complete lines of a text file, ends included; none if there is no file.

    What follows the last line end was torn off by a crash and is left out.
    """
    text = storage.read_text(path) if storage.exists(path) else ""
    return text[: text.rfind("\n") + 1].splitlines(keepends=True)


def append(path: str, text: str) -> None:
    """Add to a text file; object stores cannot, so a remote file is written anew. Raises InputError when it fails."""
    if storage.is_remote(path):
        storage.write_bytes(path, ("".join(read_lines(path)) + text).encode("utf-8"))
        return
    try:
        with open(path, "a", encoding="utf-8", newline="") as file:
            file.write(text)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from error


@contextlib.contextmanager
def _damage_named(path: str) -> Iterator[None]:
    """Turn what reading a damaged line raises into an InputError."""
    try:
        yield
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(f"{path} is damaged ({error}): mend it, or move it away and start a new one") from error


class TextLog(Tracker):
    """log.txt: tables and notes with the time, for people. It only grows."""

    def __init__(self, run: Run):
        self.path = storage.join(run.logdir, "log.txt")
        self.note(f"continued from step {run.step}" if run.step else "started")

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        append(self.path, format_table({"step": step, **scalars}) + "\n")

    def note(self, text: str) -> None:
        append(self.path, f"{datetime.now():%Y-%m-%d %H:%M:%S}  {text}\n")


class CsvLog(Tracker):
    """progress.csv: a row for each call of ``log``, a column for each name.

    A new name adds a column, which is empty in the earlier rows. A continued run drops the rows beyond its step.
    Raises InputError when the log directory holds a progress.csv that is damaged or has no column ``step``.
    """

    def __init__(self, run: Run):
        self.path = storage.join(run.logdir, "progress.csv")
        lines = read_lines(self.path)
        self.columns = next(csv.reader(lines), ["step"])
        if "step" not in self.columns:
            raise InputError(f"{self.path} has no column step, so it is not this program's; move it away")
        with _damage_named(self.path):
            kept = [row for row in csv.DictReader(lines) if run.step and float(row["step"]) <= run.step]
        self._write(kept)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        row = {"step": step, **scalars}
        new = [name for name in row if name not in self.columns]
        if new:
            rows = list(csv.DictReader(read_lines(self.path)))
            self.columns += new
            self._write([*rows, row])
        else:
            append(self.path, self._text([row]))

    def _write(self, rows: list[dict]) -> None:
        header = dict(zip(self.columns, self.columns, strict=True))
        storage.write_bytes(self.path, self._text([header, *rows]).encode("utf-8"))

    def _text(self, rows: list[dict]) -> str:
        text = io.StringIO()
        csv.DictWriter(text, self.columns, restval="", lineterminator="\n").writerows(rows)
        return text.getvalue()


class JsonLog(Tracker):
    """progress.jsonl: an object for each call of ``log``. A value that is not finite becomes null.

    A continued run drops the lines beyond its step. Raises InputError when one is damaged.
    """

    def __init__(self, run: Run):
        self.path = storage.join(run.logdir, "progress.jsonl")
        with _damage_named(self.path):
            kept = [line for line in read_lines(self.path) if run.step and json.loads(line)["step"] <= run.step]
        storage.write_bytes(self.path, "".join(kept).encode("utf-8"))

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        finite = {name: value if math.isfinite(value) else None for name, value in scalars.items()}
        append(self.path, json.dumps({"step": step, **finite}) + "\n")


class SampleGrids(Tracker):
    """samples/NAME_STEP.png: each picture as a file; NAME.png beside the checkpoints: the latest of each figure."""

    def __init__(self, run: Run):
        self.logdir, self.folder = run.logdir, storage.join(run.logdir, "samples")
        storage.make_dirs(self.folder)

    def images(self, step: int, name: str, grid: np.ndarray) -> None:
        _write_png(self.folder, f"{name}_{step:06d}", grid)

    def figure(self, step: int, name: str, picture: np.ndarray) -> None:
        _write_png(self.logdir, name, picture)


def _write_png(folder: str, name: str, pixels: np.ndarray) -> None:
    png = io.BytesIO()
    Image.fromarray(pixels).save(png, "PNG")
    storage.write_bytes(storage.join(folder, f"{name.replace('/', '_')}.png"), png.getvalue())
