"""Scripts with several commands: the first argument chooses one, the flags that follow are its own."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .command_line import parse
from .completion import complete
from .examples import usage


@dataclass(frozen=True)
class Subcommand:
    """config: class of its settings; run: does the work, returns lines to print."""

    description: str
    config: type
    run: Callable[[Any], list[str]]


def run_subcommand(commands: Mapping[str, Subcommand], description: str) -> list[str]:
    """Run the command of ``commands`` that the command line says. Returns lines to print. ``--help`` and ``--dry_run``
    print and raise SystemExit(0); InputError for bad settings."""
    epilog = "COMMAND --help lists the flags of a command"
    parser = argparse.ArgumentParser(usage=usage(sys.argv[0], "COMMAND"), description=description, epilog=epilog)
    parser.add_argument("--help_all", action="help", help=argparse.SUPPRESS)  # which each command has
    parser.add_argument("command", choices=commands)
    if not sys.argv[1:2]:
        complete(parser)
    name = parser.parse_args(sys.argv[1:2]).command
    command = commands[name]
    return command.run(parse(command.config, sys.argv[2:], command.description, name))
