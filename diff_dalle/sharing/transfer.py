"""Models on their way: checkpoints → a model folder with its card → a place that others read, and back."""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from tqdm import tqdm

from .. import storage
from ..checkpoints.checkpoint import load_file
from ..checkpoints.content import DamagedError
from ..checkpoints.lora_file import read_lora
from ..checkpoints.model_folder import CARD, TABLE, ModelFolder, open_model
from ..checkpoints.model_writing import write_model, write_shared_lora
from ..config import MAX_TEXT, InputError, load_mapping
from ..storage.hub import commit
from .card import CardFile, CardTexts, lora_card, model_card
from .training_facts import training_facts

REPORT, SCORES, LOG = "report.md", "scores.json", "progress.csv"
NOTES = ".copied.json"  # hidden, beside the copies, until all are there
_CHUNK = 2**20
HUB = "hf"  # the scheme of places that take several files at once
_PICTURE = re.compile(r"^!\[([^\]\n]*)\]\((\w[\w.-]*\.png)\)$", re.ASCII | re.MULTILINE)
_SHARED = re.compile(r"\w[\w.-]*\.(safetensors|json|md|png|txt|csv)|LICENSE(\.\w+)?", re.ASCII)


def push_checkpoints(
    paths: Mapping[str, Sequence[str]], texts: CardTexts, report_dir: str, precision: str, private: bool
) -> list[str]:
    """Write a model of these checkpoints, by the settings that take them, with its card, an evaluation's report and the
    logs of training, and send it to ``texts.location``. Returns the names of its files.

    Raises InputError for files that are no checkpoints, a folder without a report, and a place that cannot be written
    or holds a model already.
    """

    def write(folder: str) -> None:
        model = write_model(folder, paths, precision)
        files = [
            CardFile(role, name, path, precision)
            for role, names in model.files.items()
            for name, path in zip(names, paths[role], strict=True)
        ]
        _copy_logs(files, folder)
        _write_card(folder, report_dir, partial(model_card, files, texts))

    return _push(write, texts.location, private)


def push_lora(path: str, texts: CardTexts, report_dir: str, private: bool) -> list[str]:
    """Send a LoRA with its card and an evaluation's report to ``texts.location``. Returns the names of its files;
    InputError as ``push_checkpoints``."""
    lora = read_lora(path)

    def write(folder: str) -> None:
        write_shared_lora(folder, lora)
        _write_card(folder, report_dir, partial(lora_card, lora, texts))

    return _push(write, texts.location, private)


def push_model(model: ModelFolder, to: str, private: bool) -> list[str]:
    """Send a model folder as it is. Returns the names of its files; InputError as ``push_checkpoints``."""
    return _push(partial(_fetch, model), to, private)


def _push(write: Callable[[str], object], to: str, private: bool) -> list[str]:
    """Send what is written into a folder. Returns the names of the files."""
    _check_free(to)
    with tempfile.TemporaryDirectory(prefix="diff_dalle-") as folder:
        write(folder)
        return _send(folder, to, private)


def _write_card(folder: str, report_dir: str, card: Callable[[Mapping[str, Any], Sequence], str]) -> None:
    """Write the card with what a report says, which goes with it."""
    scores, pictures = _copy_report(report_dir, folder) if report_dir else ({}, [])
    storage.write_bytes(os.path.join(folder, CARD), card(scores, pictures[:1]).encode())


def pull_model(location: str, folder: str) -> list[str]:
    """Copy a model from where it was sent to. Returns the names of its files.

    Raises InputError where there is no model, for files of it that would lie elsewhere, and for a folder that holds a
    model already.
    """
    model = open_model(location)
    if model is None:
        raise InputError(f"{location} is no model: it has no {TABLE}, which names the files of one")
    _check_free(folder)
    return _fetch(model, folder)


def _check_free(place: str) -> None:
    """A repository of the hub gets a new commit; elsewhere, files of two models would mix."""
    if storage.scheme(place) != HUB and storage.exists(storage.join(place, TABLE)):
        raise InputError(f"{place} holds a model already: give another folder with --to, or remove it")


