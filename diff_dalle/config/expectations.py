"""Flags of a command that reads its settings from a checkpoint: compared with the checkpoint's, or in their place."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from .bounds import Bounds
from .declaration import Leaf, Needs, leaves, option, settings
from .values import shown

MUST_EQUAL = "if given, each must equal the checkpoint's setting"


def expectations(config_class, title: str, leave_out: Sequence[str] = ()) -> Any:
    """A flat config class with the settings of another, each optional and None by default; title: its title in
    ``--help``."""
    found = [leaf for leaf in leaves(config_class) if leaf.name not in leave_out]
    found = [
        replace(leaf, help=f"must match the checkpoint if given; {leaf.help}", needs=(), bounds=Bounds())
        for leaf in found
    ]
    return _optional(f"Expected{config_class.__name__}", found, title, MUST_EQUAL)


def overrides(config_class, title: str) -> Any:
    """The same for settings of which a checkpoint has defaults: those that are given replace them."""
    rule = "if given, each replaces the checkpoint's setting"
    found = _optional(f"Given{config_class.__name__}", list(leaves(config_class)), title, rule)
    if hasattr(config_class, "earlier"):  # see ``present_form``
        found.earlier = staticmethod(config_class.earlier)
    return found


def _optional(name: str, found: Sequence[Leaf], title: str, rule: str) -> Any:
    config_class = type(name, (), {"__doc__": title, "rule": rule, "__module__": "types"})
    for leaf in found:
        if leaf.has_flag:
            add_optional(config_class, leaf, leaf.needs)
    return settings(config_class)


def add_optional(config_class: type, leaf: Leaf, needs: Needs | Sequence[str] = (), each: bool = False) -> None:
    """Give a class that is about to become one of settings the setting of another that may be left out, by its name.

    each: a list of values takes the place of one, none = left out.
    """
    kind: Any = leaf.type | None
    default: tuple | None = None
    if each:
        single: Any = next(iter(typing.get_args(leaf.type)), leaf.type)
        kind, default = tuple[single, ...], ()
    config_class.__annotations__ = {**vars(config_class).get("__annotations__", {}), leaf.name: kind}
    setting = option(default, leaf.help, leaf.choices, True, leaf.earlier_names, needs, **vars(leaf.bounds))
    setattr(config_class, leaf.name, setting)


def given(config) -> dict[str, Any]:
    """The settings of ``expectations`` or ``overrides`` that are given, by name."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return {name: value for name, value in values.items() if value is not None}


def values_by_name(config) -> dict[str, Any]:
    """All settings of a config by the names of their flags."""
    return {leaf.name: functools.reduce(getattr, leaf.path, config) for leaf in leaves(type(config))}


def disagreements(expected, *configs) -> list[str]:
    """``name (… given, … in the checkpoint)`` for every setting that ``expected`` has and one of ``configs`` has
    otherwise, or none of them has. A config may be a mapping of the values by name."""
    actual: dict[str, Any] = {}
    for each in configs:
        actual |= each if isinstance(each, Mapping) else values_by_name(each)
    found = []
    for name, value in given(expected).items():
        if name not in actual:
            found.append(f"{name} (given, but the checkpoint has no such setting)")
        elif value != actual[name]:
            found.append(f"{name} ({shown(value)} given, {shown(actual[name])} in the checkpoint)")
    return found
