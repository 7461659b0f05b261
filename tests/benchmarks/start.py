"""How long a command takes until its user sees something: help, import, the first training step, the first image."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from diff_dalle.config import InputError
from diff_dalle.data.tar import write_tar
from diff_dalle.evaluation.report import markdown_table
from diff_dalle.worlds.shapes.shards import ShapesConfig, ShapesWorld

from .timing import temporary_folder, verdict

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
REPEATS = 3  # of each command, of which the fastest counts; the first one may read files from the disk
SAMPLES = 64
STEP = "step 1 of"  # what training prints after its first step
# Seconds at most, on two CPU cores.
TARGETS = {"import diff_dalle": 0.1, "--help": 0.6, "first step": 6.0, "first image": 4.0}


def start_table() -> str:
    """Seconds from the command to what its user waits for, in wall time, each the fastest of a few."""
    folder = temporary_folder()
    world = _write_world(folder)
    bare = _fastest(["-c", ""])
    helps = {path.name: _fastest([str(path), "--help"]) for path in sorted(SCRIPTS.glob("*.py")) if _has_help(path)}
    slowest = max(helps, key=lambda name: helps[name])
    step = ["train_generator.py", "--preset", "shapes_32", "--data_dir", world, "--iterations", "1"]
    image = ["sample.py", "--model_path", "shapes", "--prompts", "a red circle", "--logdir", str(folder / "image")]
    found = {
        "import diff_dalle": _fastest(["-c", "import diff_dalle"]) - bare,
        "--help": helps[slowest],
        "first step": min(_until(_script(*step, "--logdir", str(folder / f"run{i}")), STEP) for i in range(REPEATS)),
        "first image": _fastest(_script(*image)),
    }
    what = {
        "import diff_dalle": f"import diff_dalle, beside Python's own {bare:.2f} s",
        "--help": f"--help of the slowest of {len(helps)} scripts, {slowest}",
        "first step": "first training step of the preset shapes_32",
        "first image": "sample.py with the model shapes: a 64-pixel image is written",
    }
    rows = [
        [what[name], f"{seconds:.2f}", f"{TARGETS[name]:g}", verdict(seconds <= TARGETS[name])]
        for name, seconds in found.items()
    ]
    return markdown_table(["what", "seconds", "target at most", ""], rows)


def _write_world(folder: Path) -> str:
    config = ShapesConfig(image_size=32)
    write_tar(str(folder / "00000.tar"), (ShapesWorld(config).files("train", i) for i in range(SAMPLES)))
    return str(folder / "00000.tar")


def _has_help(script: Path) -> bool:
    """Whether a script is a command, and no module of another one."""
    return "run_script(" in script.read_text(encoding="utf-8")


def _script(name: str, *flags: str) -> list[str]:
    return [str(SCRIPTS / name), *flags]


def _fastest(command: Sequence[str]) -> float:
    return min(_until(command, "") for _ in range(REPEATS))


def _until(command: Sequence[str], text: str) -> float:
    """Seconds until a Python command prints a line with this text; "" = until it ends. InputError when it fails or
    never does."""
    # Without bytecode to keep, a third of the time would go into compiling, which users do once.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    start, shown = time.perf_counter(), []
    process = subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=env,
        text=True,
        encoding="utf-8",
    )
    assert process.stdout is not None
    seconds = None
    for line in process.stdout:
        shown.append(line)
        if text and text in line and seconds is None:
            seconds = time.perf_counter() - start
    if process.wait() or (text and seconds is None):
        raise InputError(f"{' '.join(command)} failed: {''.join(shown[-5:]).strip() or 'it printed nothing'}")
    return seconds or time.perf_counter() - start
