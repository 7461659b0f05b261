"""Declaring settings, and listing what a config class declares."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import json
import textwrap
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, replace
from typing import Any, TypeVar

from typing_extensions import dataclass_transform

from .bounds import Bounds
from .errors import Fault, InputError, cut, path_of
from .names import nearest
from .registry import Registry

Needs = tuple[tuple[str, ...], ...]  # the names of other settings, each with the values that give this one an effect


def option(
    default,
    help: str,
    choices: Collection[str] = (),
    free: bool = False,
    was: Sequence[str] = (),
    needs: Sequence[str] | Sequence[Sequence[str]] = (),
    required: bool = False,
    needed: str = "",
    keyed: str = "",
    lone: bool = False,
    nested: bool = False,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    multiple_of: int | None = None,
    length: int | None = None,
    longest: int | None = None,
    besides: Sequence[float] = (),
) -> Any:
    """A setting: a dataclass field with its default and a help text that gives the unit.

    choices: the only strings allowed, of a list in each of its places; a ``Registry`` may get more of them later.
    free:    the setting may change when a run is resumed, because it changes neither what the run has learned nor how
             that is stored: learning rates and their schedule, limits, logging, saving, sampling, speed. The rule is
             that of training/README.md.
    was:     earlier names, still accepted in flags, files and checkpoints.
    needs:   the name of another setting, and the values of it with which this one has an effect, no value = any but
             0, False and none; or several of these, which are all needed. A flag without effect is refused, unless it
             turns something off; in files, which may be complete dumps, it is allowed.

    A field of type ``tuple[SomeConfig, ...]`` is a list of sections, one of type ``SomeConfig | None`` a section that
    may be missing: set in a file or by ``--set``, not by a flag.

    required: a mapping that is read must have it; the default is for code alone.
    needed:   of a setting that must not be empty: what to give it, for the message.
    keyed:    of a list of sections: a mapping may take its place, each key of which is this setting of an item; the
              value is the item's other settings, or True for none of them, or False or None for no item.
    lone:     of a list of sections: the mapping of one item may take its place.
    nested:   of texts: in a file a list or mapping may take the place of a text and stands for its JSON text, which is
              how a flag spells it; commas within brackets and quotes separate nothing.

    least, above, most, below, multiple_of: what numbers must be, of a list in each of its places.
    besides: numbers that are allowed as well.
    length:  how many values a list must have, unless it is empty.
    longest: how many values a list may have.
    """
    bounds = Bounds(least, above, most, below, multiple_of, length, longest, tuple(besides))
    metadata: dict[str, Any] = {"bounds": bounds} if bounds != Bounds() else {}
    metadata |= {"help": help, "choices": choices, "free": free, "was": tuple(was), "needs": _all(needs)}
    metadata |= {"required": required, "needed": needed, "keyed": keyed, "lone": lone, "nested": nested}
    return dataclasses.field(default=default, metadata=metadata)


def section(
    config_class,
    prefix: str = "",
    was: Sequence[str] = (),
    flags: bool = True,
    needs: Sequence[str] = (),
    called: Mapping[str, str] | None = None,
) -> Any:
    """A nested dataclass with its own defaults; its docstring's first line is the title in ``--help``.

    prefix: put before the names of its flags, so that a command can have the same section twice. Keys in files and
            checkpoints carry no prefix: there the section's own name tells them apart.
    was:    earlier names, still accepted in files and checkpoints.
    flags:  False = its settings have no flags, but are set in a file or by ``--set``.
    needs:  what all its settings need, besides what each of them needs itself; see ``option``.
    called: names of flags, after the prefix, of settings whose own would mean something else in the command.
    """
    metadata = {"prefix": prefix, "was": tuple(was), "flags": flags, "needs": _all(needs), "called": called}
    return dataclasses.field(default_factory=config_class, metadata=metadata)


Config = TypeVar("Config")


@dataclass_transform(frozen_default=True)
def settings(config_class: type[Config]) -> type[Config]:
    """A class of settings: a frozen dataclass. When one is made, its settings are checked as they are declared, and by
    the ``faults`` that the class may have, a method that yields what is wrong with several settings. Its docstring, and
    so ``help()``, lists them.

    Raises InputError with all of it, one fault a setting.
    """
    config_class.__post_init__ = check_declared  # type: ignore[attr-defined]
    made = dataclass(frozen=True)(config_class)
    made.__doc__ = _Documentation(made.__doc__ or "")  # type: ignore[assignment]
    return made


class _Documentation:
    """A docstring of a config class, to which its settings are added when somebody asks for it."""

    def __init__(self, text: str):
        self.text = inspect.cleandoc(text)

    def __get__(self, config: Any, config_class: Any) -> str:
        listed = (_described(key, member) for key, member in members(config_class).items())
        return "\n".join([self.text, "", "Settings:", *listed])


def title_of(config_class) -> str:
    """The first line of a config class's docstring."""
    documentation = inspect.getattr_static(config_class, "__doc__")
    text = documentation.text if isinstance(documentation, _Documentation) else documentation
    return (text or config_class.__name__).strip().splitlines()[0].rstrip(".")


def _described(key: str, member: Leaf | Section) -> str:
    """A setting or section in a docstring: its name, type and default, and below them its help."""
    if isinstance(member, Section):
        return f"    {key}: {member.config.__name__}\n        {title_of(member.config)}"
    rules = [f"one of {', '.join(member.choices)}"] if member.choices else []
    rules += filter(None, [member.bounds.rule])
    text = textwrap.fill("; ".join([member.help, *rules]), 100, break_on_hyphens=False)
    head = f"    {key}: {inspect.formatannotation(member.type)} = {cut(repr(member.default))}"
    return f"{head}\n{textwrap.indent(text, ' ' * 8)}"


