"""Dataclasses as the one source of flags, YAML keys, help texts and the config inside a checkpoint.

A component declares its settings once, beside the class they configure::

    @dataclass(frozen=True)
    class OptimConfig:
        '''Optimizer'''
        lr: float = option(3e-4, "peak learning rate")

A command composes such sections into one dataclass; ``command_line.parse`` makes its flags. Reading is strict: an
unknown key, a key given twice or a value of the wrong type is an InputError.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass

import yaml

from .errors import InputError


def option(default, help: str, choices: Sequence[str] = (), free: bool = False, was: Sequence[str] = ()):
    """A setting: a dataclass field with its default and a help text that gives the unit.

    choices: the only strings allowed.
    free:    the setting may change when a run is resumed (speed, duration, logging), because it does not change what a
             step computes.
    was:     earlier names, still accepted in flags, files and checkpoints.
    """
    metadata = {"help": help, "choices": tuple(choices), "free": free, "was": tuple(was)}
    return dataclasses.field(default=default, metadata=metadata)


def section(config_class):
    """A nested dataclass with its own defaults; its docstring's first line is the title in ``--help``."""
    return dataclasses.field(default_factory=config_class)


@dataclass(frozen=True)
class Leaf:
    """One setting of a composed config: where it sits, and everything about it."""

    path: tuple[str, ...]
    type: object
    default: object
    help: str
    choices: tuple[str, ...]
    free: bool
    was: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.path[-1]


@functools.cache
def type_hints(config_class) -> dict[str, object]:
    return typing.get_type_hints(config_class)


def leaves(config_class, path: tuple[str, ...] = ()) -> Iterator[Leaf]:
    """Every setting of a config class, nested ones included, in order of declaration."""
    for field in dataclasses.fields(config_class):
        kind, here = type_hints(config_class)[field.name], (*path, field.name)
        if dataclasses.is_dataclass(kind):
            yield from leaves(kind, here)
        else:
            meta = field.metadata
            default = None if field.default is MISSING else field.default
            yield Leaf(here, kind, default, meta["help"], meta["choices"], meta["free"], meta.get("was", ()))


def nearest(name: str, names: Sequence[str]) -> str:
    """A hint ``; did you mean X?`` for a misspelled name, or an empty string."""
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def lookup(table: Mapping[str, object], name: str, what: str):
    """``table[name]``, or an InputError that lists what there is. ``what`` names the setting."""
    if name not in table:
        raise InputError(f"{what} {name!r} is unknown{nearest(name, table)} (known: {', '.join(table)})")
    return table[name]


# ------------------------------------------------------------------------------------------------ values and types


def type_name(kind) -> str:
    """How a type is called in messages and help: ``integer``, ``comma-separated numbers``, …"""
    simple = {int: "integer", float: "number", str: "text", bool: "True or False"}
    if kind in simple:
        return simple[kind]
    if typing.get_origin(kind) is tuple:
        return f"comma-separated {({int: 'integers', float: 'numbers'}).get(typing.get_args(kind)[0], 'texts')}"
    return " or ".join("none" if arg is types.NoneType else type_name(arg) for arg in typing.get_args(kind))


def _split_list(text: str) -> list[str]:
    """Split at commas outside braces, so that brace ranges stay whole; ``none`` is the empty list."""
    return [] if text.lower() == "none" else [part for part in re.split(r",(?![^{]*\})", text) if part]


