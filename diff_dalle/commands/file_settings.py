"""Settings of a command that is set by a file as a whole: its sections have no flags.

What presets, files and ``--set`` say is put together first and read once, so that everything that is wrong is told
together, each with its path and line.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import KeyPath, from_file, leaves
from .settings import Settings


class FileSettings(Settings):
    """The settings given so far, by section; a list replaces that of an earlier source."""

    def __init__(self, config_class):
        super().__init__(config_class)
        self.names: list[str] = []  # of the presets and files
        self.places: dict[KeyPath, str] = {}

    def build(self):
        name = " and ".join(self.names) or "the command line"
        homes = getattr(self.config_class, "homes", {})
        return from_file(self.config_class, self.completed(), self.places, name, homes)

    def update(self, mapping: Mapping, source: str, lines: Mapping[KeyPath, int]) -> None:
        origin = f" of {self.names[-1]}" if self.names else ""
        self.places = {path: place + origin for path, place in self.places.items()}
        self.names.append(source)
        self._merge(self.tree, mapping, (), {path: f"line {line}" for path, line in lines.items()})

    def _merge(self, tree: dict, mapping: Mapping, path: KeyPath, places: Mapping[KeyPath, str]) -> None:
        for key, value in mapping.items():
            here = (*path, str(key))
            if here in places:
                self.places[here] = places[here]
            if isinstance(value, Mapping) and isinstance(tree.get(key), dict):
                self._merge(tree[key], value, here, places)
                continue
            self.places = {old: place for old, place in self.places.items() if old[: len(here)] != here}
            self.places |= {new: place for new, place in places.items() if new[: len(here)] == here}
            tree[key] = _copied(value)

    def _claim(self, path: KeyPath, key: str, value, spelled: str) -> None:
        super()._claim(path, key, value, spelled)
        self.places[path] = spelled.partition(" ")[0]


def _copied(value) -> Any:
    """Nested plain values that can be changed."""
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value


def settings_of_command(config_class) -> Settings:
    """No settings yet, of a command with this config class."""
    in_file = any(leaf.in_file for leaf in leaves(config_class))
    return FileSettings(config_class) if in_file else Settings(config_class)
