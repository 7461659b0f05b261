"""One model, with all that belongs to it, in a folder: weights, a table of what each file is for, and a card.

``model.json`` lists the files by the settings that take them: ``{"model_path": ["generator.safetensors"],
"upsampler_paths": ["upsampler.safetensors"], "classifier_path": ["classifier.safetensors"]}``. ``README.md`` is the
card. A folder loads like a checkpoint, as does the name of a bundled model, whose folder is in
``trained/``; FOLDER/FILE is one of its files.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources

from .. import storage
from ..config import MAX_TEXT, InputError, load_mapping, nearest, quoted
from .content import DamagedError

TABLE, CARD = "model.json", "README.md"
TRAINED = "diff_dalle.trained"  # the package that holds the bundled models
#: The settings that a model's files are for; ``model_path`` may be a decoder's several.
ROLES = ("model_path", "upsampler_paths", "classifier_path", "stage_b", "stage_a", "semantic", "lora")
_SEVERAL = ("model_path", "upsampler_paths")
_FILE = re.compile(r"\w[\w.-]*\.safetensors", re.ASCII)  # no path: a folder names its own files only


@dataclass(frozen=True)
class ModelFolder:
    """A model: where it is, and its files by the settings that take them."""

    path: str
    files: Mapping[str, tuple[str, ...]]

    @property
    def name(self) -> str:
        return self.path.rstrip("/").rpartition("/")[2]

    @property
    def card(self) -> str:
        """What the model is and what it was trained on, as Markdown; empty = it has no card."""
        card = storage.join(self.path, CARD)
        return storage.read_text(card, MAX_TEXT) if storage.exists(card) else ""

    def paths(self, role: str) -> tuple[str, ...]:
        """Of the files for one of ``ROLES``."""
        return tuple(storage.join(self.path, name) for name in self.files.get(role, ()))

    def __str__(self) -> str:
        return f"{self.name}: {', '.join(name for names in self.files.values() for name in names)}"


def trained_models() -> dict[str, ModelFolder]:
    """The bundled models, by name: ``load(NAME)`` loads one, and its ``card`` tells what it is."""
    return dict(_shipped())


@functools.cache
def _shipped() -> dict[str, ModelFolder]:
    folder = str(resources.files(TRAINED))
    paths = sorted(entry.path for entry in os.scandir(folder) if os.path.isfile(os.path.join(entry.path, TABLE)))
    return {os.path.basename(path): _read(path) for path in paths}


def open_model(location: str) -> ModelFolder | None:
    """The model folder at a location, or the model that has it as its name; None for anything else, such as the path of
    a checkpoint. InputError for a word that is neither a path nor such a name, and for a folder that has the name of a
    bundled model but holds none."""
    from .record import RECORD  # it needs checkpoints, which this module finds

    if not location or location.endswith((".pt", ".safetensors")):  # which saves a look at a remote place
        return None
    if storage.is_remote(location) or os.path.exists(storage.local_path(location)):
        if storage.exists(storage.join(location, TABLE)):
            return _read(location)
        if location in _shipped() and not storage.exists(storage.join(location, RECORD)):
            rule = "holds no model, but the bundled model of this name is found only where there is no such folder"
            raise InputError(f"the folder {location} here {rule}: rename it, or work in another folder")
        return None
    if location in _shipped():
        return _shipped()[location]
    if re.fullmatch(r"[\w-]+", location):
        known = f"({', '.join(_shipped()) or 'none'}){nearest(location, _shipped())}"
        raise InputError(f"{location} is no file or folder here, and no bundled model {known}")
    return None


def find_file(location: str, role: str = "model_path") -> str:
    """The path of the checkpoint that a location means: of a model folder or name, its file for one of ``ROLES``; of a
    file in one, FOLDER/FILE, the file; of the log directory of a run, its best weights, or else its latest EMA;
    anything else is a path itself.

    Raises InputError for a model or a run without such a file, or with several.
    """
    model = open_model(location)
    if model is None:
        name, _, file = location.partition("/")
        if _is_shipped_file(name, file, location):
            return storage.join(_shipped()[name].path, file)
        return _file_of_run(location)
    found = model.paths(role)
    if len(found) == 1:
        return found[0]
    has = ", ".join(f"{role} {' '.join(names)}" for role, names in model.files.items())
    count = "no file" if not found else f"{len(found)} files"
    raise InputError(f"the model {location} has {count} for {role}, but one is required here: it has {has}")


def _file_of_run(location: str) -> str:
    """The weights of the run whose log directory this is; the location itself if it is none."""
    from .record import load_record  # as above

    if not location or location.endswith((".pt", ".safetensors")) or (run := load_record(location)) is None:
        return location
    if "" in run.best:
        return storage.join(location, "best.pt")
    last = run.checkpoints[-1] if run.checkpoints else None
    weights = [name for role, name in sorted(last.files.items()) if role.startswith(("ema_", "model"))] if last else []
    if last is None or not weights:
        raise InputError(f"{location} is the log directory of a run, but holds no weights of one network: give a file")
    return storage.join(location, last.folder or weights[0])


def _is_shipped_file(name: str, file: str, location: str) -> bool:
    if storage.is_remote(location) or os.path.exists(storage.local_path(location)) or name not in _shipped():
        return False
    return any(file in names for names in _shipped()[name].files.values())


def _read(path: str) -> ModelFolder:
    table = storage.join(path, TABLE)
    files: dict[str, tuple[str, ...]] = {}
    for role, names in load_mapping(storage.read_text(table, MAX_TEXT), table).items():
        if role not in ROLES:
            raise DamagedError(f"{table} names {quoted(role)}, but must name some of {', '.join(ROLES)}")
        plain = isinstance(names, list) and all(isinstance(name, str) and _FILE.fullmatch(name) for name in names)
        if not plain or not names or (len(names) > 1 and role not in _SEVERAL):
            raise DamagedError(
                f"{table} has {role} {quoted(names)}, but it must list names of .safetensors files beside it"
            )
        files[role] = tuple(names)
    if not files:
        raise DamagedError(f"{table} names no file")
    return ModelFolder(path, files)
