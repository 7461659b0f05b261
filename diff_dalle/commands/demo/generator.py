"""The demo's chapter on Diff-DALLE: a generator, a noised CLIP and an upsampler."""

from __future__ import annotations

import shutil
from pathlib import Path

from .contract import Chapter, Demo, scoring_precision
from .networks import Network, trained_file, training_jobs

PROMPTS = "a large red circle in the top left|a small blue square to the right of a yellow triangle|two green crosses"
FIRST_STEPS = 360  # of the generator, beside the two other networks


def run(demo: Demo) -> Path:
    home, data = demo.home, demo.shapes
    report, progress = home / "report", home / "generator" / "progress.csv"
    demo.render_shapes()
    demo.run("prepare_data.py", "inspect", "--data_dir", data / "train", "--grid", home / "examples.png")

    folders = (data / "train", data / "val")
    networks = {
        "classifier": Network("train_classifier.py", "shapes_32_classifier", folders, 40),
        "upsampler": Network("train_generator.py", "shapes_64_upsampler", folders, 60, after=("classifier",)),
        "generator": Network("train_generator.py", "shapes_32", folders, 100, first=(folders[0], FIRST_STEPS)),
    }
    logdirs = {name: home / name for name in networks}
    demo.run_jobs(training_jobs(demo, networks, logdirs))
    for name, logdir in logdirs.items():
        shutil.copy(trained_file(logdir), home / f"{name}.pt")

    models = ["--model_path", home / "generator.pt", "--classifier_path", home / "classifier.pt"]
    models += ["--upsampler_paths", home / "upsampler.pt", "--upsampler_timestep_respacing", 4]
    demo.run("sample.py", *models, "--classifier_scale", "0,4", "--logdir", home / "samples", "--prompts", PROMPTS)
    per_task, per_setting, edits = (4, 4, 2) if demo.quick else (100, 48, 8)
    sampling = ["--sampler", "ancestral", "--timestep_respacing", 12, "--upsampler_batch_size", 32]
    counts = ["--prompts_per_task", per_task, "--guidance_prompts", per_setting, "--edits", edits]
    paths = ["--shapes_dir", data, "--progress", progress, "--report_dir", report]
    demo.run("evaluate.py", *models, *paths, *sampling, *counts, *scoring_precision(), twofold=True)
    return report / "report.md"


GENERATOR = Chapter("generator", run, "a generator, a noised CLIP and an upsampler", (10, 2))
