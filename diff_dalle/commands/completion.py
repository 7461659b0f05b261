"""Shell completion of ``python -m diff_dalle``, by the package argcomplete where that is installed.

The shell runs the command with the line so far in ``COMP_LINE`` and in ``_ARGCOMPLETE`` the number of words before the
arguments; the names of commands and subcommands are added to these.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Iterable, Sequence
from typing import Any

VARIABLE = "_ARGCOMPLETE"


def is_asked() -> bool:
    """Whether the shell asks for completions."""
    return VARIABLE in os.environ and importlib.util.find_spec("argcomplete") is not None


def typed_words() -> list[str]:
    """The arguments so far, without the one that is being typed."""
    from argcomplete.lexers import split_line

    *_, words, _ = split_line(os.environ["COMP_LINE"], int(os.environ["COMP_POINT"]))
    return words[int(os.environ[VARIABLE]) :]


def take_word() -> None:
    """Leave the first argument to what came before: it is a command or a subcommand."""
    os.environ[VARIABLE] = str(int(os.environ[VARIABLE]) + 1)


def offer(names: Iterable[str]) -> None:
    """Complete the name of a command, and exit."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("command", choices=list(names))
    complete(parser)


def complete(parser: argparse.ArgumentParser, subcommand: str = "") -> None:
    """Complete flags and values, and exit, if the shell asks for it. subcommand: whose arguments the parser reads."""
    if is_asked():
        import argcomplete

        if subcommand:
            take_word()
        argcomplete.autocomplete(parser)


def suggest(action: argparse.Action, values: Sequence[str]) -> None:
    """Values to complete a flag with; files without any."""
    if values:
        given: Any = action
        given.completer = lambda **_: values  # argcomplete's name for it
