"""The whole job, small: render a captioned world, train a generator on it, sample, score, write a report."""

import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from diff_dalle.command_line import parse
from diff_dalle.config import option
from diff_dalle.distributed import run_script
from diff_dalle.errors import InputError
from diff_dalle.training.checkpoint import read_run


@dataclass(frozen=True)
class DemoConfig:
    """Demo"""

    demo_dir: str = option("runs/demo", "new folder for data, checkpoints and report; an unfinished demo is continued")
    quick: bool = option(False, "two minutes instead of twelve: the same path, with a model that has learnt little")


def run(script: str, *flags):
    """Show a command and run it as it is shown."""
    command = ["python", f"scripts/{script}", *map(str, flags)]
    print(f"\n$ {shlex.join(command)}", flush=True)
    result = subprocess.run([sys.executable, *command[1:]], cwd=Path(__file__).parent.parent)
    if result.returncode:
        raise InputError(f"the demo stopped, because this command failed: {shlex.join(command)}")


def main():
    config, started = parse(DemoConfig, description=__doc__), time.monotonic()
    home = Path(config.demo_dir).resolve()
    data, logs, report = home / "shapes", home / "generator", home / "report"
    size = ["--iterations", 500, "--lr_anneal_steps", 500] if config.quick else []
    run("prepare_data.py", "shapes", "--out_dir", data)
    run("prepare_data.py", "inspect", "--data_dir", data / "train", "--picture", home / "examples.png")
    run("train_generator.py", "--preset", "shapes_32", "--data_dir", data / "train", "--val_data_dir", data / "val",
        "--logdir", logs, *size)  # fmt: skip
    folder = read_run(str(logs))
    shutil.copy(folder.file(folder.checkpoints[-1], "ema_0.999"), home / "ema.pt")
    run(
        "sample.py",
        "--model_path",
        home / "ema.pt",
        "--logdir",
        home / "samples",
        "--prompts",
        "a large red circle in the top left|a small blue square to the right of a yellow triangle|two green crosses",
    )
    run("evaluate.py", "--model_path", home / "ema.pt", "--shapes_dir", data, "--report_dir", report, "--progress",
        logs / "progress.csv", "--prompts_per_task", 8 if config.quick else 100)  # fmt: skip
    print(f"\nDone in {(time.monotonic() - started) / 60:.1f} minutes. The report is {report / 'report.md'}")


if __name__ == "__main__":
    run_script(main)
