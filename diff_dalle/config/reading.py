"""Nested mappings → configs, strictly, with everything that is wrong found in one pass.

A value that is wrong is reported and takes its default, and a section that refuses its settings is reported and kept as
it is, so that the checks of the sections around it find what else is wrong.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ..errors import InputError
from .declaration import Leaf, Section, leaves, members, present_keys, refusal
from .names import nearest
from .values import checked, checked_list, checked_mapping, cut

KeyPath = tuple[str | int, ...]  # keys and indices from the root


def spelled_path(path: KeyPath) -> str:
    """``decoder.unets[1].dim``."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{_plain(key)}" for key in path).removeprefix(".")


def _plain(key: str) -> str:
    return cut(key) if key.isprintable() else cut(repr(key))


class Problems(InputError):
    """Several things wrong with the settings of one config class, as its ``__post_init__`` raises them: for each, a
    sentence that begins with the setting's name, or with its path from the class, or ``NAME: a sentence``."""

    def __init__(self, sentences: Sequence[str]):
        super().__init__("; ".join(sentences))
        self.sentences = list(sentences)

    @staticmethod
    def check(sentences: Iterable[str]) -> None:
        """Raise Problems if there are any."""
        if found := list(sentences):
            raise Problems(found)


@dataclasses.dataclass(frozen=True)
class _Problem:
    """path: of the setting or section. mistyped: whether its own value cannot be read."""

    path: KeyPath
    sentence: str
    mistyped: bool = False


def from_dict(config_class, mapping: Mapping, where: str = "", repeated: bool = False) -> Any:
    """An instance from a nested mapping, strictly. Missing keys take their default.

    where:    path of the mapping in the whole config, for messages.
    repeated: the whole config may hold this class several times, so every message must give the path.

    Raises InputError for the first key that does not exist (naming the nearest) or is missing though required, or
    value of the wrong type.
    """
    path: KeyPath = (where,) if where else ()
    reader = _Reader(config_class, whole_paths=True)
    config = reader.section(config_class, mapping, path, repeated)
    if reader.problems:
        raise InputError(reader.problems[0].sentence)
    return config


def from_value(config_class, mapping: Mapping, setting: str) -> Any:
    """An instance from the mapping that is the value of a ``nested`` setting.

    Raises InputError for the first thing that is wrong: ``SETTING.KEY: what is wrong with it``.
    """
    reader = _Reader(config_class, whole_paths=False)
    config = reader.section(config_class, mapping, (setting,), False)
    for problem in reader.problems:
        raise InputError(f"{spelled_path(problem.path)}: {problem.sentence}")
    return config


def from_file(
    config_class,
    mapping: Mapping,
    places: Mapping[KeyPath, str],
    name: str,
    homes: Mapping[str, KeyPath] = MappingProxyType({}),
) -> Any:
    """An instance from the nested mapping of a file called ``name``.

    places: where each setting is given, such as "line 3", by its path in the file.
    homes:  keys that a file has at its root, by the paths of the settings that they are in the mapping.

    Raises InputError with everything that is wrong, each with its path and place in the file.
    """
    reader = _Reader(config_class, whole_paths=False)
    config = reader.section(config_class, mapping, (), False)
    order = {path: number for number, path in enumerate(places)}
    located = []
    for problem in reader.problems:
        path = _written(problem.path, places, homes)
        located.append((_innermost(path, places), path, problem.sentence))
    located.sort(key=lambda each: order.get(each[0], len(order)))  # as in the file
    found = []
    for known, path, sentence in located:
        place = f" ({places[known]})" if known in places else ""
        found.append(f"{spelled_path(path) or 'the settings'}{place}: {sentence}")
    if len(found) == 1:
        raise InputError(f"{name}: {found[0]}")
    if found:
        raise InputError("\n  ".join([f"{name} has {len(found)} errors:", *found]))
    return config


def _default(field: dataclasses.Field) -> Any:
    """A field's default; None if it has none, or one that its own checks refuse."""
    try:
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    except InputError:
        return None
    return None if default is dataclasses.MISSING else default


def _written(path: KeyPath, places: Mapping[KeyPath, str], homes: Mapping[str, KeyPath]) -> KeyPath:
    """The path of a setting in the file, whose root may have a key for it."""
    for key, home in homes.items():
        if path[: len(home)] == home and home not in places:
            return (key, *path[len(home) :])
    return path


def _innermost(path: KeyPath, places: Mapping[KeyPath, str]) -> KeyPath:
    """The setting, or the innermost section around it, that has a place."""
    return next((path[:n] for n in range(len(path), 0, -1) if path[:n] in places), ())


