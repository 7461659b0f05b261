"""run.json: what the folder of a run says about the run and its complete checkpoints."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from .. import storage
from ..config import InputError, cut, named
from .checkpoint import Identity
from .content import is_plain, is_whole_number, leaves_of

RECORD = "run.json"
MAX_BYTES = 64 * 2**20  # 100,000 checkpoints have half of it
# Plain names: never a path, which could leave the folder.
_FILE = re.compile(r"\w[\w.+-]*\.(pt|safetensors)", re.ASCII)
_FOLDER = re.compile(r"\w[\w+-]*", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass
class CheckpointSet:
    """A complete checkpoint.

    files: file names by role, relative to the run's folder. EMA roles are ``ema_RATE``; in a run of several trainees,
           roles have a prefix, ``NAME/model``.
    batch: samples per step, those of all processes; 0 = written by an earlier version, which did not say.
    data:  {"digest", "totals"} of the shards, by "data_dir" and "val_data_dir".
    folder: of a sharded checkpoint, which ``files`` can be made of; "" = the files themselves are the checkpoint.
    """

    step: int
    samples: int
    files: dict[str, str]
    batch: int = 0
    data: dict[str, dict[str, str]] = field(default_factory=dict)
    folder: str = ""


@dataclass
class Record:
    """The content of run.json.

    checkpoints:  complete ones, oldest first.
    best:         step and held-out loss of the best weights, by trainee's name.
    started_from: the files of resume_checkpoint or init_checkpoint; None = an earlier version did not say.
    lowest_loss:  the lowest held-out loss of a complete checkpoint, the mean over the trainees; None = not known.
    """

    identity: Identity
    checkpoints: list[CheckpointSet] = field(default_factory=list)
    best: dict[str, dict[str, float]] = field(default_factory=dict)
    started_from: list[str] | None = None
    lowest_loss: float | None = None


def save_record(folder: str, record: Record) -> None:
    """Write run.json atomically."""
    storage.write_bytes(storage.join(folder, RECORD), record_bytes(record))


def record_bytes(record: Record) -> bytes:
    """The content of run.json."""
    identity = record.identity
    content: dict[str, Any] = {
        "kind": identity.kind,
        "config": identity.config,
        "tokenizer": identity.tokenizer,
        "checkpoints": [asdict(entry) for entry in record.checkpoints],
        "best": record.best,
        "started_from": record.started_from,
    }
    if record.lowest_loss is not None:
        content["lowest_loss"] = record.lowest_loss
    return json.dumps(content, indent=1, ensure_ascii=False).encode()


def load_record(folder: str) -> Record | None:
    """What run.json says; None when there is none. InputError for what ``save_record`` cannot have written."""
    path = storage.join(folder, RECORD)
    return parse_record(storage.read_bytes(path, 0, MAX_BYTES + 1), path) if storage.exists(path) else None


def parse_record(data: bytes, path: str) -> Record:
    """What ``record_bytes`` wrote to ``path``. InputError for anything else."""
    try:
        _require(len(data) <= MAX_BYTES)
        return _record(json.loads(data), path)
    except InputError:
        raise
    except (ValueError, LookupError, TypeError, RecursionError):
        remedy = f"choose another {named('logdir')}"
        raise InputError(f"{path} is damaged or was not written by diff_dalle: {remedy}") from None


def _record(saved: Any, path: str) -> Record:
    _require(isinstance(saved, dict) and type(saved["kind"]) is str)
    _require(type(saved["config"]) is dict and all(map(is_plain, leaves_of(saved["config"], path, "config"))))
    _require(saved["tokenizer"] is None or type(saved["tokenizer"]) is str)
    _require(type(saved["checkpoints"]) is list)
    checkpoints = [_checkpoint_set(entry, path) for entry in saved["checkpoints"]]
    steps = [entry.step for entry in checkpoints]
    _require(steps == sorted(set(steps)))
    started_from = saved.get("started_from")
    if started_from is not None:
        _require(isinstance(started_from, list) and all(type(item) is str for item in started_from))
    best = saved.get("best", {})
    _require(_is_mapping(best, dict))
    for entry in best.values():
        _require(entry.keys() == {"step", "loss"} and is_whole_number(entry["step"]))
        _require(_is_number(entry["loss"]))
    lowest = saved.get("lowest_loss")
    _require(lowest is None or _is_number(lowest))
    identity = Identity(saved["kind"], saved["config"], saved["tokenizer"])
    return Record(identity, checkpoints, best, started_from, lowest)


def _checkpoint_set(entry: Any, path: str) -> CheckpointSet:
    found = CheckpointSet(**entry)
    _require(is_whole_number(found.step) and is_whole_number(found.samples) and is_whole_number(found.batch))
    _require(_is_mapping(found.files, str) and _is_mapping(found.data, dict))
    for name in found.files.values():
        if not _FILE.fullmatch(name):
            raise InputError(
                f"{path} names the checkpoint file {cut(name)!r}, which is no plain name: choose another "
                f"{named('logdir')}"
            )
    _require(type(found.folder) is str and (not found.folder or bool(_FOLDER.fullmatch(found.folder))))
    for shards in found.data.values():
        _require(_is_mapping(shards, str) and shards.keys() == {"digest", "totals"})
        _require(bool(_DIGEST.fullmatch(shards["digest"])))
    return found


def _require(condition: bool) -> None:
    if not condition:
        raise ValueError


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and not math.isnan(value)


def _is_mapping(value: Any, kinds: type) -> bool:
    return isinstance(value, Mapping) and all(isinstance(item, kinds) for item in value.values())