def check_declared(self) -> None:
    """Raise InputError with all that is wrong with a config."""
    found: dict[str, Fault] = {}
    config_class: Any = type(self)
    for key, member in members(config_class).items():
        if isinstance(member, Leaf):
            found |= {fault.setting: fault for fault in itertools.islice(member.faults(getattr(self, key)), 1)}
    try:
        for fault in getattr(self, "faults", tuple)() or ():
            found.setdefault(fault.setting or fault.rule, fault)
    except InputError as error:
        for fault in error.faults:
            found.setdefault(fault.setting or fault.rule, fault)
    except Exception:
        if not found:  # else it follows from what is wrong already
            raise
    if found:
        raise InputError(*found.values())


def faults_of(check: Callable[[], object], setting: str = "") -> Iterator[Fault]:
    """The faults with which a function fails. setting: the one that they are about where they do not say."""
    try:
        check()
    except InputError as error:
        for fault in error.faults:
            yield fault if fault.setting else fault.below(path_of(setting))


def _all(needs: Sequence[str] | Sequence[Sequence[str]]) -> Needs:
    """Of one need, or of several."""
    one = [need for need in needs if isinstance(need, str)]
    return (tuple(one),) if one else tuple(tuple(need) for need in needs)


@dataclass(frozen=True)
class Leaf:
    """One setting of a composed config.

    path:   its keys from the root of the config; the last one is its own.
    prefix: the prefixes of the sections that hold it, joined.
    in_file: whether it is in a section without flags.
    called: the name of its flag after the prefix; "" = its own key.
    needs:  the needs of these sections and its own; it has an effect only when all are met.

    The other fields are what ``option`` declared.
    """

    path: tuple[str, ...]
    type: Any
    default: Any
    help: str
    choices: Collection[str] = ()
    free: bool = False
    was: tuple[str, ...] = ()
    needs: Needs = ()
    required: bool = False
    needed: str = ""
    keyed: str = ""
    lone: bool = False
    nested: bool = False
    bounds: Bounds = Bounds()
    prefix: str = ""
    in_file: bool = False
    called: str = ""

    @property
    def name(self) -> str:
        """The name of its flag; its path if it has none."""
        return ".".join(self.path) if self.in_file else self.prefix + (self.called or self.path[-1])

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

    def faults(self, value: Any) -> Iterator[Fault]:
        """What is wrong with a value of its type."""
        several = value if isinstance(value, tuple) else (value,)
        key = self.path[-1]
        if self.needed and not value:
            yield Fault(key, f"is required: {self.needed}")
        if isinstance(value, tuple):
            yield from (Fault(key, rule, value) for rule in self.bounds.of_list(value))
        for each in several:
            if self.choices and each is not None and each not in self.choices:
                plain = f"must be one of {', '.join(self.choices)}{nearest(str(each), self.choices)}"
                rule = self.choices.rule(str(each)) if isinstance(self.choices, Registry) else plain
                yield Fault(key, rule, each)
            else:
                yield from (Fault(key, rule, each) for rule in self.bounds.of_value(each))


@dataclass(frozen=True)
class Section:
    """A nested config class; the other fields are what ``section`` declared."""

    config: Any
    prefix: str
    was: tuple[str, ...] = ()
    flags: bool = True
    needs: Needs = ()
    called: Mapping[str, str] | None = None


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


def leaves(config_class) -> Iterator[Leaf]:
    """Every setting of a config class, nested ones included, in order of declaration.

    A list of sections is one leaf, since the class does not say how many there are: see ``dicts.entries``. So is a
    section that may be missing.
    """
    for key, member in members(config_class).items():
        if isinstance(member, Leaf):
            yield member
            continue
        for leaf in leaves(member.config):
            called = (member.called or {}).get(leaf.path[0], "") if len(leaf.path) == 1 else leaf.called
            yield replace(
                leaf,
                path=(key, *leaf.path),
                prefix=member.prefix + leaf.prefix,
                in_file=leaf.in_file or not member.flags,
                needs=member.needs + leaf.needs,
                called=called,
            )


def present_keys(config_class) -> dict[str, str]:
    """Present keys of the settings and sections that a config class itself declares, by their earlier names."""
    return {old: key for key, member in members(config_class).items() for old in member.was}


def refusal(config_class, key: str) -> str:
    """Why a config class does not take a key that its users know from elsewhere; "" if there is no reason to give.

    It says so in a class variable ``refused``: key → the rest of the sentence, such as "is decided by the position of
    the U-Net: leave it out".
    """
    reason, idle = (getattr(config_class, name, {}).get(key, "") for name in ("refused", "idle"))
    return f"{reason}; accepted is {' or '.join(map(_in_file, idle))}" if idle else reason


def asks_for_nothing(config_class, key: str, value: Any) -> bool:
    """Whether a key has a value with which it asks for nothing, as files have it that record all settings: it is read
    as if it were not there. The class says these values in a class variable ``idle``: key → values."""
    idle = getattr(config_class, "idle", {}).get(key, ())
    return any(value == each and type(value) is type(each) for each in idle)


def _in_file(value: Any) -> str:
    """A value as JSON and YAML files spell it."""
    return json.dumps(value)