class _Reader:
    """Reads the sections of a config and collects what is wrong.

    whole_paths: settings have their whole path in sentences, instead of their own name.
    """

    def __init__(self, root, whole_paths: bool):
        self.root, self.whole_paths = root, whole_paths
        self.problems: list[_Problem] = []

    def section(self, config_class, mapping, path: KeyPath, repeated: bool) -> Any:
        """The instance that a mapping stands for, possibly one whose checks have failed."""
        try:
            checked_mapping(mapping, self._spelled(path) or "the configuration")
        except InputError as error:
            self._add(path, str(error), mistyped=True)
            mapping = {}
        known, present = members(config_class), present_keys(config_class)
        values: dict[str, Any] = {}
        for key, value in mapping.items():
            name, here = present.get(key, key), (*path, str(key))
            if name not in known:
                self._add(here, self._unknown(here, str(key), config_class))
            elif name in values:
                text = "is given twice, under its present and an earlier name"
                self._add(here, f"setting {self._spelled(here)} {text}")
            else:
                values[name] = self._member(known[name], value, here, repeated)
        for name, member in known.items():
            if name in values:
                continue
            if isinstance(member, Leaf) and member.required:
                self._add((*path, name), f"{self._spelled((*path, name))} is required", mistyped=True)
            if isinstance(member, Section) and any(leaf.required for leaf in leaves(member.config)):
                values[name] = self.section(member.config, {}, (*path, name), repeated)
        return self._build(config_class, values, path, repeated)

    def _member(self, member: Leaf | Section, value, path: KeyPath, repeated: bool) -> Any:
        if isinstance(member, Section):
            return self.section(member.config, value, path, repeated or bool(member.prefix))
        if member.optional:
            return None if value is None else self.section(member.optional, value, path, repeated=True)
        try:
            if member.item:
                items = _items(member, value, path, self._spelled(path))
                return tuple(self.section(member.item, item, where, repeated=True) for where, item in items)
            return checked(member, value, False, self._spelled(path))
        except InputError as error:
            self._add(path, str(error), mistyped=True)
            return member.default

    def _build(self, config_class, values: Mapping[str, Any], path: KeyPath, repeated: bool) -> Any:
        before = len(self.problems)
        try:
            return config_class(**values)
        except Problems as error:
            for sentence in error.sentences:
                self._refused(config_class, sentence, path, repeated)
        except InputError as error:
            self._refused(config_class, str(error), path, repeated)
        except Exception:
            if not before:  # else it follows from what is wrong already
                raise
        broken = object.__new__(config_class)
        for field in dataclasses.fields(config_class):
            object.__setattr__(broken, field.name, values[field.name] if field.name in values else _default(field))
        return broken

    def _refused(self, config_class, sentence: str, path: KeyPath, repeated: bool) -> None:
        """A class's own sentence, at the setting that it begins with."""
        subject = tuple(_subject(config_class, sentence))
        here = (*path, *subject)
        if any(problem.mistyped and problem.path == here for problem in self.problems):
            return  # it is about the default
        if not self.whole_paths:
            sentence = sentence.removeprefix(f"{spelled_path(subject)}: ")
        if self.whole_paths and repeated:
            sentence = f"{self._spelled(path)}: {sentence}"
        self._add(here, sentence)

    def _add(self, path: KeyPath, sentence: str, mistyped: bool = False) -> None:
        self.problems.append(_Problem(path, sentence, mistyped))

    def _spelled(self, path: KeyPath) -> str:
        return spelled_path(path if self.whole_paths else path[-1:])

    def _unknown(self, path: KeyPath, key: str, config_class) -> str:
        """A sentence about a key that the class does not have."""
        if reason := refusal(config_class, key):
            return f"{self._spelled(path)} {reason}"
        if self.whole_paths:
            return f"unknown setting {self._spelled(path)}{nearest(key, members(config_class))}"
        elsewhere = [leaf.path for leaf in leaves(self.root) if leaf.path[-1] == key]
        if len(elsewhere) == 1:
            return f"unknown setting; it belongs under {'.'.join(elsewhere[0][:-1]) or 'no section'}"
        return f"unknown setting{nearest(key, members(config_class))}"


def _subject(config_class, sentence: str) -> Iterator[str | int]:
    """The path, from the class, of the setting with whose name or path a sentence begins; nothing if there is none."""
    first = sentence.partition(" ")[0].rstrip(":")
    keys = re.findall(r"(\w+)(?:\[(\d+)\])?", first)
    for i, (key, index) in enumerate(keys):
        member = members(config_class).get(key) if config_class else None
        if member is None:
            return
        yield key
        if index:
            yield int(index)
        if isinstance(member, Leaf) and member.nested:  # whose value has keys of its own
            yield from (inner for inner, _ in keys[i + 1 :])
            return
        config_class = member.config if isinstance(member, Section) else member.item or member.optional


def _items(leaf: Leaf, value, path: KeyPath, spelled: str) -> Iterator[tuple[KeyPath, Any]]:
    """The items of a list of sections, each with its path. InputError if it is none."""
    if isinstance(value, Mapping) and leaf.keyed:
        for key, rest in value.items():
            if rest is None or rest is False:
                continue
            here = f"{spelled}.{_plain(str(key))}"
            settings = {} if rest is True else checked_mapping(rest, here)
            if leaf.keyed in settings:
                raise InputError(f"{here} has the setting {leaf.keyed}, which is its key")
            yield (*path, str(key)), {leaf.keyed: str(key), **settings}
        return
    if isinstance(value, Mapping) and leaf.lone:
        value = [value]
    yield from (((*path, i), item) for i, item in enumerate(checked_list(value, spelled)))
