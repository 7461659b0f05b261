"""The whole job, small: render a captioned world, train a generator and a classifier, sample, score, report."""

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

PROMPTS = "a large red circle in the top left|a small blue square to the right of a yellow triangle|two green crosses"


@dataclass(frozen=True)
class DemoConfig:
    """Demo"""

    demo_dir: str = option("runs/demo", "new folder for data, checkpoints and report; an unfinished demo is continued")
    quick: bool = option(False, "two minutes instead of sixteen: the same path, with models that have learnt little")


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
    data, report = home / "shapes", home / "report"
    splits = ["--data_dir", data / "train", "--val_data_dir", data / "val"]
    run("prepare_data.py", "shapes", "--out_dir", data)
    run("prepare_data.py", "inspect", "--data_dir", data / "train", "--picture", home / "examples.png")

    generator, classifier = home / "generator", home / "classifier"
    size = ["--iterations", 250] if config.quick else []
    run("train_generator.py", "--preset", "shapes_32", *splits, "--logdir", generator, *size)
    folder = read_run(str(generator))
    shutil.copy(folder.file(folder.checkpoints[-1], "ema_0.999"), home / "ema.pt")
    size = ["--iterations", 40] if config.quick else []
    run("train_classifier.py", "--preset", "shapes_32_classifier", *splits, "--logdir", classifier, *size)
    shutil.copy(classifier / "best.pt", home / "classifier.pt")

    models = ["--model_path", home / "ema.pt", "--classifier_path", home / "classifier.pt"]
    run("sample.py", *models, "--classifier_scale", "0,4", "--logdir", home / "samples", "--prompts",
        PROMPTS)  # fmt: skip
    counts = [4, 4] if config.quick else [100, 64]
    run("evaluate.py", *models, "--shapes_dir", data, "--report_dir", report, "--progress", generator / "progress.csv",
        "--sampler", "ancestral", "--timestep_respacing", 20, "--prompts_per_task", counts[0], "--guidance_prompts",
        counts[1])  # fmt: skip
    print(f"\nDone in {(time.monotonic() - started) / 60:.1f} minutes. The report is {report / 'report.md'}")


if __name__ == "__main__":
    run_script(main)
