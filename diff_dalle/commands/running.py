"""Commands that run other commands: how these are told, and how they are run.

A command is told as words, ``SCRIPT.py`` and its flags.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from .examples import INSTALLED, PROGRAM, SCRIPTS, in_package

TORCHRUN = ("torchrun", "--standalone", "--nproc_per_node", "2")


def as_typed(words: Sequence[object], twofold: bool = False) -> str:
    """As the user would type it: as this command itself was called, in a checkout or of an installed package."""
    script, *flags = map(str, words)
    line = shlex.join([*(TORCHRUN if twofold else ("python",)), f"scripts/{script}", *flags])
    return in_package(line) if INSTALLED or sys.argv[0].startswith(PROGRAM) else line


def start(words: Sequence[object], twofold: bool = False, **how: Any) -> subprocess.Popen:
    """Start the command by this interpreter, from any folder. twofold: in two processes. how: as for Popen."""
    script, *flags = map(str, words)
    launcher = ["-m", "torch.distributed.run", *TORCHRUN[1:]] if twofold else []
    return subprocess.Popen([sys.executable, *launcher, str(SCRIPTS / script), *flags], **how)


def run_shown(words: Sequence[object], twofold: bool = False, **how: Any) -> None:
    """Print a command and run it. SystemExit with its status when it fails. Ctrl-C is the command's: it may save."""
    print(f"\n$ {as_typed(words, twofold)}", flush=True)
    process = start(words, twofold, **how)
    while (status := _waited(process)) is None:
        pass
    if status:
        raise SystemExit(status if status > 0 else 128 - status)


def _waited(process: subprocess.Popen) -> int | None:
    """The command's status; None when Ctrl-C was pressed, of which it is told too."""
    try:
        return process.wait()
    except KeyboardInterrupt:
        return None