def _convert(value, kind, from_text: bool):
    """``value`` as ``kind``, or ValueError. Texts from the command line are parsed; YAML values must have the type."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):  # optional
        if value is None or (from_text and value.lower() in ("none", "null", "")):
            return None
        return _convert(value, next(arg for arg in args if arg is not types.NoneType), from_text)
    if origin is tuple:
        items = _split_list(value) if isinstance(value, str) else value
        if not isinstance(items, (list, tuple)):
            items = [items]
        return tuple(_convert(item, args[0], isinstance(value, str)) for item in items)
    if kind is bool:
        if isinstance(value, bool):
            return value
        if from_text and value.lower() in ("true", "false", "1", "0", "yes", "no"):
            return value.lower() in ("true", "1", "yes")
    elif kind is str:
        if isinstance(value, str) or (not from_text and type(value) in (int, float)):
            return str(value)
    elif isinstance(value, bool):
        pass
    elif kind is int:
        if from_text or isinstance(value, int):
            return int(value)
    elif kind is float and (from_text or isinstance(value, (int, float))):
        return float(value)
    raise ValueError


def checked(leaf: Leaf, value, from_text: bool, spelled: str):
    try:
        value = _convert(value, leaf.type, from_text)
    except (ValueError, TypeError):
        raise InputError(f"{spelled} is {value!r}, but must be {type_name(leaf.type)}") from None
    if leaf.choices and value not in leaf.choices and value is not None:
        hint = nearest(str(value), leaf.choices)
        raise InputError(f"{spelled} is {value!r}, but must be one of {', '.join(leaf.choices)}{hint}")
    return value


# --------------------------------------------------------------------------------------------- dicts and instances


def to_dict(config) -> dict:
    """A nested dict of plain values (tuples become lists), for YAML, JSON and checkpoints."""
    plain = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            value = to_dict(value)
        plain[field.name] = list(value) if isinstance(value, tuple) else value
    return plain


def from_dict(config_class, mapping: Mapping, where: str = ""):
    """An instance from a nested mapping, strictly. Missing keys take their default.

    Raises InputError for a key that does not exist (naming the nearest) or a value of the wrong type.
    """
    if not isinstance(mapping, Mapping):
        raise InputError(f"{where or 'the configuration'} must be a mapping of settings, not {mapping!r}")
    hints, prefix = type_hints(config_class), f"{where}." if where else ""
    known = {leaf.path[0]: leaf for leaf in leaves(config_class) if len(leaf.path) == 1}
    renamed = {old: leaf.name for leaf in known.values() for old in leaf.was}
    values = {}
    for key, value in mapping.items():
        key = renamed.get(key, key)
        if key in values:
            raise InputError(f"setting {prefix}{key} is given twice, under its present and an earlier name")
        if key not in hints:
            raise InputError(f"unknown setting {prefix}{key}{nearest(str(key), list(hints))}")
        if key in known:
            values[key] = checked(known[key], value, False, f"{prefix}{key}")
        else:
            values[key] = from_dict(hints[key], value, f"{prefix}{key}")
    return config_class(**values)


class _StrictLoader(yaml.SafeLoader):
    """YAML without executable tags, without silently repeated keys, and with 1e-4 read as a number."""

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise InputError(f"setting {key} is given twice (line {key_node.start_mark.line + 1})")
            seen.add(key)
        return super().construct_mapping(node, deep)


_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def load_mapping(text: str, name: str) -> dict:
    """The mapping in a YAML or JSON text (JSON is YAML). ``name`` is used in messages."""
    try:
        mapping = yaml.load(text, Loader=_StrictLoader)  # a SafeLoader: data only
    except InputError as error:
        raise InputError(f"{name}: {error}") from None
    except (yaml.YAMLError, TypeError, ValueError) as error:  # the latter two: a mapping as a key, an impossible date
        raise InputError(f"{name} is not valid YAML or JSON: {' '.join(str(error).split())}") from None
    if not isinstance(mapping, dict):
        raise InputError(f"{name} must hold settings as `name: value` lines")
    return mapping


def dump(config) -> str:
    """The resolved config as YAML that ``--config`` reads back."""
    return yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True)


def shown(value) -> str:
    """A setting's value as a flag spells it."""
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "none"
    return "none" if value is None or value == "" else str(value)


def differences(saved: Mapping, current: Mapping, config_class) -> list[str]:
    """The settings, spelled ``name (saved → current)``, in which two resolved configs differ and that are not free.

    A setting that a config does not have, because it is older than the setting, has its default.
    """
    found = []
    for leaf in leaves(config_class):
        if leaf.free:
            continue
        old, new = (_at_path(mapping, leaf) for mapping in (saved, current))
        if old != new:
            found.append(f"{leaf.name} ({json.dumps(old)} → {json.dumps(new)})")
    return found


def _at_path(mapping: Mapping, leaf: Leaf):
    """The plain value of a setting in a nested dict, its default where it is missing."""
    for key in leaf.path[:-1]:
        mapping = mapping.get(key, {})
    for name in (leaf.name, *leaf.was):
        if name in mapping:
            return mapping[name]
    return list(leaf.default) if isinstance(leaf.default, tuple) else leaf.default


def expectations(config_class, title: str, leave_out: Sequence[str] = ()) -> type:
    """A flat config class with the settings of another, each optional and None by default.

    For commands that read their settings from a checkpoint but accept the flags it was trained with: see
    ``disagreements``.
    """
    fields = []
    for leaf in leaves(config_class):
        if leaf.name not in leave_out:
            meta = {"help": f"if given, must be the checkpoint's; {leaf.help}", "choices": leaf.choices, "free": True}
            fields.append((leaf.name, leaf.type | None, dataclasses.field(default=None, metadata=meta)))
    made = dataclasses.make_dataclass(f"Expected{config_class.__name__}", fields, frozen=True)
    made.__doc__ = title
    return made


def disagreements(expected, config) -> list[str]:
    """``name (asked → actual)`` for every setting that ``expected`` gives and ``config`` has otherwise."""
    found = []
    for leaf in leaves(type(config)):
        asked = getattr(expected, leaf.name, None)
        actual = functools.reduce(getattr, leaf.path, config)
        if asked is not None and asked != actual:
            found.append(f"{leaf.name} ({shown(asked)} asked for, {shown(actual)} in the checkpoint)")
    return found
