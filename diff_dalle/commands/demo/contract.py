"""What a chapter of the demo is given, and how it runs commands.

To add a chapter: a file in this folder with a ``Chapter``, and a line in ``chapters.CHAPTERS``.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...errors import InputError


@dataclass(frozen=True)
class Demo:
    """home: folder for all files. quick: train for a fraction of the time. checkout: folder that holds scripts/."""

    home: Path
    quick: bool
    checkout: Path

    @property
    def shapes(self) -> Path:
        """The shapes world, of which all chapters train."""
        return self.home / "shapes"

    def render_shapes(self) -> None:
        """Write the shapes world, unless it is there."""
        self.run("prepare_data.py", "shapes", "--out_dir", self.shapes, "--image_size", 64)

    def run(self, script: str, *flags: object) -> None:
        """Print a command and run it. InputError when it fails."""
        command = ["python", f"scripts/{script}", *map(str, flags)]
        print(f"\n$ {shlex.join(command)}", flush=True)
        result = subprocess.run([sys.executable, *command[1:]], cwd=self.checkout)
        if result.returncode:
            raise InputError(f"the demo stopped, because this command failed: {shlex.join(command)}")


@dataclass(frozen=True)
class Chapter:
    """An entry of the table.

    run:     trains, samples and scores; returns the path of its report.
    trains:  what, for --help.
    minutes: on two CPU cores, and of the quick form.
    """

    name: str
    run: Callable[[Demo], Path]
    trains: str
    minutes: tuple[int, int]
