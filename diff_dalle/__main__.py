"""``python -m diff_dalle`` lists the commands; ``python -m diff_dalle NAME FLAGS`` runs ``scripts/NAME.py FLAGS``.

PYTHON_ARGCOMPLETE_OK: the mark by which argcomplete knows that this completes flags."""

from __future__ import annotations

import ast
import os
import re
import runpy
import sys
from pathlib import Path

from .commands import completion
from .commands.examples import scripts_in_order
from .config import InputError, nearest
from .distributed.launch import run_script

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


def listing() -> str:
    """The commands, each with the first clause of its script's docstring."""
    names = scripts_in_order()
    width = max(map(len, names))
    lines = [f"  {name:{width}}  {_clause(SCRIPTS / f'{name}.py')}" for name in names]
    head = "usage: python -m diff_dalle COMMAND [flags]     (COMMAND --help lists its flags)"
    return "\n".join([head, "", "commands:", *lines])


def _clause(script: Path) -> str:
    text = " ".join((ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or "").split())
    return re.split(r"[.:;](?: |$)", text)[0].replace("``", "")


def list_or_run() -> None:
    """Raises InputError for a command that does not exist, and where the package was installed without its scripts."""
    if not SCRIPTS.is_dir():
        raise InputError(
            f"the commands are scripts of a checkout, but {SCRIPTS} does not exist: clone the repository and install "
            "it with pip install -e"
        )
    words = sys.argv[1:]
    if completion.is_asked():
        words = completion.typed_words()
        if not words:
            completion.offer(scripts_in_order())
        completion.take_word()
    name, flags = (*words, "")[0], words[1:]
    if name in ("", "-h", "--help"):
        print(listing())
        return
    if name not in scripts_in_order():
        hint = nearest(name, scripts_in_order())
        raise InputError(f"{name!r} is no command{hint} (python -m diff_dalle lists all commands)")
    path = str(SCRIPTS / f"{name}.py")
    sys.argv = [path, *flags]
    sys.path.insert(0, os.path.dirname(path))  # as for a script that is run by itself
    runpy.run_path(path, run_name="__main__")


if __name__ == "__main__":
    run_script(list_or_run)
