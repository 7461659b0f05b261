"""Dataclasses as the one source of flags, YAML keys, help texts and the config inside a checkpoint.

A component declares its settings once, beside the class they configure::

    @dataclass(frozen=True)
    class OptimConfig:
        '''Optimizer'''
        lr: float = option(3e-4, "peak learning rate")

A command composes such sections into one dataclass. ``parse`` turns the command line into an instance: defaults,
then ``--preset NAME``, then ``--config FILE``, then flags. Anything unknown, given twice or of the wrong type stops
with an InputError that names the nearest valid spelling.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import functools
import json
import re
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass
from importlib import resources

import yaml

from .errors import InputError


def option(default, help: str, choices: Sequence[str] = (), free: bool = False):
    """A setting: a dataclass field with its default and a help text that gives the unit.

    choices: the only strings allowed.
    free:    the setting may change when a run is continued (how fast, how long, what is shown), because it does not
             change what a step computes.
    """
    metadata = {"help": help, "choices": tuple(choices), "free": free}
    return dataclasses.field(default=default, metadata=metadata)


def section(config_class):
    """A nested dataclass with its own defaults; its docstring's first line is the title in ``--help``."""
    return dataclasses.field(default_factory=config_class)


@dataclass(frozen=True)
class Alias:
    """An old flag that sets a field under its present name.

    true_value: what a True flag sets, for a boolean alias (False returns the field to its default when it holds that
                value); None passes the value on as it is.
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
    "index_dir": Alias("data_dir"),
    "index_dir_val": Alias("val_data_dir"),
}


@dataclass(frozen=True)
class Leaf:
    """One setting of a composed config: where it sits, and everything about it."""

    path: tuple[str, ...]
    type: object
    default: object
    help: str
    choices: tuple[str, ...]
    free: bool

    @property
    def name(self) -> str:
        return self.path[-1]


@functools.cache
def _hints(config_class) -> dict[str, object]:
    return typing.get_type_hints(config_class)


def leaves(config_class, path: tuple[str, ...] = ()) -> Iterator[Leaf]:
    """Every setting of a config class, nested ones included, in order of declaration."""
    for field in dataclasses.fields(config_class):
        kind, here = _hints(config_class)[field.name], (*path, field.name)
        if dataclasses.is_dataclass(kind):
            yield from leaves(kind, here)
        else:
            meta = field.metadata
            default = None if field.default is MISSING else field.default
            yield Leaf(here, kind, default, meta["help"], meta["choices"], meta["free"])


def by_name(config_class) -> dict[str, Leaf]:
    """Settings by flag name. Raises TypeError when two sections share a name: flags are flat."""
    table: dict[str, Leaf] = {}
    for leaf in leaves(config_class):
        if leaf.name in table or leaf.name in ALIASES:
            raise TypeError(f"{config_class.__name__} has two settings called {leaf.name}")
        table[leaf.name] = leaf
    return table


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
    """Split at commas outside braces, so that brace ranges stay whole."""
    return [part for part in re.split(r",(?![^{]*\})", text) if part]


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
        if isinstance(value, str) or (from_text is False and isinstance(value, (int, float)) and value is not True):
            return str(value)
    elif isinstance(value, bool):
        pass
    elif kind is int:
        if from_text or isinstance(value, int):
            return int(value)
    elif kind is float and (from_text or isinstance(value, (int, float))):
        return float(value)
    raise ValueError


def _checked(leaf: Leaf, value, from_text: bool, spelled: str):
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
    hints, prefix = _hints(config_class), f"{where}." if where else ""
    known = {leaf.path[0]: leaf for leaf in leaves(config_class) if len(leaf.path) == 1}
    values = {}
    for key, value in mapping.items():
        if key not in hints:
            raise InputError(f"unknown setting {prefix}{key}{nearest(str(key), list(hints))}")
        if key in known:
            values[key] = _checked(known[key], value, False, f"{prefix}{key}")
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
    except yaml.YAMLError as error:
        raise InputError(f"{name} is not valid YAML or JSON: {' '.join(str(error).split())}") from None
    if not isinstance(mapping, dict):
        raise InputError(f"{name} must hold settings as `name: value` lines")
    return mapping


def dump(config) -> str:
    """The resolved config as YAML that ``--config`` reads back."""
    return yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True)


def preset_names() -> list[str]:
    folder = resources.files(__package__) / "presets"
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def preset_text(name: str) -> str:
    if name not in preset_names():
        raise InputError(
            f"there is no preset {name!r}{nearest(name, preset_names())} (known: {', '.join(preset_names())})"
        )
    return (resources.files(__package__) / "presets" / f"{name}.yaml").read_text(encoding="utf-8")


class _Values:
    """Settings collected from several sources, later ones winning."""

    def __init__(self, config_class):
        self.config_class = config_class
        self.table = by_name(config_class)
        self.values: dict[str, object] = {}
        self.claims: dict[tuple[str, bool], str] = {}  # (field, from a flag) → what an alias has set it to

    def set(self, name: str, value, from_text: bool, spelled: str):
        if name in ALIASES and ALIASES[name].field in self.table:
            self._set_alias(ALIASES[name], value, from_text, spelled)
            return
        if name not in self.table:
            hint = nearest(name, [*self.table, *ALIASES])
            raise InputError(f"unknown setting {spelled}{hint}")
        self.values[name] = _checked(self.table[name], value, from_text, spelled)

    def _set_alias(self, alias: Alias, value, from_text: bool, spelled: str):
        leaf = self.table[alias.field]
        if alias.true_value is None:
            self.values[leaf.name] = _checked(leaf, value, from_text, spelled)
        elif _checked(dataclasses.replace(leaf, type=bool, choices=()), value, from_text, spelled):
            other = self.claims.setdefault((leaf.name, from_text), alias.true_value)
            if other != alias.true_value:
                raise InputError(f"{spelled} asks for {leaf.name} {alias.true_value}, but {other} was asked for too")
            self.values[leaf.name] = alias.true_value
        elif self.values.get(leaf.name) == alias.true_value:
            self.values[leaf.name] = leaf.default

    def update(self, mapping: Mapping, source: str, path: tuple[str, ...] = ()):
        """Take settings from a mapping: flat by name, nested by section, or both."""
        sections = {leaf.path[: len(path) + 1] for leaf in self.table.values() if leaf.path[: len(path)] == path}
        sections = {entry[-1] for entry in sections if (*path, entry[-1]) not in {x.path for x in self.table.values()}}
        seen = set()
        for key, value in mapping.items():
            spelled = f"{key} in {source}"
            if key in sections and isinstance(value, Mapping):
                inner = self.update(value, f"{source} under {key}", (*path, key))
            elif path and key in self.table and self.table[key].path[:-1] != path:
                right = ".".join(self.table[key].path[:-1])
                raise InputError(f"{spelled} belongs under {right}")
            else:
                self.set(str(key), value, False, spelled)
                inner = {ALIASES[key].field if key in ALIASES else key}
            if seen & inner:
                raise InputError(f"{source} gives {', '.join(sorted(seen & inner))} twice")
            seen |= inner
        return seen

    def build(self):
        nested: dict = {}
        for name, value in self.values.items():
            *parents, last = self.table[name].path
            place = nested
            for parent in parents:
                place = place.setdefault(parent, {})
            place[last] = value
        return from_dict(self.config_class, nested)


# --------------------------------------------------------------------------------------------------- command line


def _titles(config_class) -> Iterator[tuple[str, list[Leaf]]]:
    """Settings grouped by the section that holds them, with the section's title."""
    own = [leaf for leaf in leaves(config_class) if len(leaf.path) == 1]
    if own:
        yield "This command", own
    for field in dataclasses.fields(config_class):
        kind = _hints(config_class)[field.name]
        if dataclasses.is_dataclass(kind):
            yield kind.__doc__.strip().splitlines()[0].rstrip("."), list(leaves(kind))


