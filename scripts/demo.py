"""The full pipeline at small scale: render a captioned world, train a generator, a classifier and an upsampler, sample,
evaluate."""

import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from diff_dalle.commands.command_line import parse
from diff_dalle.config import option
from diff_dalle.distributed.launch import run_script
from diff_dalle.errors import InputError

PROMPTS = "a large red circle in the top left|a small blue square to the right of a yellow triangle|two green crosses"
# Name, script, preset, and iterations of the quick demo.
MODELS = (
    ("generator", "train_generator.py", "shapes_32", 250),
    ("classifier", "train_classifier.py", "shapes_32_classifier", 40),
    ("upsampler", "train_generator.py", "shapes_64_upsampler", 60),
)


@dataclass(frozen=True)
class DemoConfig:
    """Demo"""

    demo_dir: str = option("runs/demo", "folder for data, checkpoints and report; an unfinished demo is continued")
    quick: bool = option(False, "three minutes instead of twenty: the same steps with barely trained models")


def run(script: str, *flags):
    """Print a command and run it."""
    command = ["python", f"scripts/{script}", *map(str, flags)]
    print(f"\n$ {shlex.join(command)}", flush=True)
    result = subprocess.run([sys.executable, *command[1:]], cwd=Path(__file__).parent.parent)
    if result.returncode:
        raise InputError(f"the demo stopped, because this command failed: {shlex.join(command)}")


def main():
    config, started = parse(DemoConfig, description=__doc__), time.monotonic()
    home = Path(config.demo_dir).resolve()
    data, report, progress = home / "shapes", home / "report", home / "generator" / "progress.csv"
    run("prepare_data.py", "shapes", "--out_dir", data, "--image_size", 64)
    run("prepare_data.py", "inspect", "--data_dir", data / "train", "--grid", home / "examples.png")

    splits = ["--data_dir", data / "train", "--val_data_dir", data / "val"]
    for name, script, preset, iterations in MODELS:
        short = ["--iterations", iterations] if config.quick else []
        run(script, "--preset", preset, *splits, "--logdir", home / name, *short)
        shutil.copy(home / name / "best.pt", home / f"{name}.pt")

    models = ["--model_path", home / "generator.pt", "--classifier_path", home / "classifier.pt"]
    models += ["--upsampler_paths", home / "upsampler.pt", "--upsampler_timestep_respacing", 10]
    run("sample.py", *models, "--classifier_scale", "0,4", "--logdir", home / "samples", "--prompts", PROMPTS)
    per_task, per_setting, edits = (4, 4, 2) if config.quick else (100, 64, 8)
    sampling = ["--sampler", "ancestral", "--timestep_respacing", 20, "--upsampler_batch_size", 32]
    counts = ["--prompts_per_task", per_task, "--guidance_prompts", per_setting, "--edits", edits]
    paths = ["--shapes_dir", data, "--progress", progress, "--report_dir", report]
    run("evaluate.py", *models, *paths, *sampling, *counts)
    print(f"\nDone in {(time.monotonic() - started) / 60:.1f} minutes. The report is {report / 'report.md'}")


if __name__ == "__main__":
    run_script(main)
