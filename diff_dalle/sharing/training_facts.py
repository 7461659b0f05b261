"""What the folder of a run records about the training of a checkpoint in it: data, batch, hours."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .. import storage
from ..checkpoints.kinds import KINDS, find_kind
from ..checkpoints.record import CheckpointSet, load_record
from ..config import InputError, differences

PROGRESS = "progress.jsonl"
_FOLDERS = ("", "s3", "gs", "az")  # kinds of storage that runs are kept in


@dataclass(frozen=True)
class TrainingFacts:
    """What is recorded; None or empty = not recorded.

    data:      totals of the shards, such as "16 shards with 16,384 samples", by "data_dir" and "val_data_dir"; several
               where the data changed during the run, oldest first.
    batch:     samples per step, those of all processes.
    hours:     of its sessions up to the last line of the log, evaluations between the lines included.
    from_scratch: whether the run began with initial weights, not with those of a file.
    """

    data: Mapping[str, tuple[str, ...]]
    batch: int | None = None
    hours: float | None = None
    from_scratch: bool | None = None


def training_facts(path: str, content: Mapping[str, Any]) -> TrainingFacts:
    """What run.json and progress.jsonl beside a checkpoint file say about it; nothing where they are missing or belong
    to another model.

    path, content: of the file, as ``load_file`` returns it.

    Raises InputError for a damaged record or log.
    """
    folder = storage.split(path)[0] or "."
    record = load_record(folder) if storage.scheme(folder) in _FOLDERS else None
    if record is None or (record.identity.kind, record.identity.tokenizer) != (content["kind"], content["tokenizer"]):
        return TrainingFacts({})
    known = content["kind"] in KINDS
    if known and differences(record.identity.config, content["config"], find_kind(content["kind"])):
        return TrainingFacts({})
    entries = _until(record.checkpoints, content["step"])
    data: dict[str, tuple[str, ...]] = {}
    for entry in entries:
        for name, shards in entry.data.items():
            data[name] = tuple(dict.fromkeys([*data.get(name, ()), shards["totals"]]))
    batch = {entry.batch for entry in entries}
    from_scratch = None if record.started_from is None else not record.started_from
    return TrainingFacts(
        data,
        batch.pop() or None if len(batch) == 1 else None,
        training_hours(storage.join(folder, PROGRESS), content["samples"]),
        from_scratch,
    )


def _until(checkpoints: Iterable[CheckpointSet], step: int) -> list[CheckpointSet]:
    """Those up to a step, and the next one, which says what the steps before it were trained on."""
    found = []
    for entry in checkpoints:
        found.append(entry)
        if entry.step >= step:
            break
    return found


def training_hours(path: str, samples: int) -> float | None:
    """The hours of training on the first ``samples`` samples by a log of type progress.jsonl; None where it does not
    reach so far. InputError for a damaged log."""
    seconds, done = 0.0, 0
    for number, line in enumerate(storage.read_lines(path), 1):
        try:
            row = json.loads(line)
            if "samples_per_second" not in row:
                continue
            reached, rate = int(row["samples"]), float(row["samples_per_second"])
            if reached < done or not rate > 0:
                raise ValueError("samples or samples_per_second is out of range")
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise InputError(f"{path} is damaged in line {number} ({error}): repair it, or move it away") from None
        seconds += (min(reached, samples) - done) / rate
        done = min(reached, samples)
        if done == samples:
            return seconds / 3600
    return None
