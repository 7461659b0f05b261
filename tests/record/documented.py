"""Recordings of the command line: help, and the settings that presets and documented commands resolve to."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import yaml
from workspace import GIVEN, Workspace

Recording = Callable[[Workspace], str]
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def lines_of(name: str) -> list[str]:
    """The lines of a given file, without comments."""
    text = (GIVEN / name).read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def flat(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """The settings in a nested dictionary, by their paths, each as one line of JSON."""
    if isinstance(value, dict) and value:
        for key in value:
            yield from flat(value[key], f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for i, item in enumerate(value):
            yield from flat(item, f"{path}[{i}]")
    else:
        yield path, json.dumps(value, ensure_ascii=False)


def settings(commands: list[str], workspace: Workspace) -> str:
    """The settings of the first command of every kind, and how those of the others differ from these."""
    text, bases = "", dict[str, dict[str, str]]()
    for command in commands:
        result = workspace.run(f"{command} --dry_run True")
        text += f"$ {command}\n"
        if result.status:
            text += f"status {result.status}\n{result.message}\n\n"
            continue
        found = dict(flat(yaml.load(result.out, LOADER)))
        base = bases.setdefault(found.get("kind", ""), found)
        if base is found:
            text += "".join(f"{name} = {found[name]}\n" for name in sorted(found))
        else:
            text += f"like the first {found.get('kind', '')}".rstrip() + "\n"
            text += "".join(f"+ {name} = {found[name]}\n" for name in sorted(found) if base.get(name) != found[name])
            text += "".join(f"- {name}\n" for name in sorted(base.keys() - found.keys()))
        text += "\n"
    return text


def help_of(command: str, workspace: Workspace) -> str:
    return workspace.need(f"{command} --help_all").out


def recordings() -> dict[str, Recording]:
    """By name: help for each command, settings for each script and subcommand."""
    found: dict[str, Recording] = {}
    for command in lines_of("helped.txt"):
        name = re.sub(r"\W+", "_", command.replace(".py", "").replace(" --kind", ""))
        found[f"help/{name}.txt"] = partial(help_of, command)
    groups: dict[str, list[str]] = {}
    for command in lines_of("commands.txt"):
        script, *words = shlex.split(command)
        subcommand = words[0] if words and re.fullmatch(r"[a-z]+", words[0]) else ""
        groups.setdefault("_".join(filter(None, (script.removesuffix(".py"), subcommand))), []).append(command)
    return found | {f"settings/{name}.txt": partial(settings, group) for name, group in groups.items()}
