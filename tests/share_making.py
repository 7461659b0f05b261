"""``share.py`` as a function, and what it refuses."""

from __future__ import annotations

import shlex

import pytest

from diff_dalle.commands.command_line import parse
from diff_dalle.commands.share import COMMANDS
from diff_dalle.config import InputError


def share(command: str, *flags: str) -> str:
    """The line that it prints."""
    (line,) = COMMANDS[command].run(parse(COMMANDS[command].config, shlex.split(" ".join(flags))))
    return line


def refused(command: str, *flags: str) -> str:
    """The sentence that refuses it."""
    with pytest.raises(InputError) as error:
        share(command, *flags)
    assert "\n" not in str(error.value)
    return str(error.value)
