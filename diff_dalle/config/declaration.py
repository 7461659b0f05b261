"""Declaring settings, and listing what a config class declares."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, replace
from typing import Any


def option(
    default,
    help: str,
    choices: Sequence[str] = (),
    free: bool = False,
    was: Sequence[str] = (),
    needs: Sequence[str] = (),
) -> Any:
    """A setting: a dataclass field with its default and a help text that gives the unit.

    choices: the only strings allowed.
    free:    the setting may change when a run is resumed (speed, duration, logging), because it does not change what a
             step computes.
    was:     earlier names, still accepted in flags, files and checkpoints.
    needs:   the name of another setting, and the values of it with which this one has an effect, no value = any but
             0, False and none. A flag without effect is refused, unless it turns something off; in files, which may be
             complete dumps, it is allowed.

    A field of type ``tuple[SomeConfig, ...]`` is a list of sections: set in a file or by ``--set``, not by a flag.
    """
    metadata = {"help": help, "choices": tuple(choices), "free": free, "was": tuple(was)}
    metadata["needs"] = tuple(needs)
    return dataclasses.field(default=default, metadata=metadata)


def section(config_class, prefix: str = "", was: Sequence[str] = ()) -> Any:
    """A nested dataclass with its own defaults; its docstring's first line is the title in ``--help``.

    prefix: put before the names of its flags, so that a command can have the same section twice. Keys in files and
            checkpoints carry no prefix: there the section's own name tells them apart.
    was:    earlier names, still accepted in files and checkpoints.
    """
    return dataclasses.field(default_factory=config_class, metadata={"prefix": prefix, "was": tuple(was)})


@dataclass(frozen=True)
class Leaf:
    """One setting of a composed config.

    path:   its keys from the root of the config; the last one is its own.
    prefix: the prefixes of the sections that hold it, joined.

    The other fields are what ``option`` declared.
    """

    path: tuple[str, ...]
    type: Any
    default: Any
    help: str
    choices: tuple[str, ...] = ()
    free: bool = False
    was: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    prefix: str = ""

    @property
    def name(self) -> str:
        """The name of its flag."""
        return self.prefix + self.path[-1]

    @property
    def earlier_names(self) -> tuple[str, ...]:
        """Earlier names of its flag."""
        return tuple(self.prefix + old for old in self.was)

    @property
    def item(self) -> Any:
        """The config class of the items, if the setting is a list of sections; else None."""
        args = typing.get_args(self.type)
        return args[0] if typing.get_origin(self.type) is tuple and dataclasses.is_dataclass(args[0]) else None


@dataclass(frozen=True)
class Section:
    """A nested config class, the prefix of its flags, and the section's earlier names."""

    config: Any
    prefix: str
    was: tuple[str, ...] = ()


@functools.cache
def type_hints(config_class) -> dict[str, Any]:
    return typing.get_type_hints(config_class)


@functools.cache
def members(config_class) -> dict[str, Leaf | Section]:
    """The settings and sections that a config class itself declares, by key; paths start at the class."""
    found: dict[str, Leaf | Section] = {}
    for field in dataclasses.fields(config_class):
        kind, meta = type_hints(config_class)[field.name], field.metadata
        if dataclasses.is_dataclass(kind):
            found[field.name] = Section(kind, **meta)
        else:
            default = None if field.default is MISSING else field.default
            found[field.name] = Leaf((field.name,), kind, default, **meta)
    return found


def leaves(config_class, path: tuple[str, ...] = (), prefix: str = "") -> Iterator[Leaf]:
    """Every setting of a config class, nested ones included, in order of declaration.

    A list of sections is one leaf, since the class does not say how many there are: see ``dicts.entries``.
    """
    for key, member in members(config_class).items():
        if isinstance(member, Section):
            yield from leaves(member.config, (*path, key), prefix + member.prefix)
        else:
            yield replace(member, path=(*path, key), prefix=prefix)


def present_keys(config_class) -> dict[str, str]:
    """Present keys of the settings and sections that a config class itself declares, by their earlier names."""
    return {old: key for key, member in members(config_class).items() for old in member.was}
