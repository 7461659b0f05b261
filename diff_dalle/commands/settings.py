"""Settings collected from presets, files, flags and ``--set``, later sources winning over earlier ones."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..config import (
    KeyPath,
    Leaf,
    Section,
    checked,
    checked_list,
    from_dict,
    leaves,
    members,
    nearest,
    present_keys,
    quoted,
    shown,
    spelled_path,
    to_dict,
)
from ..errors import InputError, quantity


@dataclass(frozen=True)
class Alias:
    """A flag of Guided-Diffusion that sets a field with another name here.

    true_value: what a True flag sets, for a boolean alias (False returns the field to its default when it holds that
                value); None passes the value on unchanged.
    """

    field: str
    true_value: str | None = None


ALIASES = {
    "use_fp16": Alias("precision", "fp16"),
    "predict_xstart": Alias("prediction", "x_start"),
    "use_kl": Alias("loss_type", "rescaled_kl"),
    "rescale_learned_sigmas": Alias("loss_type", "rescaled_mse"),
    "learn_sigma": Alias("variance", "learned_range"),
    "sigma_small": Alias("variance", "fixed_small"),
    "use_ddim": Alias("sampler", "ddim"),
    "index_dir": Alias("data_dir"),
    "index_dir_val": Alias("val_data_dir"),
}


@functools.cache
def by_name(config_class) -> dict[str, Leaf]:
    """Settings by the names of their flags; without those of sections that have no flags.

    Raises TypeError when two have the same name: flags are flat, so a section that a command has twice needs a prefix.
    """
    table: dict[str, Leaf] = {}
    for leaf in leaves(config_class):
        if leaf.in_file:
            continue
        if leaf.name in table or leaf.name in ALIASES:
            raise TypeError(f"{config_class.__name__} has two settings called {leaf.name}")
        table[leaf.name] = leaf
    for old in [old for leaf in table.values() for old in leaf.earlier_names]:
        if old in table or old in ALIASES:
            raise TypeError(f"{config_class.__name__} has a setting called {old}, which is an earlier name of another")
    return table


@functools.cache
def present_names(config_class) -> dict[str, str]:
    """Present names of flags by their earlier ones."""
    return {old: leaf.name for leaf in by_name(config_class).values() for old in leaf.earlier_names}


@functools.cache
def aliases_of(config_class) -> dict[str, Alias]:
    """The aliases whose field the config class has."""
    return {name: alias for name, alias in ALIASES.items() if alias.field in by_name(config_class)}


class Settings:
    """The settings given so far. ``next_source`` begins a source that wins over those before it."""

    def __init__(self, config_class):
        self.config_class = config_class
        self.tree: dict = {}  # nested like the config; lists of sections are lists of dicts
        self.claims: dict[KeyPath, tuple[str, Any]] = {}  # of the present source: key that was used, and value

    def next_source(self) -> None:
        self.claims.clear()

    def build(self):
        """The config. Raises InputError for settings that exclude each other."""
        return from_dict(self.config_class, self.completed())

    def completed(self) -> dict:
        """The settings with what follows from them, where the config class has a ``completed`` that adds it."""
        complete = getattr(self.config_class, "completed", None)
        return complete(self.tree) if complete else self.tree

    def check_effects(self, config) -> None:
        """InputError for a setting of the present source that has no effect in ``config``, the whole one."""
        table = by_name(self.config_class)
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
                remedy = f"set --{other.name}" + (f" to {' or '.join(values)}" if values else "")
                raise InputError(
                    f"--{leaf.name} has no effect while {other.name} is {shown(found)}: {remedy}, or leave it out"
                )

    def set_flag(self, name: str, text: str) -> None:
        self._set(self.config_class, (), name, text, True, f"--{name}")

    def update(self, mapping: Mapping, source: str, lines: Mapping[KeyPath, int]) -> None:
        """Take settings from a mapping: by section, or flat by the names of flags, or both. A list of sections replaces
        the list of an earlier source. Raises InputError for unknown, mistyped and contradictory settings.

        lines: the line of each value in the source, by its path.
        """
        self._update(self.config_class, (), mapping, source)

    def _update(self, config_class, path: KeyPath, mapping: Mapping, source: str) -> None:
        table, present = by_name(config_class), present_names(config_class)
        for key, value in mapping.items():
            name = present_keys(config_class).get(key, key)
            member, leaf = members(config_class).get(name), table.get(present.get(key, key))
            spelled = f"{spelled_path((*path, str(key)))} in {source}"
            if isinstance(member, Section) and isinstance(value, Mapping):
                self._update(member.config, (*path, name), value, source)
            elif leaf and leaf.item:
                self._set_list(leaf, (*path, *leaf.path), checked_list(value, spelled), source)
            elif leaf and leaf.optional and isinstance(value, Mapping):
                self._update(leaf.optional, (*path, *leaf.path), value, source)
            elif isinstance(member, Section) and not leaf:
                raise InputError(f"{spelled} is {quoted(value)}, but must be a mapping of settings")
            else:
                self._set(config_class, path, str(key), value, False, spelled)

    def _set_list(self, leaf: Leaf, path: KeyPath, items, source: str) -> None:
        if path in self.claims:
            raise InputError(f"{spelled_path(path)} in {source} is given twice")
        self.claims[path] = leaf.path[-1], items
        self._store(path, [{} for _ in items])
        for i, item in enumerate(items):
            if not isinstance(item, Mapping):
                where = spelled_path((*path, i))
                raise InputError(f"{where} in {source} is {quoted(item)}, but must be a mapping of settings")
            self._update(leaf.item, (*path, i), item, source)

    def _set(self, config_class, path: KeyPath, name: str, value, from_text: bool, spelled: str) -> None:
        """Set what a flag or key means in the section at ``path``, which has this class."""
        table, aliases = by_name(config_class), aliases_of(config_class)
        if name in aliases:
            self._set_alias(aliases[name], table[aliases[name].field], path, name, value, from_text, spelled)
            return
        leaf = table.get(present_names(config_class).get(name, name))
        if leaf is None:
            raise InputError(self._unknown(config_class, path, name, spelled))
        key = name.removeprefix(leaf.prefix)
        self._claim((*path, *leaf.path), key, checked(leaf, value, from_text, spelled), spelled)

    def _set_alias(
        self, alias: Alias, leaf: Leaf, path: KeyPath, name: str, value, from_text: bool, spelled: str
    ) -> None:
        path = (*path, *leaf.path)
        if alias.true_value is None:
            self._claim(path, name, checked(leaf, value, from_text, spelled), spelled)
        elif checked(dataclasses.replace(leaf, type=bool, choices=()), value, from_text, spelled):
            self._claim(path, name, alias.true_value, spelled)
        elif self._stored(path) == alias.true_value:
            self._claim(path, name, leaf.default, spelled)

    def _unknown(self, config_class, path: KeyPath, name: str, spelled: str) -> str:
        """A sentence about a key that the section at ``path`` does not have."""
        elsewhere = by_name(self.config_class).get(name)
        if path and elsewhere and elsewhere.path[: len(path)] == path:  # its prefix belongs to flags only
            return f"unknown setting {spelled}; did you mean {'.'.join(elsewhere.path[len(path) :])}?"
        if path and elsewhere:
            return f"{spelled} belongs under {'.'.join(elsewhere.path[:-1]) or 'no section'}"
        known = [*members(config_class), *by_name(config_class), *aliases_of(config_class)]
        return f"unknown setting {spelled}{nearest(name, known)}"

    def _claim(self, path: KeyPath, key: str, value, spelled: str) -> None:
        """Set a value. Raises InputError when the same source has set it to another, or under an earlier name."""
        other_key, other = self.claims.setdefault(path, (key, value))
        if other_key != key and not {key, other_key} & ALIASES.keys():
            raise InputError(f"{spelled}: {spelled_path(path)} is given twice, under its present and an earlier name")
        if other != value:
            name = spelled_path(path)
            raise InputError(f"{spelled} sets {name} to {shown(value)}, but it is set to {shown(other)} too: give one")
        self._store(path, value)

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

    def set_path(self, assignment: str) -> None:
        """Take ``PATH=VALUE``, where PATH is like ``optim.lr`` or ``decoder.unets.0.dim``. Raises InputError for
        another form, a path that names no single setting, and a bad value."""
        text, equals, value = assignment.partition("=")
        if not equals:
            raise InputError(f"--set {assignment} must be PATH=VALUE, such as --set {self._example()}")
        leaf, path = self._locate(text, value)
        key = text.rpartition(".")[2]
        self._claim(path, key, None if leaf.optional else checked(leaf, value, True, f"--set {text}"), f"--set {text}")

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
