"""The command line of every script, made from the config classes.

``parse`` turns it into an instance: defaults, then ``--preset NAME``, then ``--config FILE``, then flags. Anything
unknown, given twice or of the wrong type stops with an InputError that names the nearest valid spelling.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources

from .. import storage
from ..config import Leaf, checked, dump, from_dict, leaves, load_mapping, nearest, shown, type_hints, type_name
from ..errors import InputError


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
    "use_ddim": Alias("sampler", "ddim"),
    "index_dir": Alias("data_dir"),
    "index_dir_val": Alias("val_data_dir"),
}
PRESETS = "diff_dalle.presets"  # the package whose data files they are
DRY_RUN = Leaf(("dry_run",), bool, False, "print the resolved settings as YAML and leave", (), True)


def by_name(config_class) -> dict[str, Leaf]:
    """Settings by flag name. Raises TypeError when two sections share a name: flags are flat."""
    table: dict[str, Leaf] = {}
    for leaf in leaves(config_class):
        if leaf.name in table or leaf.name in ALIASES:
            raise TypeError(f"{config_class.__name__} has two settings called {leaf.name}")
        table[leaf.name] = leaf
    return table


def earlier_names(table: Mapping[str, Leaf]) -> dict[str, str]:
    """Present names of settings by their earlier ones."""
    return {old: name for name, leaf in table.items() for old in leaf.was}


def preset_names() -> list[str]:
    folder = resources.files(PRESETS)
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def preset_text(name: str) -> str:
    if name not in preset_names():
        raise InputError(
            f"there is no preset {name!r}{nearest(name, preset_names())} (known: {', '.join(preset_names())})"
        )
    return (resources.files(PRESETS) / f"{name}.yaml").read_text(encoding="utf-8")


class _Values:
    """Settings collected from several sources, later ones winning."""

    def __init__(self, config_class):
        self.config_class = config_class
        self.table = by_name(config_class)
        self.renamed = earlier_names(self.table)
        self.values: dict[str, object] = {}
        self.claims: dict[str, object] = {}  # field → what the present source has set it to

    def set(self, name: str, value, from_text: bool, spelled: str):
        name = self.renamed.get(name, name)
        if name in ALIASES and ALIASES[name].field in self.table:
            self._set_alias(ALIASES[name], value, from_text, spelled)
            return
        if name not in self.table:
            hint = nearest(name, [*self.table, *ALIASES])
            raise InputError(f"unknown setting {spelled}{hint}")
        self._claim(name, checked(self.table[name], value, from_text, spelled), spelled)

    def _claim(self, field: str, value, spelled: str):
        """Set a field. InputError when the same source has set it otherwise, under this name or another."""
        other = self.claims.setdefault(field, value)
        if other != value:
            raise InputError(f"{spelled} asks for {field} {shown(value)}, but {shown(other)} was asked for too")
        self.values[field] = value

    def _set_alias(self, alias: Alias, value, from_text: bool, spelled: str):
        leaf = self.table[alias.field]
        if alias.true_value is None:
            self._claim(leaf.name, checked(leaf, value, from_text, spelled), spelled)
        elif checked(dataclasses.replace(leaf, type=bool, choices=()), value, from_text, spelled):
            self._claim(leaf.name, alias.true_value, spelled)
        elif self.values.get(leaf.name) == alias.true_value:
            self._claim(leaf.name, leaf.default, spelled)

    def update(self, mapping: Mapping, source: str, path: tuple[str, ...] = ()):
        """Take settings from a mapping: flat by name, nested by section, or both."""
        if not path:
            self.claims.clear()
        sections = {leaf.path[: len(path) + 1] for leaf in self.table.values() if leaf.path[: len(path)] == path}
        sections = {entry[-1] for entry in sections if (*path, entry[-1]) not in {x.path for x in self.table.values()}}
        for key, value in mapping.items():
            spelled = f"{key} in {source}"
            if key in sections and isinstance(value, Mapping):
                self.update(value, f"{source} under {key}", (*path, key))
            elif path and key in self.table and self.table[key].path[: len(path)] != path:
                right = ".".join(self.table[key].path[:-1])
                raise InputError(f"{spelled} belongs under {right}")
            else:
                self.set(str(key), value, False, spelled)

    def build(self):
        nested: dict = {}
        for name, value in self.values.items():
            *parents, last = self.table[name].path
            place = nested
            for parent in parents:
                place = place.setdefault(parent, {})
            place[last] = value
        return from_dict(self.config_class, nested)


def _titles(config_class) -> Iterator[tuple[str, list[Leaf]]]:
    """Settings grouped by the section that holds them, with the section's title."""
    own = [leaf for leaf in leaves(config_class) if len(leaf.path) == 1]
    if own:
        yield "This command", own
    for field in dataclasses.fields(config_class):
        kind = type_hints(config_class)[field.name]
        if dataclasses.is_dataclass(kind):
            yield kind.__doc__.strip().splitlines()[0].rstrip("."), list(leaves(kind))


