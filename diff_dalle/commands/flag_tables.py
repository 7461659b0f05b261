"""The commands and their flags in Markdown: what ``scripts/README.md`` holds."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..config import Leaf, leaves, shown
from ..evaluation.report import markdown_table
from .command_line import Group, groups, title_of

HEADER = ("flag", "default", "meaning")
Row = tuple[str, str, str]

INTRODUCTION = """# Commands

Settings are flags. Later sources win: default < `--preset NAME` < `--config FILE` < flag or `--set PATH=VALUE`.

* `--preset NAME` takes the settings of a [preset](../diff_dalle/presets/README.md), `--config FILE` those of a YAML or
  JSON file, with the keys grouped by section or not.
* `--dry_run` prints the resolved settings as such a file and exits. `--help` shows examples and lists all flags.
* `--set optim.lr=1e-4` sets any setting by its path in that file, also one without a flag, such as those in lists of
  sections. It may be repeated.
* Lists are separated by commas; `none` is the empty list or text. Booleans take `True` or `False`; the flag alone
  means `True`.
* `mpiexec -n 8 python`, `torchrun --nproc_per_node 8` and `srun python` run training, sampling and evaluation in
  several processes, one per GPU ([Slurm](../diff_dalle/tasks/README.md#many-processes)).

`diff-dalle`, or `python -m diff_dalle`, lists the commands and runs them: `diff-dalle sample` is `python scripts/sample.py`, from any folder.
With the extra `completion` and `activate-global-python-argcomplete`, the shell completes its commands and flags.
[`tour.ipynb`](tour.ipynb) is a tour of the library as a notebook.
`bash scripts/test.sh` runs the tests, `bash scripts/gpu_check.sh FOLDER` what nine minutes of a GPU are for.
`python scripts/readme_flags.py` writes this file and the table of presets."""


@dataclass(frozen=True)
class Command:
    """A script.

    script:      its file name.
    description: its docstring.
    examples:    command lines.
    configs:     its config class; several by name of the subcommand, or by the line ``kind: …`` of a file.
    """

    script: str
    description: str
    examples: Sequence[str]
    configs: Mapping[str, Any]


def flag_table(config_class) -> str:
    """All flags of a command, one table per section."""
    return "\n\n".join(_titled(group.title, _rows(group)) for group in groups(config_class))


def _rows(group: Group) -> list[Row]:
    rows = [_row(f"--{leaf.name}", leaf) for leaf in group.flags]
    for leaf in group.in_file:
        rows += _rows_in_file(f"--set {'.'.join(leaf.path)}", leaf)
    return rows


def _rows_in_file(path: str, leaf: Leaf) -> list[Row]:
    """The rows of a setting without a flag and of those below it."""
    if not (nested := leaf.item or leaf.optional):
        return [_row(path, leaf)]
    if leaf.item:
        path += ".N"
        rows = [(f"`{path}`", f"{len(leaf.default)}", f"{leaf.help}: a list of sections, N = 0, 1, …")]
    else:
        rows = [(f"`{path}`", "`none`", f"{leaf.help}: a section or none")]
    return rows + [row for inner in leaves(nested) for row in _rows_in_file(f"{path}.{'.'.join(inner.path)}", inner)]


def _row(name: str, leaf: Leaf) -> Row:
    choices = f" ({', '.join(leaf.choices)})" if leaf.choices else ""
    return f"`{name}`", f"`{shown(leaf.default)}`", f"{leaf.help}{choices}"


def _titled(title: str, rows: Iterable[Row]) -> str:
    return f"**{title}**\n\n{markdown_table(HEADER, list(rows))}"


def command_page(commands: Sequence[Command]) -> str:
    """Every command with its description, examples and flags; sections that several commands have come once, last."""
    shared = _shared_sections(commands)
    contents = [f"* [`{command.script}`](#{_anchor(command.script)})" for command in commands]
    parts = [INTRODUCTION, "\n".join(contents)]
    parts += [_command_section(command, shared) for command in commands]
    parts.append("## Shared settings")
    parts += [f"### {group.title}\n\n{markdown_table(HEADER, _rows(group))}" for group in shared.values()]
    return "\n\n".join(parts) + "\n"


def _base(config_class) -> Any:
    """The config class that this one and others like it derive from: the same settings with other defaults."""
    return [base for base in config_class.__mro__ if dataclasses.is_dataclass(base)][-1]


def _shared_sections(commands: Sequence[Command]) -> dict[Any, Group]:
    """The sections that several commands have, by their base class."""
    configs = [config for command in commands for config in command.configs.values()]
    found = [group for config in configs for group in _without_prefix(config) if not _rule(group)]
    uses, shared = Counter(_base(group.config) for group in found), {}
    for group in found:
        base = _base(group.config)
        if uses[base] > 1 and base not in shared:
            flags, in_file = (_of_base(base, found) for found in (group.flags, group.in_file))
            shared[base] = Group(title_of(base), base, flags, in_file)
    return shared


def _of_base(base: Any, found: Sequence[Leaf]) -> tuple[Leaf, ...]:
    """Those of a group's settings that its base class has too, as that declares them."""
    declared = {leaf.path: leaf for leaf in leaves(base)}
    known = ((leaf, declared.get(leaf.path) or declared.get(leaf.path[1:])) for leaf in found)
    return tuple(dataclasses.replace(own, path=leaf.path, in_file=leaf.in_file) for leaf, own in known if own)


def _without_prefix(config_class) -> list[Group]:
    """The groups that another command could have too: all but the sections under a prefix."""
    return [group for group in groups(config_class) if not any(leaf.prefix for leaf in group.flags)]


def _anchor(title: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def _command_section(command: Command, shared: Mapping[Any, Group]) -> str:
    parts = [f"## `{command.script}`", command.description, "```bash\n" + "\n".join(command.examples) + "\n```"]
    for name, config in command.configs.items():
        if name:
            parts.append(f"### `{command.script}`, `{name}`" if ":" in name else f"### `{command.script} {name}`")
        links, tables = [], []
        for group in groups(config):
            known = shared.get(_base(group.config))
            rows = _rows(group)
            if _rule(group):
                tables.append(_by_name(group))
                continue
            other = [row for row in rows if known is None or row not in _rows(known)]
            if known and len(other) < len(rows):
                links.append(f"[{known.title.partition(' (')[0]}](#{_anchor(known.title)})")
            if other:
                tables.append(_titled(group.title, other))
        if links:
            rest = " Its own, and those with other defaults:" if tables else ""
            parts.append(f"Settings shared with other commands: {', '.join(links)}.{rest}")
        parts += tables
    return "\n\n".join(parts)


def _rule(group: Group) -> str:
    """How flags of a group relate to what a checkpoint says; empty for settings of the command itself."""
    return getattr(group.config, "rule", "")


def _by_name(group: Group) -> str:
    names = ", ".join(f"`--{leaf.name}`" for leaf in group.flags)
    return f"**{group.title}** ({_rule(group)}): {names}."
