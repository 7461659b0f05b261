"""Copies of a model's files: with a progress bar, and resumed where they were interrupted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tqdm import tqdm

from ... import storage
from ...config import MAX_TEXT, load_mapping
from ...errors import InputError

NOTES = ".copied.json"  # hidden, beside the copies, until all are there
_CHUNK = 2**20


def copy_files(sources: Mapping[str, str], folder: str, title: str, resume: bool = False) -> None:
    """Copy files into a folder, which exists, by the names that they get there, one after the other.

    title:  of the bar, on a terminal, if it takes more than a second.
    resume: leave those that an interrupted call has copied as they are, if neither file has changed since.
    """
    path = storage.join(folder, NOTES)
    states = {name: storage.size_and_tag(source, listed=True) for name, source in sources.items()}
    notes: dict[str, Any] = _read(path) if resume else {}
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


def _read(path: str) -> dict[str, Any]:
    """What was noted, if anything was."""
    try:
        return dict(load_mapping(storage.read_text(path, MAX_TEXT), path)) if storage.exists(path) else {}
    except InputError:  # a damaged note says nothing
        return {}
