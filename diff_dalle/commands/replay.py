"""What ``replay.py`` does: computing a step again whose gradient was not finite, as ``flight.jsonl`` recorded it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from .. import storage
from ..checkpoints.kinds import TRAINING_COMMANDS
from ..checkpoints.run_folder import RunFolder, read_run
from ..config import InputError, from_dict, lookup, present_form
from ..data.loader import Loader
from ..distributed.world import World
from ..evaluation.report import markdown_table
from ..recipes.recipe import Recipe
from ..text.tokenizer import Tokenizer
from ..training.flight import FILE, FlightStep, search_non_finite
from ..training.loop import TrainLoop
from .file_settings import ReplayConfig

CLOSE = 1e-3  # relative difference of losses on another number of processes, or another device


def replay_step(config: ReplayConfig, world: World) -> str:
    """Load the checkpoint before the step, repeat the updates between, and compute the step; what was found.

    Raises InputError when the step is not recorded or cannot be reached.
    """
    if world.size > 1:
        raise InputError(
            f"a step is replayed in one process, with the whole global batch, but {world.size} were started"
        )
    folder = read_run(config.logdir)
    if folder is None:
        raise InputError(f"{config.logdir} holds no run: give the folder that has its run.json")
    record = _find(storage.join(config.logdir, FILE), config.step)
    positions = sorted(position for rank in record["ranks"] for position in rank["position"])
    session, step = _recipe_of(folder, config, record).open(world), record["step"]
    tokenizer = session.tokenizer
    data, _ = session.both_loaders
    before = [entry for entry in folder.checkpoints if entry.step < step]
    earlier = replace(folder, checkpoints=before)
    loop = TrainLoop(session.recipe.training, session.trainees(data), data, earlier, world)
    start, size = loop.step, len(positions)
    if loop.samples + size * (step - 1 - start) != positions[0]:
        raise InputError(
            f"step {step} cannot be reached from the checkpoint of step {start}: between them the global batch was not "
            f"always {size} samples"
        )
    while loop.step < step - 1:
        loop.update(data.batch_at(range(loop.samples, loop.samples + size)))

    (trainee,) = (each for each in loop.trainees if each.name == record["trainee"])
    trainee.flight.read()
    trainee.flight.keep_all = True
    batch = data.batch_at(positions)
    captions = _captions(tokenizer, batch)
    with search_non_finite(trainee.task, [batch.to(world.device)]) as found:
        loop.update(batch)
    (computed,), _ = trainee.flight.read()
    origin = f"the checkpoint of step {start}" if before else "the initial weights"
    head = f"Step {step} of {config.logdir}, computed again from {origin}."
    return f"{head}\n\n{_table(record, computed, data, captions)}\n\n{_conclusion(record, computed, found.place)}"


def _find(path: str, step: int) -> dict[str, Any]:
    """The last record of a step, of the last step if 0."""
    try:
        records = [json.loads(line) for line in storage.read_lines(path)]
        found = [each for each in records if not step or each["step"] == step]
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(f"{path} is damaged: {error}") from None
    if not found:
        known = ", ".join(str(number) for number in sorted({each["step"] for each in records})[:20])
        raise InputError(f"{path} has no record of step {step}, only of steps {known or '(none)'}: set --step to one")
    return found[-1]


def _recipe_of(folder: RunFolder, config: ReplayConfig, record: Mapping[str, Any]) -> Recipe:
    """The run for one process that takes the whole global batch in the pieces of the run's processes."""
    command = lookup(TRAINING_COMMANDS, folder.identity.kind, f"kind of {folder.path}")
    run = from_dict(command.config_class, present_form(command.config_class, folder.identity.config))
    share = len(record["ranks"][0]["position"])
    batch = sum(len(rank["position"]) for rank in record["ranks"])
    return run.recipe().replayed(batch, share, folder.path, config.data_dir)


def _captions(tokenizer: Tokenizer | None, batch) -> list[str]:
    if tokenizer is None or batch.cond.tokens is None:
        return [""] * len(batch)
    return [tokenizer.decode(row) for row in batch.cond.tokens.tolist()]


def _rows(record: Mapping[str, Any], name: str) -> dict[int, float]:
    """A value of the record by position."""
    return {
        position: float(value)
        for rank in record["ranks"]
        for position, value in zip(rank["position"], rank.get(name, []), strict=False)
    }


def _table(record: Mapping[str, Any], computed: FlightStep, data: Loader, captions: list[str]) -> str:
    recorded = {name: _rows(record, name) for name in computed.samples}
    header = ["position", "sample", "caption"]
    header += [text for name in computed.samples for text in (name, f"{name} recorded")]
    rows: list[list] = []
    for i, position in enumerate(computed.position):
        values = [(each[i], recorded[name].get(position, float("nan"))) for name, each in computed.samples.items()]
        cells = [f"{value:.6g}" for pair in values for value in pair]
        rows.append([position, data.describe(position), captions[i], *cells])
    scalars = [[name, f"{value:.6g}", str(record.get(name, ""))] for name, value in computed.scalars.items()]
    return markdown_table(header, rows) + "\n\n" + markdown_table(["step", "computed", "recorded"], scalars)


def _conclusion(record: Mapping[str, Any], computed: FlightStep, place: str) -> str:
    same = []
    for name, values in computed.samples.items():
        recorded = _rows(record, name)
        pair = torch.tensor([[recorded.get(p, float("nan")) for p in computed.position], values])
        same.append(torch.allclose(pair[0], pair[1], rtol=CLOSE, atol=CLOSE, equal_nan=True))
    text = "The record is reproduced." if all(same) else "The record is NOT reproduced: values above differ from it."
    where = f"The first value that is not finite is in {place}." if place else "All values are finite this time."
    return f"{text}\n{where}"
