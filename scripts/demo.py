"""The whole job, small: render a captioned world, train generator, classifier and up-sampler, sample, score, report."""

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


@dataclass(frozen=True)
class DemoConfig:
    """Demo"""

    demo_dir: str = option("runs/demo", "new folder for data, checkpoints and report; an unfinished demo is continued")
    quick: bool = option(False, "three minutes instead of twenty: the same path, with models that have learnt little")


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
    run("prepare_data.py", "shapes", "--out_dir", data, "--image_size", 64)
    run("prepare_data.py", "inspect", "--data_dir", data / "train", "--picture", home / "examples.png")

    for name, script, preset, steps in (
        ("generator", "train_generator.py", "shapes_32", 250),
        ("classifier", "train_classifier.py", "shapes_32_classifier", 40),
        ("upsampler", "train_generator.py", "shapes_64_upsampler", 60),
    ):
        few = ["--iterations", steps] if config.quick else []
        run(script, "--preset", preset, *splits, "--logdir", home / name, *few)
        shutil.copy(home / name / "best.pt", home / f"{name}.pt")

    cascade = ["--model_path", home / "generator.pt", "--classifier_path", home / "classifier.pt", "--upsampler_paths",
               home / "upsampler.pt", "--upsampler_timestep_respacing", 10]  # fmt: skip
    run("sample.py", *cascade, "--classifier_scale", "0,4", "--logdir", home / "samples", "--prompts", PROMPTS)
    counts = [4, 4, 2] if config.quick else [100, 64, 8]
    run("evaluate.py", *cascade, "--shapes_dir", data, "--report_dir", report, "--progress",
        home / "generator" / "progress.csv", "--sampler", "ancestral", "--timestep_respacing", 20,
        "--prompts_per_task", counts[0], "--guidance_prompts", counts[1], "--edits", counts[2],
        "--upsampler_batch_size", 32)  # fmt: skip
    print(f"\nDone in {(time.monotonic() - started) / 60:.1f} minutes. The report is {report / 'report.md'}")


if __name__ == "__main__":
    run_script(main)
