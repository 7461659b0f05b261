"""Configs as nested dicts of plain values, as files and checkpoints hold them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

from ..errors import InputError, redact
from .declaration import Leaf, Section, leaves, members, present_keys
from .names import nearest
from .values import checked, checked_list, cut, quoted
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


def from_dict(config_class, mapping: Mapping, where: str = "", repeated: bool = False) -> Any:
    """An instance from a nested mapping, strictly. Missing keys take their default.

    where:    path of the mapping in the whole config, for messages.
    repeated: the whole config may hold this class several times, so every message must give the path.

    Raises InputError for a key that does not exist (naming the nearest) or a value of the wrong type.
    """
    if not isinstance(mapping, Mapping):
        raise InputError(f"{where or 'the configuration'} is {quoted(mapping)}, but must be a mapping of settings")
    known, present = members(config_class), present_keys(config_class)
    values: dict[str, Any] = {}
    for key, value in mapping.items():
        name, spelled = present.get(key, key), f"{where}.{key}" if where else str(key)
        if name not in known:
            raise InputError(f"unknown setting {spelled}{nearest(str(key), known)}")
        if name in values:
            raise InputError(f"setting {spelled} is given twice, under its present and an earlier name")
        values[name] = _read(known[name], value, spelled, repeated)
    try:
        return config_class(**values)
    except InputError as error:
        if not repeated:
            raise
        raise InputError(f"{where}: {error}") from None


def _read(member: Leaf | Section, value, spelled: str, repeated: bool):
    if isinstance(member, Section):
        return from_dict(member.config, value, spelled, repeated or bool(member.prefix))
    if member.item:
        items = enumerate(checked_list(value, spelled))
        return tuple(from_dict(member.item, item, f"{spelled}[{i}]", repeated=True) for i, item in items)
    return checked(member, value, False, spelled)


def entries(config_class, mapping: Mapping, where: str = "", free: bool = False) -> Iterator[tuple[str, bool, Any]]:
    """(name, whether it is free, plain value) of every setting in a resolved config, lists of sections included.

    A setting has the name of its flag; in a list of sections, its path, such as ``decoder.unets[1].dim``. One that the
    config does not have, because the config is older than the setting, has its default.
    """
    for leaf in leaves(config_class):
        value, is_free, path = _at_path(config_class, mapping, leaf), free or leaf.free, where + ".".join(leaf.path)
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


def differences(saved: Mapping, current: Mapping, config_class) -> list[str]:
    """The settings that are not free and differ between two resolved configs, each as ``name (saved → current)``."""
    old, new = (
        {name: value for name, free, value in entries(config_class, mapping) if not free}
        for mapping in (saved, current)
    )
    changed = [name for name in old if name in new and old[name] != new[name]]
    return [f"{name} ({cut(json.dumps(old[name]))} → {cut(json.dumps(new[name]))})" for name in changed]
