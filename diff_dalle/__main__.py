"""``diff-dalle``, or ``python -m diff_dalle``, lists the commands; ``diff-dalle NAME FLAGS`` runs one, as
``python scripts/NAME.py FLAGS`` does in a checkout.

PYTHON_ARGCOMPLETE_OK: the mark by which argcomplete knows that this completes flags."""

from __future__ import annotations

import importlib
import re
import sys

from .commands import completion
from .commands.examples import PROGRAM, SCRIPTS, description_of, scripts_in_order
from .config import InputError, nearest
from .distributed.launch import run_script


def listing() -> str:
    """The commands, each with the first clause of its script's docstring."""
    names = _names()
    width = max(map(len, names))
    lines = [f"  {name:{width}}  {_clause(description_of(name))}" for name in names]
    head = f"usage: {PROGRAM} COMMAND [flags]     (COMMAND --help lists its flags)"
    return "\n".join([head, "", "commands:", *lines])


def _names() -> list[str]:
    """The commands that there are: a wheel has not those of the tests."""
    return [name for name in scripts_in_order() if (SCRIPTS / f"{name}.py").is_file()]


def _clause(text: str) -> str:
    return re.split(r"[.:;](?: |$)", " ".join(text.split()))[0].replace("``", "")


def list_or_run() -> None:
    """Raises InputError for a command that does not exist."""
    words = sys.argv[1:]
    if completion.is_asked():
        words = completion.typed_words()
        if not words:
            completion.offer(_names())
        completion.take_word()
    name, flags = (*words, "")[0], words[1:]
    if name in ("", "-h", "--help"):
        print(listing())
        return
    if name not in _names():
        hint = nearest(name, _names())
        raise InputError(f"{name!r} is no command{hint} ({PROGRAM} lists all commands)")
    sys.argv = [f"{PROGRAM} {name}", *flags]  # by which its help calls it
    sys.path.insert(0, str(SCRIPTS))  # as for a script that is run by itself
    importlib.import_module(name).main()


def main() -> None:
    """The console command."""
    run_script(list_or_run)


if __name__ == "__main__":
    main()
