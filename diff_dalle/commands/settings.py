"""Settings collected from presets, files, flags and ``--set``, later sources winning over earlier ones.

They are put together first and read once, so that everything that is wrong is told together, each setting as whoever
gave it calls it.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from ..config import (
    MAX_FAULTS,
    Fault,
    FlagText,
    InputError,
    KeyPath,
    Leaf,
    Section,
    Spelling,
    as_flag,
    checked,
    from_dict,
    leaves,
    members,
    nearest,
    path_of,
    present_form,
    present_keys,
    quantity,
    quoted,
    refusal,
    shown,
    spelled_path,
    to_dict,
)
from .flag_names import Alias, aliases_of, by_name, find_leaf, leaf_called
from .sources import Source

_SWITCH = Leaf(("",), bool, False, "")  # of a flag without a setting


class Settings:
    """The settings given so far; each source wins over those before it.

    file: the file that holds the command's settings, if any: messages name what is not given by its path there, not by
          its flag.
    flag: what messages call a setting that is not given, of its flag's name.
    """

    def __init__(self, config_class, file: str = "", flag: Spelling = as_flag):
        self.config_class, self.file, self.flag = config_class, file, flag
        self.tree: dict = {}  # nested like the config; lists of sections are lists of dicts
        self.givers: dict[KeyPath, tuple[str, str]] = {}  # what a setting is called where it is given, and that place
        self.claims: dict[KeyPath, tuple[str, Any]] = {}  # of the present source: key that was used, and value
        self.faults: list[Fault] = []  # of the sources, before their settings are read
        self.stated: dict[str, tuple[KeyPath, bool]] = {}  # flags that say whether a setting is above 0

    def take(self, source: Source) -> None:
        """Take the settings of a source that wins over those before it: by section, or flat by the names of flags, or
        both. A list of sections replaces the list of an earlier source. InputError for a source of another command."""
        source.check_kind(getattr(self.config_class, "kind", None))
        source.check_inference(by_name(self.config_class))
        self.claims.clear()
        self._update(self.config_class, (), present_form(self.config_class, source.settings), (), source)

    def take_flags(self, flags: Mapping[str, str], assignments: Iterable[str]) -> None:
        """Take the flags of a command line and what ``--set`` says there, together the last source."""
        self.claims.clear()
        for name, text in flags.items():
            self._set(self.config_class, (), name, FlagText(text), (f"--{name}", ""))
        for assignment in assignments:
            self._assign(assignment)

    def settled(self) -> Any:
        """``build``, with what follows from other settings. InputError as well for settings of the present source that
        have no effect."""
        config = self.build()
        config = getattr(config, "resolved", lambda: config)()
        self.check_effects(config)
        return config

    def build(self):
        """The config. Raises InputError with everything that is wrong."""
        faults, config = list(self.faults), None
        complete = getattr(self.config_class, "completed", dict)  # adds what follows from the settings
        try:
            config = from_dict(self.config_class, complete(self.tree))
        except InputError as error:
            told = {fault.setting for fault in faults}
            faults += [fault for fault in error.faults if not fault.setting or fault.setting not in told]
        if faults:
            order = {path: number for number, path in enumerate(self.givers)}
            faults.sort(key=lambda fault: order.get(self._around(fault.setting) or (), len(order)))
            raise InputError(*(fault.sentence(self.spelling, self.name_of) for fault in faults))
        return config

    def spelling(self, setting: str) -> str:
        """A setting as it is called where it is given, and that place; one that is not given, by its flag or path."""
        around = self._around(setting)
        place = self.file if around is None else self.givers[around][1]
        return f"{self.name_of(setting)} ({place})" if place else self.name_of(setting)

    def name_of(self, setting: str) -> str:
        """A setting as it is called where it is given, without the place."""
        around = self._around(setting)
        if around is not None:
            path = self._written(setting)
            return self.givers[around][0] if path == around else spelled_path(path)
        leaf = find_leaf(self.config_class, path_of(setting))
        return self.flag(leaf.name) if leaf and leaf.has_flag and not self.file else setting

    def _around(self, setting: str) -> KeyPath | None:
        """The path that is given: that of the setting, or of the innermost section around it."""
        path = self._written(setting)
        return next((path[:n] for n in range(len(path), 0, -1) if path[:n] in self.givers), None)

    def _written(self, setting: str) -> KeyPath:
        """The path of a setting where it is given: at the root of a file that has a key for it there."""
        path = next((given for given in self.givers if spelled_path(given) == setting), path_of(setting))
        for key, home in getattr(self.config_class, "homes", {}).items():
            if path[: len(home)] == home and home not in self.givers:
                return (key, *path[len(home) :])
        return path

    def check_effects(self, config) -> None:
        """InputError for settings of the present source that have no effect in ``config``, the whole one, and for what
        flags state of others and is wrong."""
        table, faults = by_name(self.config_class), []
        for flag, (path, states) in self.stated.items():
            found = functools.reduce(getattr, map(str, path), config)
            if bool(found) != states:
                faults.append(
                    Fault(spelled_path(path), f"is {shown(found)}, but {flag} is {states}: change one of them")
                )
        for leaf in table.values():
            if leaf.path not in self.claims or functools.reduce(getattr, leaf.path, config) is False:  # turned off
                continue
            for name, *values in leaf.needs:
                other = table.get(leaf.prefix + name, table.get(name))
                if other is None:  # of another command
                    continue
                found = functools.reduce(getattr, other.path, config)
                several = found if isinstance(found, tuple) else (found,)
                if any(str(each) in values for each in several) if values else any(several):
                    continue
                remedy = f"set {self.flag(other.name)}" + (f" to {' or '.join(values)}" if values else "")
                rule = f"has no effect while {other.name} is {shown(found)}: {remedy}, or leave it out"
                faults.append(Fault(spelled_path(leaf.path), rule))
                break
        if faults:
            raise InputError(*(fault.sentence(self.spelling, self.name_of) for fault in faults))

    # ---------------------------------------------------------------------------------------------- flags and mappings

    def _update(self, config_class, path: KeyPath, mapping: Mapping, given: KeyPath, source: Source) -> None:
        """path: of the section; given: its path in the source."""
        for key, value in mapping.items():
            name, here = present_keys(config_class).get(key, key), (*given, str(key))
            member, leaf = members(config_class).get(name), leaf_called(config_class, key)
            if isinstance(member, Section):
                self._section(member.config, (*path, name), key, value, here, source)
            elif leaf and leaf.item:
                self._items(leaf, (*path, *leaf.path), value, here, source)
            elif leaf and leaf.optional:
                self._section(leaf.optional, (*path, *leaf.path), key, value, here, source)
            else:
                self._set(config_class, path, str(key), value, source.place(here))
                if leaf and leaf.nested:
                    self.givers |= {
                        (*path, *leaf.path, *inner): source.place((*here, *inner)) for inner in source.inside(here)
                    }

    def _section(self, config_class, path: KeyPath, key, value, given: KeyPath, source: Source) -> None:
        if not isinstance(value, Mapping):
            self._claim(path, str(key), value, source.place(given))
            return
        self._open(path, source.place(given))
        self._update(config_class, path, value, given, source)

    def _items(self, leaf: Leaf, path: KeyPath, value, given: KeyPath, source: Source) -> None:
        """A list of sections, or the mapping that may take its place."""
        if isinstance(value, Mapping) and leaf.keyed:
            self._open(path, source.place(given))
            for key, rest in value.items():
                self._section(leaf.item, (*path, str(key)), key, rest, (*given, str(key)), source)
        elif isinstance(value, Mapping) and leaf.lone:
            self._section(leaf.item, path, leaf.path[-1], value, given, source)
        elif isinstance(value, list) and path in self.claims:
            self._contradict(path, f"is given twice, the second time by {source.place(given)[0]}")
        elif isinstance(value, list):
            self._claim(path, leaf.path[-1], [], source.place(given))
            stored = self._stored(path)
            for i, item in enumerate(value):
                stored.append({} if isinstance(item, Mapping) else item)
                self.givers |= {(*path, i): source.place((*given, i))}
                if isinstance(item, Mapping):
                    self._update(leaf.item, (*path, i), item, (*given, i), source)
        else:
            self._claim(path, leaf.path[-1], value, source.place(given))

    def _set(self, config_class, path: KeyPath, name: str, value, giver: tuple[str, str]) -> None:
        """Set what a flag or key means in the section at ``path``, which has this class."""
        alias, leaf = aliases_of(config_class).get(name), leaf_called(config_class, name)
        if alias:
            self._set_alias(by_name(config_class), alias, path, name, value, giver)
        elif leaf is None:
            self._unknown(config_class, path, name, value, giver)
        else:
            key = leaf.path[-1] if name == leaf.name else name.removeprefix(leaf.prefix)
            self._claim((*path, *leaf.path), key, value, giver, leaf)

    def _set_alias(
        self, table: Mapping[str, Leaf], alias: Alias, path: KeyPath, name: str, value, giver: tuple[str, str]
    ) -> None:
        leaf = table.get(alias.field, _SWITCH)
        target = (*path, *leaf.path)
        if alias.only:
            if str(value) != alias.only:
                self.givers[(name,)] = giver
                self.faults.append(Fault(name, f"must be {alias.only}, which is the only one here", str(value)))
            return
        if not alias.is_boolean:
            self._claim(target, name, value, giver)
            return
        try:
            is_on = checked(dataclasses.replace(leaf, type=bool, choices=()), value, spelled_path((*target[:-1], name)))
        except InputError as error:
            self.givers |= {(*target[:-1], name): giver}
            self.faults += error.faults
            return
        if alias.why:
            warnings.warn(f"{giver[0]} has no effect: {alias.why}", stacklevel=2)
        elif alias.states:
            self.stated[giver[0]] = target, is_on
        elif is_on:
            self._claim(target, name, str(alias.true_value), giver)
        elif alias.false_value:
            field, text = alias.false_value
            self._claim((*path, *table[field].path), name, FlagText(text), giver, table[field])
        elif self._stored(target) == alias.true_value:
            self._claim(target, name, leaf.default, giver)

    def _unknown(self, config_class, path: KeyPath, name: str, value, giver: tuple[str, str]) -> None:
        """Note that the section at ``path`` has no such setting. Settings that it refuses by name, or has a home for,
        are left to it."""
        here = (*path, name)
        self.givers[here] = giver
        if refusal(config_class, name):
            self._store(here, value)
            return
        elsewhere = by_name(self.config_class).get(name)
        home = next((leaf for leaf in leaves(self.config_class) if leaf.path[-1] == name), None)
        if path and elsewhere and elsewhere.path[: len(path)] == path:  # its prefix belongs to flags only
            hint = f"; did you mean {'.'.join(elsewhere.path[len(path) :])}?"
        elif home and (path or (len(home.path) > 1 and not home.called)):
            hint = f"; it belongs under {'.'.join(home.path[:-1]) or 'no section'}"
        else:
            hint = nearest(name, [*members(config_class), *by_name(config_class), *aliases_of(config_class)])
        self._note(Fault(spelled_path(here), f"is an unknown setting{hint}"))

    def _note(self, fault: Fault) -> None:
        """Keep what is wrong, to be told with the rest, or now if it is much."""
        self.faults.append(fault)
        if len(self.faults) >= MAX_FAULTS:
            self.build()

    def _claim(self, path: KeyPath, key: str, value, giver: tuple[str, str], leaf: Leaf | None = None) -> None:
        """Set a value, unless the same source has set it to another, or under an earlier name: that is wrong.

        leaf: of the value of a flag.
        """
        other_key, other = self.claims.setdefault(path, (key, value))
        if other_key != key and not {key, other_key} & aliases_of(self.config_class).keys():
            self._contradict(path, f"is given twice, under its present and an earlier name: leave {giver[0]} out")
        elif other != value:
            given = f"sets {spelled_path(path)} to {shown(other)}, but {giver[0]} sets it to {shown(value)}"
            self._contradict(path, f"{given}: give one of them")
        else:
            if leaf is None or leaf.nested:  # a list may have been given there, with places of its own
                self.givers = {old: place for old, place in self.givers.items() if old[: len(path)] != path}
            self.givers.pop(path, None)
            self.givers[path] = giver
            self._store(path, _read(leaf, value) if leaf else value)

    def _contradict(self, path: KeyPath, rule: str) -> None:
        self._note(Fault(spelled_path(path), rule))

    def _open(self, path: KeyPath, giver: tuple[str, str]) -> None:
        """Make sure that there is a section."""
        self.givers[path] = giver
        if not isinstance(self._stored(path), (dict, list)):
            self._store(path, {})

    def _store(self, path: KeyPath, value) -> None:
        node: Any = self.tree
        for key in path[:-1]:
            if not isinstance(key, int) and not isinstance(node.get(key), (dict, list)):
                node[key] = {}
            node = node[key]
        node[path[-1]] = value

    def _stored(self, path: KeyPath) -> Any:
        node: Any = self.tree
        for key in path:
            if not isinstance(key, int) and (not isinstance(node, dict) or key not in node):
                return None
            node = node[key]
        return node

    # --------------------------------------------------------------------------------------------------------- --set

    def _assign(self, assignment: str) -> None:
        """Take ``PATH=VALUE``, where PATH is like ``optim.lr`` or ``decoder.unets.0.dim``. Raises InputError for
        another form, a path that names no single setting, and a bad value."""
        text, equals, value = assignment.partition("=")
        if not equals:
            raise InputError(f"--set {assignment} must be PATH=VALUE, such as --set {self._example()}")
        leaf, path = self._locate(text, value)
        key, giver = text.rpartition(".")[2], (f"--set {text}", "")
        self._claim(path, key, None if leaf.optional else FlagText(value), giver, leaf)

    def _example(self) -> str:
        leaf = next(leaf for leaf in leaves(self.config_class) if not (leaf.item or leaf.optional))
        return f"{'.'.join(leaf.path)}={shown(leaf.default)}"

    def _locate(self, text: str, value: str) -> tuple[Leaf, KeyPath]:
        """The setting that a path names, and the path with its present keys. A section that may be missing is one if
        the value is none, which removes it."""
        parts = re.sub(r"\[(\w+)\]", r".\1", text).split(".")  # as messages spell it: unets[0].dim
        config_class = self.config_class
        path: KeyPath = ()
        while parts:
            key = parts.pop(0)
            known, key = members(config_class), present_keys(config_class).get(key, key)
            if key not in known:
                raise InputError(f"--set {text}: {self._no_such(config_class, path, key)}")
            member, path = known[key], (*path, key)
            if isinstance(member, Section):
                config_class = member.config
            elif member.item:
                config_class, path = member.item, (*path, self._index(member, path, parts, text))
            elif member.optional and (parts or value.lower() not in ("none", "null")):
                config_class = member.optional
            elif parts:
                raise InputError(f"--set {text}: {spelled_path(path)} is a single setting, without {parts[0]} below it")
            else:
                return member, path
        first = next(iter(members(config_class)))
        raise InputError(f"--set {text} is a section; give the path of a setting in it, such as {text}.{first}")

    def _no_such(self, config_class, path: KeyPath, key: str) -> str:
        elsewhere = by_name(self.config_class).get(key)
        hint = f"; did you mean {'.'.join(elsewhere.path)}?" if elsewhere else nearest(key, members(config_class))
        return f"there is no setting {spelled_path((*path, key))}{hint}"

    def _index(self, leaf: Leaf, path: KeyPath, parts: list[str], text: str) -> int | str:
        """The index or key that follows the key of a list of sections, taken off ``parts``."""
        items = self._stored(path)
        if items is None:
            items = [to_dict(item) for item in leaf.default]
            self._store(path, items)
        index = parts.pop(0) if parts else ""
        if isinstance(items, Mapping) and leaf.keyed and index:
            return index
        if isinstance(items, Mapping) and leaf.lone:
            items = [items]
            self._store(path, items)
        if leaf.lone and index and not index.isdecimal() and isinstance(items, list) and len(items) == 1:
            parts.insert(0, index)
            return 0
        if not isinstance(items, list):
            raise InputError(f"--set {text}: {spelled_path(path)} is {quoted(items)}, but must be a list of sections")
        if not items:
            raise InputError(f"--set {text}: {spelled_path(path)} is an empty list; give its sections in a config file")
        if not index.isdecimal() or int(index) >= len(items):
            count = f"a list of {quantity(len(items), 'section')}"
            raise InputError(f"--set {text}: {spelled_path(path)} is {count}; give an index from 0 to {len(items) - 1}")
        return int(index)


def _read(leaf: Leaf, value):
    """What the text of a flag stands for; the text where it is wrong, which is told when all settings are read."""
    try:
        return checked(leaf, value, "") if isinstance(value, FlagText) else value
    except InputError:
        return value
