"""Configs as nested dicts of plain values, as files and checkpoints hold them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

from .declaration import Leaf, Section, leaves, members
from .errors import InputError, cut, quoted, redact
from .values import checked_list, checked_mapping
from .yaml_text import to_yaml


def to_dict(config) -> dict:
    """A nested dict of plain values (tuples become lists), for YAML, JSON and checkpoints."""
    return {field.name: _plain(getattr(config, field.name)) for field in dataclasses.fields(config)}


def _plain(value):
    if dataclasses.is_dataclass(value):
        return to_dict(value)
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def redacted(value):
    """Nested plain values whose texts have no secrets, to be recorded."""
    if isinstance(value, Mapping):
        return {key: redacted(item) for key, item in value.items()}
    if isinstance(value, list):
        return [redacted(item) for item in value]
    return redact(value) if isinstance(value, str) else value


def dump(config) -> str:
    """The resolved config as YAML that ``--config`` reads back."""
    return to_yaml(to_dict(config))


def entries(config_class, mapping: Mapping, where: str = "", free: bool = False) -> Iterator[tuple[str, bool, Any]]:
    """(name, whether it is free, plain value) of every setting in a resolved config, lists of sections included.

    A setting has the name of its flag; without one, its path, such as ``decoder.unets[1].dim``. One that the config
    does not have, because the config is older than the setting, has its default.
    """
    for leaf in leaves(config_class):
        value, is_free, path = _at_path(config_class, mapping, leaf), free or leaf.free, where + ".".join(leaf.path)
        if leaf.optional:
            yield f"{path} is given", is_free, value is not None
            if value is not None:
                yield from entries(leaf.optional, checked_mapping(value, path), f"{path}.", is_free)
            continue
        if not leaf.item:
            yield path if where else leaf.name, is_free, value
            continue
        items = checked_list(value, path)
        yield f"number of {path}", is_free, len(items)
        for i, item in enumerate(items):
            yield from entries(leaf.item, item, f"{path}[{i}].", is_free)


def _at_path(config_class, mapping: Mapping, leaf: Leaf) -> Any:
    """The plain value of a setting in a nested dict, its default where it is missing."""
    value: Any = mapping
    for key in leaf.path:
        if not isinstance(value, Mapping):
            raise InputError(f"{'.'.join(leaf.path)} lies in {quoted(value)}, but must lie in a mapping of settings")
        member = members(config_class)[key]
        present = next((name for name in (key, *member.was) if name in value), None)
        if present is None:
            return _plain(leaf.default)
        value = value[present]
        config_class = member.config if isinstance(member, Section) else None
    return value


@dataclasses.dataclass(frozen=True)
class Change:
    """A setting that differs between two resolved configs. before, now: its values as JSON, cut where they are long.
    free: whether a resumed run may have another one."""

    name: str
    before: str
    now: str
    free: bool

    def __str__(self) -> str:
        return f"{self.name} ({self.before} → {self.now})"


def setting_changes(saved: Mapping, current: Mapping, config_class) -> list[Change]:
    """The settings that differ between two resolved configs."""
    old, new = ({name: (value, free) for name, free, value in entries(config_class, each)} for each in (saved, current))
    return [
        Change(name, cut(json.dumps(value)), cut(json.dumps(new[name][0])), free)
        for name, (value, free) in old.items()
        if name in new and new[name][0] != value
    ]


def differences(saved: Mapping, current: Mapping, config_class) -> list[str]:
    """The settings that are not free and differ between two resolved configs, each as ``name (saved → current)``."""
    return [str(change) for change in setting_changes(saved, current, config_class) if not change.free]