def _shown(value) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "none"
    return "none" if value is None or value == "" else str(value)


def _parser(config_class, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False, add_help=False)
    general = parser.add_argument_group("Where settings come from (defaults < preset < config file < flags)")
    general.add_argument("--help", "-h", action="help", help="show this and leave")
    general.add_argument("--preset", metavar="NAME", help=f"named settings: {', '.join(preset_names()) or 'none yet'}")
    general.add_argument("--config", metavar="FILE", help="YAML or JSON file of settings, local or remote")
    general.add_argument(
        "--dry_run", nargs="?", const="True", default="False", metavar="BOOL",
        help="print the resolved settings as YAML and leave",
    )  # fmt: skip
    table = by_name(config_class)
    for title, members in _titles(config_class):
        group = parser.add_argument_group(title)
        for leaf in members:
            text = f"{leaf.help} [{'|'.join(leaf.choices) or type_name(leaf.type)}; default {_shown(leaf.default)}]"
            _add_flag(group, leaf.name, leaf.type is bool, text)
    olds = {name: alias for name, alias in ALIASES.items() if alias.field in table}
    if olds:
        group = parser.add_argument_group("Older spellings")
        for name, alias in olds.items():
            target = f"--{alias.field}" + (f" {alias.true_value}" if alias.true_value else "")
            _add_flag(group, name, alias.true_value is not None, f"same as {target}")
    return parser


