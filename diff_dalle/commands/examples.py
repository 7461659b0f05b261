"""Examples of every command: what ``--help`` begins with and ``scripts/README.md`` lists."""

from __future__ import annotations

import re
from pathlib import Path

FILE = Path(__file__).with_name("examples.txt")  # one command a line
SHOWN = 2  # by ``--help``


def examples_of(script: str, subcommand: str = "") -> list[str]:
    """The examples of a script, of one of its subcommands if that is given; none for a name without any.

    script: its file name, with or without its ending.
    """
    start = f"scripts/{Path(script).stem}." + (f"py {subcommand} " if subcommand else "")
    return [line for line in FILE.read_text(encoding="utf-8").splitlines() if start in line]


def usage(script: str, subcommand: str = "") -> str:
    """The usage of a script, followed by its first examples, for ``argparse``.

    subcommand: COMMAND if any of them may follow.
    """
    words = Path(script).name, subcommand, "[flags]"
    lines = [" ".join(word for word in words if word)]  # a list of all flags would fill a screen
    if found := examples_of(script, subcommand.replace("COMMAND", ""))[:SHOWN]:
        lines += ["", "examples:", *(f"  {line}" for line in found)]
    return "\n".join(lines).replace("%", "%%")


def scripts_in_order() -> list[str]:
    """The names of the scripts that have examples, in the order of these: from data to training to samples."""
    found = re.findall(r"scripts/(\w+)\.", FILE.read_text(encoding="utf-8"))
    return list(dict.fromkeys(found))
