"""What a chapter of the demo is given, and how it runs commands.

To add a chapter: a file in this folder with a ``Chapter``, and a line in ``chapters.CHAPTERS``.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
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
        command = _command(script, flags)
        print(f"\n$ {shlex.join(command)}", flush=True)
        if subprocess.run([sys.executable, *command[1:]], cwd=self.checkout).returncode:
            raise _failed(command)

    def run_beside(self, first: Sequence[object], second: Sequence[object], log: Path) -> None:
        """Run two commands, each a script and its flags, at the same time, on half of the cores each: small networks do
        not use many cores well. The second one's output goes to the file ``log``. InputError when one fails, which ends
        the other."""
        commands = [_command(str(each[0]), each[1:]) for each in (first, second)]
        print(f"\n$ {shlex.join(commands[0])}\n$ {shlex.join(commands[1])}  # beside it; see {log}", flush=True)
        log.parent.mkdir(parents=True, exist_ok=True)
        threads = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // 2))}
        with log.open("w") as file:
            running = [
                subprocess.Popen(
                    [sys.executable, *command[1:]],
                    cwd=self.checkout,
                    env={**os.environ, **threads},
                    stdout=out,
                    stderr=out,
                )
                for command, out in zip(commands, (None, file), strict=True)
            ]
            try:
                while None in (codes := [process.poll() for process in running]) and not any(codes):
                    time.sleep(0.2)
            finally:
                for process in running:
                    process.terminate()
                    process.wait()
        for command, code in zip(commands, codes, strict=True):
            if code:
                raise _failed(command)


def _command(script: str, flags: Sequence[object]) -> list[str]:
    return ["python", f"scripts/{script}", *map(str, flags)]


def _failed(command: list[str]) -> InputError:
    return InputError(f"the demo stopped, because this command failed: {shlex.join(command)}")


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
