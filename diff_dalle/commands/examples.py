"""Examples of every command: what ``--help`` begins with and ``scripts/README.md`` lists."""

from __future__ import annotations

import re
from pathlib import Path

PROGRAM = "diff-dalle"  # the console command
_PACKAGE = Path(__file__).resolve().parent.parent
INSTALLED = (_PACKAGE / "scripts").is_dir()  # from a wheel, which brings the scripts; else they are a checkout's
SCRIPTS = (_PACKAGE if INSTALLED else _PACKAGE.parent) / "scripts"
FILE = Path(__file__).with_name("examples.txt")  # one command a line
SHOWN = 2  # by ``--help``


def examples_of(script: str, subcommand: str = "") -> list[str]:
    """The examples of a script, of one of its subcommands if that is given; none for a name without any.

    script: its file name, with or without its ending, or that of the console command and its own name.
    """
    start = f"scripts/{Path(script).stem.removeprefix(PROGRAM).strip()}." + (f"py {subcommand} " if subcommand else "")
    return [line for line in FILE.read_text(encoding="utf-8").splitlines() if start in line]


def usage(script: str, subcommand: str = "") -> str:
    """The usage of a script, followed by its first examples, for ``argparse``.

    subcommand: or what may follow in its place, in capitals.
    """
    words = Path(script).name, subcommand, "[flags]"
    lines = [" ".join(word for word in words if word)]  # a list of all flags would fill a screen
    if found := examples_of(script, "" if subcommand.isupper() else subcommand)[:SHOWN]:
        as_called = in_package if script.startswith(PROGRAM) else str
        lines += ["", "examples:", *(f"  {as_called(line)}" for line in found)]
    return "\n".join(lines).replace("%", "%%")


def in_package(line: str) -> str:
    """A command line of a checkout as one that an installed package takes from any folder."""
    line = re.sub(r"torchrun (.*?)scripts/(\w+)\.py", r"torchrun \1-m diff_dalle \2", line)
    return re.sub(r"(?:python|bash) scripts/(\w+)\.(?:py|sh)", rf"{PROGRAM} \1", line)


def scripts_in_order() -> list[str]:
    """The names of the scripts that have examples, in the order of these: from data to training to samples."""
    found = re.findall(r"scripts/(\w+)\.", FILE.read_text(encoding="utf-8"))
    return list(dict.fromkeys(found))
