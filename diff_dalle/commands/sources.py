"""Presets and config files: their settings, and the kind of command they are for.

The key ``kind:`` at the root of a preset or config file says which kind of network its settings train. A command
refuses a file of another kind; a file without the key is accepted where its keys fit.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import os
import re
import sys
import traceback
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from .. import storage
from ..checkpoints.kinds import TRAINING_COMMANDS
from ..config import MAX_TEXT, InputError, KeyPath, load_located, lookup, nearest, quoted, spelled_path

GENERATOR = "generator_checkpoint_path"
IMPORT_HELP = "module with parts of your own, in the current folder or on PYTHONPATH; may be repeated"
PRESETS = "diff_dalle.presets"  # the package that holds their files


@dataclass(frozen=True)
class Source:
    """A preset or config file.

    name:     its name in messages; "" = settings are given without a file.
    kind:     the kind of network that its settings train; None = it does not say.
    settings: the rest of the file.
    lines:    the line of each value by its path.
    """

    name: str
    kind: str | None
    settings: dict
    lines: dict[KeyPath, int] = field(default_factory=dict)

    def place(self, path: KeyPath) -> tuple[str, str]:
        """What a setting is called here, and where it is."""
        line = self.lines.get(path)
        return spelled_path(path), self.name if line is None else f"{self.name}, line {line}"

    def inside(self, path: KeyPath) -> Iterator[KeyPath]:
        """The paths, from there, of what is given in the value at a path."""
        yield from (inner[len(path) :] for inner in self.lines if inner[: len(path)] == path and inner != path)

    def check_inference(self, flags: Collection[str]) -> None:
        """Raise InputError, which names the flags instead, for a file of Stable Cascade that says with which networks
        to sample. flags: of the command, of which ``semantic`` tells whether it samples with these."""
        path = self.settings.get(GENERATOR)
        if path is None or GENERATOR in flags or "semantic" not in flags:
            return
        own = "stage_b" if "stage_a_checkpoint_path" in self.settings else "model_path"
        given = {own: path} | {flag: self.settings[key] for key, flag in INFERENCE.items() if key in self.settings}
        text = " ".join(f"--{flag} {value}" for flag, value in given.items() if flag in flags)
        raise InputError(
            f"{self.name} is a file of Stable Cascade, but this command takes networks by flags: leave it out, and "
            f"give {text} (a published file of weights is refused there with the command that makes a checkpoint of it)"
        )

    def check_kind(self, kind: str | None) -> None:
        """Raise InputError, which names the right script, unless a command of this kind may use it. kind: None for
        commands that train nothing."""
        if self.kind not in (None, kind):
            script = lookup(TRAINING_COMMANDS, self.kind, "kind").script
            raise InputError(f"{self.name} holds settings for training a {self.kind}: use it with {script}")


#: Of files of Stable Cascade that say where networks are: the flag that takes what a key names.
INFERENCE = {
    "stage_a_checkpoint_path": "stage_a",
    "effnet_checkpoint_path": "semantic",
    "controlnet_checkpoint_path": "controlnet",
    "lora_checkpoint_path": "lora",
}


# A preset's kind, as it is spelled in the package: to parse all presets would take a fifth of the time of --help.
_KIND = re.compile(r'^(?:  ")?kind"?: "?(\w+)', re.MULTILINE)


def preset_names() -> list[str]:
    return sorted(_presets())


def _presets() -> dict[str, Any]:
    """The files by the names of the presets."""
    files = [entry for entry in resources.files(PRESETS).iterdir() if entry.name.endswith((".yaml", ".json"))]
    return {entry.name.rpartition(".")[0]: entry for entry in files}


def preset_text(name: str) -> str:
    return lookup(_presets(), name, "preset").read_text(encoding="utf-8")


@functools.cache
def presets_of(kind: str | None) -> list[str]:
    """Names of the presets that a command of this kind may use."""
    found = {name: _KIND.search(preset_text(name)) for name in preset_names()}
    return [name for name, said in found.items() if (said and said[1]) == kind]


def read_preset(name: str) -> Source:
    return _source(preset_text(name), f"preset {name}")


def read_config(path: str) -> Source:
    """A YAML or JSON file of settings, local or remote."""
    return _source(storage.read_text(path, MAX_TEXT), path)


def values_on(argv: Sequence[str], flags: Collection[str]) -> list[str]:
    """The values of flags on a command line, as ``--flag VALUE`` or ``--flag=VALUE``."""
    parts = [word.split("=", 1) if word.startswith("--") else [word] for word in argv]
    words = itertools.pairwise(itertools.chain(*parts))
    return [value for flag, value in words if flag in flags and value]


def sources_on(argv: Sequence[str]) -> list[Source]:
    """The presets and config files that a command line names, in the order of their precedence."""
    files = values_on(argv, ("--config", "--config_file"))
    return [*map(read_preset, values_on(argv, ("--preset",))), *map(read_config, files)]


def _source(text: str, name: str) -> Source:
    settings, lines = load_located(text, name)
    kind = settings.pop("kind", None)
    if kind is not None and not (isinstance(kind, str) and kind in TRAINING_COMMANDS):
        known = ", ".join(TRAINING_COMMANDS)
        raise InputError(
            f"kind in {name} is {quoted(kind)}, but must be one of {known}{nearest(str(kind), TRAINING_COMMANDS)}"
        )
    return Source(name, kind, settings, lines)


def import_parts(argv: Sequence[str]) -> None:
    """Import the modules that a command line names. InputError for one that cannot be imported."""
    for name in values_on(argv, ("--import",)):
        if not all(map(str.isidentifier, name.split("."))):
            raise InputError(f"--import is {name!r}, but must be a module's name, such as my_parts for ./my_parts.py")
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())  # the last, so that nothing here takes the place of a package
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise InputError(f"--import {name}: it requires the package {error.name}") from error
            raise InputError(f"--import {name}: there is no such module in {os.getcwd()} or on PYTHONPATH") from None
        except InputError as error:
            raise InputError(f"--import {name}: {error}") from None
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{last.filename}, line {getattr(error, 'lineno', None) or last.lineno}"
            raise InputError(f"--import {name}: {type(error).__name__}: {error} ({where})") from error
