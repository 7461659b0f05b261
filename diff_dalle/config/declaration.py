"""Declaring settings, and listing what a config class declares."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, replace
from typing import Any

Needs = tuple[tuple[str, ...], ...]  # the names of other settings, each with the values that give this one an effect


def option(
    default,
    help: str,
    choices: Sequence[str] = (),
    free: bool = False,
    was: Sequence[str] = (),
    needs: Sequence[str] = (),
    required: bool = False,
    keyed: str = "",
    lone: bool = False,
    nested: bool = False,
) -> Any:
    """A setting: a dataclass field with its default and a help text that gives the unit.

    choices: the only strings allowed, of a list in each of its places.
    free:    the setting may change when a run is resumed (speed, duration, logging), because it does not change what a
             step computes.
    was:     earlier names, still accepted in flags, files and checkpoints.
    needs:   the name of another setting, and the values of it with which this one has an effect, no value = any but
             0, False and none. A flag without effect is refused, unless it turns something off; in files, which may be
             complete dumps, it is allowed.

    A field of type ``tuple[SomeConfig, ...]`` is a list of sections, one of type ``SomeConfig | None`` a section that
    may be missing: set in a file or by ``--set``, not by a flag.

    required: a mapping that is read must have it; the default is for code alone.
    keyed:    of a list of sections: a mapping may take its place, each key of which is this setting of an item; the
              value is the item's other settings, or True for none of them, or False or None for no item.
    lone:     of a list of sections: the mapping of one item may take its place.
    nested:   of texts: in a file a list or mapping may take the place of a text and stands for its JSON text, which is
              how a flag spells it; commas within brackets and quotes separate nothing.
    """
    metadata = {"help": help, "choices": tuple(choices), "free": free, "was": tuple(was), "needs": _all(needs)}
    metadata |= {"required": required, "keyed": keyed, "lone": lone, "nested": nested}
    return dataclasses.field(default=default, metadata=metadata)


def section(
    config_class, prefix: str = "", was: Sequence[str] = (), flags: bool = True, needs: Sequence[str] = ()
) -> Any:
    """A nested dataclass with its own defaults; its docstring's first line is the title in ``--help``.

    prefix: put before the names of its flags, so that a command can have the same section twice. Keys in files and
            checkpoints carry no prefix: there the section's own name tells them apart.
    was:    earlier names, still accepted in files and checkpoints.
    flags:  False = its settings have no flags, but are set in a file or by ``--set``.
    needs:  what all its settings need, besides what each of them needs itself; see ``option``.
    """
    metadata = {"prefix": prefix, "was": tuple(was), "flags": flags, "needs": _all(needs)}
    return dataclasses.field(default_factory=config_class, metadata=metadata)


def _all(needs: Sequence[str]) -> Needs:
    return (tuple(needs),) if needs else ()


@dataclass(frozen=True)
class Leaf:
    """One setting of a composed config.

    path:   its keys from the root of the config; the last one is its own.
    prefix: the prefixes of the sections that hold it, joined.
    in_file: whether it is in a section without flags.
    needs:  the needs of these sections and its own; it has an effect only when all are met.

    The other fields are what ``option`` declared.
    """

    path: tuple[str, ...]
    type: Any
    default: Any
    help: str
    choices: tuple[str, ...] = ()
    free: bool = False
    was: tuple[str, ...] = ()
    needs: Needs = ()
    required: bool = False
    keyed: str = ""
    lone: bool = False
    nested: bool = False
    prefix: str = ""
    in_file: bool = False

    @property
    def name(self) -> str:
        """The name of its flag; its path if it has none."""
        return ".".join(self.path) if self.in_file else self.prefix + self.path[-1]

    @property
    def has_flag(self) -> bool:
        return not (self.in_file or self.item or self.optional)

    @property
    def earlier_names(self) -> tuple[str, ...]:
        """Earlier names of its flag."""
        return tuple(self.prefix + old for old in self.was)

    @property
    def item(self) -> Any:
        """The config class of the items, if the setting is a list of sections; else None."""
        args = typing.get_args(self.type)
        return args[0] if typing.get_origin(self.type) is tuple and dataclasses.is_dataclass(args[0]) else None

    @property
    def optional(self) -> Any:
        """The config class of the section, if the setting is one that may be missing; else None."""
        return None if self.item else next(filter(dataclasses.is_dataclass, typing.get_args(self.type)), None)


@dataclass(frozen=True)
class Section:
    """A nested config class; the other fields are what ``section`` declared."""

    config: Any
    prefix: str
    was: tuple[str, ...] = ()
    flags: bool = True
    needs: Needs = ()


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


def leaves(
    config_class, path: tuple[str, ...] = (), prefix: str = "", in_file: bool = False, needs: Needs = ()
) -> Iterator[Leaf]:
    """Every setting of a config class, nested ones included, in order of declaration.

    A list of sections is one leaf, since the class does not say how many there are: see ``dicts.entries``. So is a
    section that may be missing.
    """
    for key, member in members(config_class).items():
        if isinstance(member, Section):
            in_section = prefix + member.prefix, in_file or not member.flags, needs + member.needs
            yield from leaves(member.config, (*path, key), *in_section)
        else:
            yield replace(member, path=(*path, key), prefix=prefix, in_file=in_file, needs=needs + member.needs)


def present_keys(config_class) -> dict[str, str]:
    """Present keys of the settings and sections that a config class itself declares, by their earlier names."""
    return {old: key for key, member in members(config_class).items() for old in member.was}


def refusal(config_class, key: str) -> str:
    """Why a config class does not take a key that its users know from elsewhere; "" if there is no reason to give.

    It says so in a class variable ``refused``: key → the rest of the sentence, such as "is decided by the position of
    the U-Net: leave it out".
    """
    return getattr(config_class, "refused", {}).get(key, "")
