"""Nested mappings → configs, strictly, with everything that is wrong found in one pass.

A value that is wrong is reported and takes its default, and a section that refuses its settings is reported and kept as
it is, so that the checks of the sections around it find what else is wrong. A mistake is told once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from .declaration import Leaf, Section, asks_for_nothing, leaves, members, present_keys, refusal
from .errors import MARK, MAX_FAULTS, Fault, InputError, KeyPath, path_of, spelled_path
from .names import nearest
from .values import checked, checked_list, checked_mapping


def from_dict(config_class, mapping: Mapping, where: str = "") -> Any:
    """An instance from a nested mapping, strictly. Missing keys take their default.

    where: path of the mapping in the whole config, for messages.

    Raises InputError with everything that is wrong: keys that do not exist (naming the nearest) or are missing though
    required, values of the wrong type, and what the classes refuse.
    """
    reader = _Reader(config_class)
    config = reader.section(config_class, mapping, path_of(where))
    if reader.faults:
        raise InputError(*reader.faults.values())
    return config


def present_form(config_class, mapping: Any) -> Any:
    """A nested mapping as earlier versions recorded it → as the present settings spell the same.

    Earlier names are left to ``option(was=…)``. A config class whose settings have changed otherwise has an
    ``earlier``, a static method: a section of it → the present one.
    """
    if not isinstance(mapping, Mapping):
        return mapping
    found = dict(getattr(config_class, "earlier", dict)(mapping))
    for name, member in members(config_class).items():
        key = next((key for key in (name, *member.was) if key in found), "")
        if key and isinstance(member, Section):
            found[key] = present_form(member.config, found[key])
    return found


def _default(field: dataclasses.Field) -> Any:
    """A field's default; None if it has none, or one that its own checks refuse."""
    try:
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    except InputError:
        return None
    return None if default is dataclasses.MISSING else default


class _Reader:
    """Reads the sections of a config and collects what is wrong, by setting."""

    def __init__(self, root):
        self.root = root
        self.faults: dict[str, Fault] = {}

    def section(self, config_class, mapping, path: KeyPath) -> Any:
        """The instance that a mapping stands for, possibly one whose checks have failed."""
        try:
            checked_mapping(mapping, spelled_path(path))
        except InputError as error:
            self._add(error)
            mapping = {}
        known, present = members(config_class), present_keys(config_class)
        values: dict[str, Any] = {}
        for key, value in mapping.items():
            name, here = present.get(key, key), (*path, str(key))
            if asks_for_nothing(config_class, name, value):
                continue
            if name not in known:
                self._add(self._unknown(here, str(key), config_class))
            elif name in values:
                self._add(Fault(spelled_path(here), "is given twice, under its present and an earlier name"))
            else:
                values[name] = self._member(known[name], value, here)
        for name, member in known.items():
            if name in values:
                continue
            if isinstance(member, Leaf) and member.required:
                self._add(Fault(spelled_path((*path, name)), "is required"))
            if isinstance(member, Section) and any(leaf.required for leaf in leaves(member.config)):
                values[name] = self.section(member.config, {}, (*path, name))
        return self._build(config_class, values, path)

    def _member(self, member: Leaf | Section, value, path: KeyPath) -> Any:
        if isinstance(member, Section):
            return self.section(member.config, value, path)
        if member.optional:
            return None if value is None else self.section(member.optional, value, path)
        try:
            if member.item:
                items = _items(member, value, path)
                return tuple(self.section(member.item, item, where) for where, item in items)
            return checked(member, value, spelled_path(path))
        except InputError as error:
            self._add(error)
            return member.default

    def _build(self, config_class, values: Mapping[str, Any], path: KeyPath) -> Any:
        before = len(self.faults)
        try:
            return config_class(**values)
        except InputError as error:
            self._add(InputError(*(fault for fault in error.faults if not self._follows(fault, path))), path)
        except Exception:
            if not before:  # else it follows from what is wrong already
                raise
        broken = object.__new__(config_class)
        for field in dataclasses.fields(config_class):
            object.__setattr__(broken, field.name, values[field.name] if field.name in values else _default(field))
        return broken

    def _add(self, wrong: Fault | InputError, path: KeyPath = ()) -> None:
        """path: of the section that the faults were found in."""
        for fault in wrong.faults if isinstance(wrong, InputError) else (wrong,):
            found = fault.below(path)
            self.faults.setdefault(found.setting if fault.setting else found.sentence(), found)
            if len(self.faults) >= MAX_FAULTS:
                raise InputError(*self.faults.values())

    def _follows(self, fault: Fault, path: KeyPath) -> bool:
        """Whether a fault of a section may follow from one of a section in it: it names no setting, or one that is
        wrong there, without its path."""
        name = path_of(fault.setting)
        if len(name) > 1 or (not name and MARK in fault.rule):
            return False
        known = [path_of(each.setting) for each in self.faults.values()]
        below = [each for each in known if each[: len(path)] == path and len(each) > len(path) + 1]
        return any(not name or each[-1:] == name for each in below)

    def _unknown(self, path: KeyPath, key: str, config_class) -> Fault:
        """A key that the class does not have."""
        spelled = spelled_path(path)
        if reason := refusal(config_class, key):
            return Fault(spelled, reason)
        elsewhere = [leaf.path for leaf in leaves(self.root) if leaf.path[-1] == key]
        if len(elsewhere) == 1:
            home = spelled_path(elsewhere[0][:-1]) or "no section"
            return Fault(spelled, f"is an unknown setting; it belongs under {home}")
        return Fault(spelled, f"is an unknown setting{nearest(key, members(config_class))}")


def _items(leaf: Leaf, value, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    """The items of a list of sections, each with its path. InputError if it is none."""
    if isinstance(value, Mapping) and leaf.keyed:
        for key, rest in value.items():
            if rest is None or rest is False:
                continue
            here = (*path, str(key))
            settings = {} if rest is True else checked_mapping(rest, spelled_path(here))
            if leaf.keyed in settings:
                raise InputError(Fault(spelled_path(here), f"has the setting {leaf.keyed}, which is its key"))
            yield here, {leaf.keyed: str(key), **settings}
        return
    if isinstance(value, Mapping) and leaf.lone:
        value = [value]
    yield from (((*path, i), item) for i, item in enumerate(checked_list(value, spelled_path(path))))