def _copy_report(report_dir: str, folder: str) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Copy a report, its pictures and its scores; returns the scores, and titles and names of the pictures."""
    path = storage.join(report_dir, REPORT)
    if not storage.exists(path):
        raise InputError(f"--report_dir {report_dir} has no {REPORT}: give the one that evaluate.py wrote")
    pictures = _PICTURE.findall(storage.read_text(path, MAX_TEXT))
    scores = storage.join(report_dir, SCORES)
    for name in (REPORT, SCORES, *(name for _, name in pictures)):
        copy_file(storage.join(report_dir, name), os.path.join(folder, name))
    return load_mapping(storage.read_text(scores, MAX_TEXT), scores), pictures


def _copy_logs(files: Sequence[CardFile], folder: str) -> None:
    """Copy the logs of the runs that trained these checkpoints, where they are beside them."""
    for file in files:
        log = storage.join(storage.split(file.path)[0] or ".", LOG)
        if training_facts(file.path, load_file(file.path)).hours is not None and storage.exists(log):
            copy_file(log, os.path.join(folder, f"{file.name.rpartition('.')[0]}_{LOG}"))


def _send(folder: str, to: str, private: bool) -> list[str]:
    names = _in_order(os.listdir(folder))
    if storage.scheme(to) == HUB:
        files = {name: os.path.join(folder, name) for name in names}
        commit(to, files, private, stale=lambda: sorted(_pushed_before(to) - set(names)))
    else:
        storage.make_dirs(to)
        copy_files({name: os.path.join(folder, name) for name in names}, to, "Sending")
    return names


def _pushed_before(place: str) -> set[str]:
    """The files there that came with the model that is there: what its table names, with the logs, and its card and
    report with its pictures. No others, whoever put them there."""
    try:
        model = open_model(place)
    except DamagedError:
        return set()
    if model is None:
        return set()
    weights = [name for names in model.files.values() for name in names]
    ours = {TABLE, CARD, REPORT, SCORES, *weights, *(f"{name.rpartition('.')[0]}_{LOG}" for name in weights)}
    there = {storage.split(path)[1] for path in storage.list_files(place)}
    if REPORT in there:
        with contextlib.suppress(InputError):  # one that is too long, or no text, is not ours
            ours |= {name for _, name in _PICTURE.findall(storage.read_text(storage.join(place, REPORT), MAX_TEXT))}
    return ours & there


def _fetch(model: ModelFolder, folder: str) -> list[str]:
    """Copy the files that a model's table names and, of those beside them, what belongs to its card."""
    needed = [name for names in model.files.values() for name in names]
    beside = [storage.split(path)[1] for path in storage.list_files(model.path)]
    if missing := [name for name in needed if name not in beside]:
        raise InputError(f"the model {model.path} has no {missing[0]}, which its {TABLE} names")
    names = _in_order({*needed, TABLE, *(name for name in beside if _SHARED.fullmatch(name))})
    storage.make_dirs(folder)
    copy_files({name: storage.join(model.path, name) for name in names}, folder, "Fetching", resume=True)
    return names


def _in_order(names: Sequence[str] | set[str]) -> list[str]:
    """The table last: with it, a model is whole."""
    return sorted(names, key=lambda name: (name == TABLE, name))


# -------------------------------------------------------------------------------------------------------------- copies


def copy_files(sources: Mapping[str, str], folder: str, title: str, resume: bool = False) -> None:
    """Copy files into a folder, which exists, by the names that they get there, one after the other.

    title:  of the bar, on a terminal, if it takes more than a second.
    resume: leave those that an interrupted call has copied as they are, if neither file has changed since.
    """
    path = storage.join(folder, NOTES)
    states = {name: storage.size_and_tag(source, listed=True) for name, source in sources.items()}
    notes: dict[str, Any] = _noted(path) if resume else {}
    total = sum(max(0, size) for size, _ in states.values())
    with tqdm(total=total, unit="B", unit_scale=True, desc=title, delay=1.0, disable=None) as bar:
        for name, source in sources.items():
            target, (size, tag) = storage.join(folder, name), states[name]
            noted = notes.get(name)
            if noted and tag and storage.exists(target) and noted == [source, size, tag, *storage.size_and_tag(target)]:
                bar.update(size)
                continue
            copy_file(source, target, bar)
            if resume:
                notes[name] = [source, size, tag, *storage.size_and_tag(target)]
                storage.write_bytes(path, json.dumps(notes).encode())
    if resume and storage.exists(path):
        storage.remove(path)


def copy_file(source: str, target: str, bar: tqdm | None = None) -> None:
    """Copy a file; it appears whole, or not at all. bar: gets the number of bytes; at the end, where they are sent."""
    waiting = 0
    with storage.explained(source), storage.open_read(source) as reading, storage.atomic_writer(target) as writing:
        while data := reading.read(_CHUNK):
            writing.write(data)
            if bar is not None and not storage.is_remote(target):
                bar.update(len(data))
            else:
                waiting += len(data)
    if bar is not None:
        bar.update(waiting)


def _noted(path: str) -> dict[str, Any]:
    """What was noted, if anything was."""
    try:
        return dict(load_mapping(storage.read_text(path, MAX_TEXT), path)) if storage.exists(path) else {}
    except InputError:  # a damaged note says nothing
        return {}