def _add_flag(group, name: str, boolean: bool, help: str):
    optional = {"nargs": "?", "const": "True"} if boolean else {}
    group.add_argument(
        f"--{name}", action="append", metavar="BOOL" if boolean else "VALUE", help=help.replace("%", "%%"), **optional
    )


def parse(config_class, argv: Sequence[str] | None = None, description: str = "", read_text=None):
    """The command line as an instance of ``config_class``.

    read_text: reads the ``--config`` file; ``storage.read_text`` in the scripts, so that remote files work too.
    ``--help`` and ``--dry_run`` print and raise SystemExit(0). Raises InputError for bad settings.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = _parser(config_class, description)
    parser.error = _raise_input_error
    given, unknown = parser.parse_known_args(argv)
    values = _Values(config_class)
    if unknown:
        flags = [f"--{name}" for name in [*values.table, *ALIASES, "config", "preset", "dry_run"]]
        bad = unknown[0].split("=")[0]
        raise InputError(f"unknown flag or stray word {bad!r}{nearest(bad, flags)} (--help lists all flags)")
    if given.preset:
        values.update(load_mapping(preset_text(given.preset), f"preset {given.preset}"), f"preset {given.preset}")
    if given.config:
        values.update(load_mapping(read_text(given.config), given.config), given.config)
    for name, texts in vars(given).items():
        if name in ("preset", "config", "dry_run") or texts is None:
            continue
        if len(texts) > 1:
            raise InputError(f"--{name} is given {len(texts)} times; give it once")
        values.set(name, texts[0], True, f"--{name}")
    config = values.build()
    if given.dry_run.lower() in ("true", "1", "yes"):
        sys.stdout.write(dump(config))
        raise SystemExit(0)
    return config


def _raise_input_error(message: str):
    raise InputError(message)


def flag_table(config_class) -> str:
    """Every flag of a command as Markdown tables, one per section, for the README."""
    lines = []
    for title, members in _titles(config_class):
        lines += [f"**{title}**", "", "| flag | default | meaning |", "|---|---|---|"]
        for leaf in members:
            choices = f" ({', '.join(leaf.choices)})" if leaf.choices else ""
            lines.append(
                f"| `--{leaf.name}` | `{_shown(leaf.default)}` | {leaf.help}{choices} |".replace("||", "\\|\\|")
            )
        lines.append("")
    return "\n".join(lines)


def differences(saved: Mapping, current: Mapping, config_class) -> list[str]:
    """The settings, spelled ``name (saved → current)``, in which two resolved configs differ and that are not free."""
    found = []
    for leaf in leaves(config_class):
        if leaf.free:
            continue
        old, new = (functools.reduce(lambda place, key: (place or {}).get(key), leaf.path, m) for m in (saved, current))
        if old != new:
            found.append(f"{leaf.name} ({json.dumps(old)} → {json.dumps(new)})")
    return found


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
            found.append(f"{leaf.name} ({_shown(asked)} asked for, {_shown(actual)} in the checkpoint)")
    return found