def _parser(config_class, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False, add_help=False)
    general = parser.add_argument_group("Where settings come from (defaults < preset < config file < flags)")
    general.add_argument("--help", "-h", action="help", help="show this and leave")
    _add_flag(general, "preset", f"named settings: {', '.join(preset_names())}", metavar="NAME")
    _add_flag(general, "config", "YAML or JSON file of settings, local or remote", metavar="FILE")
    _add_flag(general, "dry_run", DRY_RUN.help, boolean=True)
    table = by_name(config_class)
    for title, members in _titles(config_class):
        group = parser.add_argument_group(title)
        for leaf in members:
            text = f"{leaf.help} [{'|'.join(leaf.choices) or type_name(leaf.type)}; default {shown(leaf.default)}]"
            _add_flag(group, leaf.name, text, leaf.type is bool)
    for old, name in earlier_names(table).items():
        boolean = {"nargs": "?", "const": "True"} if table[name].type is bool else {}
        parser.add_argument(f"--{old}", action="append", help=argparse.SUPPRESS, **boolean)
    olds = {name: alias for name, alias in ALIASES.items() if alias.field in table}
    if olds:
        group = parser.add_argument_group("Older spellings")
        for name, alias in olds.items():
            target = f"--{alias.field}" + (f" {alias.true_value}" if alias.true_value else "")
            _add_flag(group, name, f"same as {target}", alias.true_value is not None)
    return parser


def _add_flag(group, name: str, help: str, boolean: bool = False, metavar: str = "VALUE"):
    optional = {"nargs": "?", "const": "True", "metavar": "BOOL"} if boolean else {"metavar": metavar}
    group.add_argument(f"--{name}", action="append", help=help.replace("%", "%%"), **optional)


def parse(config_class, argv: Sequence[str] | None = None, description: str = ""):
    """The command line as an instance of ``config_class``.

    ``--help`` and ``--dry_run`` print and raise SystemExit(0). Raises InputError for bad settings.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = _parser(config_class, description)
    parser.error = _raise_input_error
    given, unknown = parser.parse_known_args(argv)
    given, values = {name: texts for name, texts in vars(given).items() if texts is not None}, _Values(config_class)
    if unknown:
        flags = [f"--{name}" for name in [*values.table, *ALIASES, "config", "preset", "dry_run"]]
        bad = unknown[0].split("=")[0]
        raise InputError(f"unknown flag or stray word {bad!r}{nearest(bad, flags)} (--help lists all flags)")
    for name, texts in given.items():
        if len(texts) > 1:
            raise InputError(f"--{name} is given {len(texts)} times; give it once")
    preset, file, dry_run = (given.pop(name, [""])[0] for name in ("preset", "config", "dry_run"))
    if preset:
        values.update(load_mapping(preset_text(preset), f"preset {preset}"), f"preset {preset}")
    if file:
        values.update(load_mapping(storage.read_text(file), file), file)
    values.claims.clear()
    for name, (text,) in given.items():
        values.set(name, text, True, f"--{name}")
    config = values.build()
    if dry_run and checked(DRY_RUN, dry_run, True, "--dry_run"):
        sys.stdout.write(dump(config))
        raise SystemExit(0)
    return config


def _raise_input_error(message: str):
    raise InputError(message)


def flag_table(config_class, known: type | None = None) -> str:
    """Flags of a command as Markdown tables, one per section, for the README.

    known: a command whose flags need not be shown again, unless their defaults differ.
    """
    shown_before = {leaf.name: leaf.default for leaf in leaves(known)} if known else {}
    lines = []
    for title, members in _titles(config_class):
        new = [leaf for leaf in members if shown_before.get(leaf.name, leaf) != leaf.default]
        if not new:
            continue
        lines += [f"**{title}**", "", "| flag | default | meaning |", "|---|---|---|"]
        for leaf in new:
            choices = f" ({', '.join(leaf.choices)})" if leaf.choices else ""
            lines.append(
                f"| `--{leaf.name}` | `{shown(leaf.default)}` | {leaf.help}{choices} |".replace("||", "\\|\\|")
            )
        lines.append("")
    return "\n".join(lines)
