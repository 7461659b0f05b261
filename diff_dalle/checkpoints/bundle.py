"""A run in one file, to be kept elsewhere: its record, its latest checkpoint, and what belongs to them, byte for byte.

It is a PyTorch file of plain data (``torch.load(weights_only=True)``): ``{"bundle": 1, "files": {name: bytes}}``, the
bytes as uint8 tensors. Restored into a folder, it is that run's log directory, which the ordinary resume continues.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from dataclasses import replace
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from .. import storage
from ..config import InputError
from .content import DamagedError, as_local_file, is_whole, read_archive, short
from .record import RECORD, Record, parse_record, record_bytes
from .run_folder import RunFolder, best_file, read_run

FORMAT = 1
BESIDE = ("progress.csv", "progress.jsonl", "wandb_run_id.txt")  # the run's history, and where it continues
# Plain names: never a path, which could leave the folder.
_LIST, _FILE = r"data-[0-9a-f]{16}\.jsonl", r"\w[\w.+-]*\.(pt|safetensors)"
_NAME = re.compile("|".join([*map(re.escape, (RECORD, *BESIDE)), _LIST, _FILE]), re.ASCII)


def write_bundle(file: BinaryIO, run: RunFolder) -> None:
    """Write a run's latest complete checkpoint. It streams: no more than one file is in memory, if any."""
    entry = replace(run.checkpoints[-1], folder="")  # the ordinary files that a sharded one has been made into
    optional = [*map(best_file, run.best), *BESIDE]
    names = [*run.names_of(entry), *(name for name in optional if storage.exists(storage.join(run.path, name)))]
    record = np.frombuffer(record_bytes(replace(run, checkpoints=[entry])), np.uint8).copy()
    with contextlib.ExitStack() as stack:
        files = {RECORD: torch.from_numpy(record)}
        for name in names:
            files[name] = _mapped(stack.enter_context(as_local_file(storage.join(run.path, name))))
        torch.save({"bundle": FORMAT, "files": files}, file)


def _mapped(path: str) -> Tensor:
    """A file's bytes, read when they are used."""
    with storage.explained(path), open(path, "rb") as file:
        if not file.read(1):
            return torch.zeros(0, dtype=torch.uint8)  # which cannot be mapped
        return torch.from_numpy(np.memmap(path, np.uint8, mode="c"))


def is_bundle(path: str) -> bool:
    """Whether a file is a bundle, not a single network. DamagedError for other files."""
    content = read_archive(path, values=False)[0]
    return isinstance(content, dict) and "bundle" in content


def restore_bundle(path: str, folder: str) -> int:
    """Write the files of a bundle into a folder, the record last, and return the checkpoint's step.

    Raises InputError when the folder has checkpoints of its own; DamagedError, before anything is written, for a bundle
    that ``write_bundle`` cannot have written.
    """
    files, record = _read(path)
    present = read_run(folder)
    if present is not None and (present.checkpoints or present.best):
        raise InputError(f"{folder} has a run already: restore {path} into another folder")
    storage.make_dirs(folder)
    for name in sorted(files, key=lambda name: name == RECORD):
        with storage.atomic_writer(storage.join(folder, name)) as file:
            file.write(files[name].numpy().data)
    return record.checkpoints[-1].step


def copy_history(folder: str, into: str) -> None:
    """Copy what a run that moves to another folder has beside its checkpoints, as far as it is there."""
    run = read_run(folder)
    for name in (*BESIDE, *map(best_file, run.best if run else ())):
        if storage.exists(storage.join(folder, name)):
            with (
                storage.open_read(storage.join(folder, name)) as source,
                storage.atomic_writer(storage.join(into, name)) as file,
            ):
                shutil.copyfileobj(source, file)


def _read(path: str) -> tuple[dict[str, Tensor], Record]:
    """The files of a bundle by name, memory-mapped, and its record."""
    content, size = read_archive(path, values=True)
    if not isinstance(content, dict) or "bundle" not in content:
        raise DamagedError(f"{path} does not hold a whole run")
    if type(content["bundle"]) is int and content["bundle"] > FORMAT:
        raise InputError(f"{path} has format {content['bundle']}, newer than this version reads ({FORMAT}): update")
    files = content.get("files")
    if content["bundle"] != FORMAT or not isinstance(files, dict) or RECORD not in files:
        raise DamagedError(f"{path} is damaged: it has no {RECORD}, which says what run it is of")
    for name, value in files.items():
        if type(name) is not str or not _NAME.fullmatch(name):
            raise DamagedError(f"{path} is damaged: it names the file {short(name)}, which no run has")
        if not _is_bytes(value):
            raise DamagedError(f"{path} is damaged: its file {name} is {short(value)}, but must be bytes")
    total = sum(value.numel() for value in files.values())
    if total > size:  # tensors may share their values
        raise DamagedError(f"{path} is damaged: it has {size:,} bytes, but its files would need {total:,}")
    return files, _record(files, path)


def _is_bytes(value: Any) -> bool:
    return is_whole(value) and value.dtype is torch.uint8 and value.ndim == 1 and value.is_contiguous()


def _record(files: dict[str, Tensor], path: str) -> Record:
    """The bundle's run.json. DamagedError unless it names one checkpoint, whose files are there."""
    try:
        record = parse_record(files[RECORD].numpy().tobytes(), RECORD)
    except InputError:
        record = None
    if record is None or len(record.checkpoints) != 1:
        raise DamagedError(f"{path} is damaged: its {RECORD} does not describe one checkpoint of a run")
    for name in RunFolder(record.identity).names_of(record.checkpoints[0]):
        if name not in files:
            raise DamagedError(f"{path} is damaged: it lacks {name}, a file of its checkpoint")
    return record
