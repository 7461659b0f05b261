"""The demo's chapter on Diff-DALLE: a generator, a noised CLIP and an upsampler."""

from __future__ import annotations

import shutil
from pathlib import Path

from .contract import RENDER, Chapter, Demo, scoring_precision
from .networks import Network, run_training

PROMPTS = "a large red circle in the top left|a small blue square to the right of a yellow triangle|two green crosses"
FIRST_STEPS = 360  # of the generator, beside the two other networks
MODELS = (
    "--model_path {home}/generator.pt --classifier_path {home}/classifier.pt --upsampler_paths {home}/upsampler.pt "
    "--upsampler_steps 4"
)


def run(demo: Demo) -> Path:
    demo.run(RENDER)
    demo.run("prepare_data.py inspect --data_dir {shapes}/train --grid {home}/examples.png")

    data = (demo.shapes / "train", demo.shapes / "val")
    networks = {
        "classifier": Network("train_classifier.py --preset shapes_32_classifier", data, 40),
        "upsampler": Network("train_generator.py --preset shapes_64_upsampler", data, 60, after=("classifier",)),
        "generator": Network("train_generator.py --preset shapes_32", data, 100, first=(data[0], FIRST_STEPS)),
    }
    logdirs = {name: demo.home / name for name in networks}
    for name, file in run_training(demo, networks, logdirs).items():
        shutil.copy(file, demo.home / f"{name}.pt")

    sampled = f"{MODELS} --steps 30 --classifier_scale 0,4 --logdir {{home}}/samples --prompts {{prompts}}"
    demo.run(f"sample.py {sampled}", prompts=PROMPTS)
    per_task, per_setting, edits = (4, 4, 2) if demo.quick else (100, 48, 8)
    counts = f"--prompts_per_task {per_task} --guidance_prompts {per_setting} --edits {edits}"
    sampling = "--sampler ancestral --steps 12 --classifier_form score --upsampler_batch_size 32"
    paths = "--shapes_dir {shapes} --progress {home}/generator/progress.csv --report_dir {home}/report"
    demo.run(f"evaluate.py {MODELS} {paths} {sampling} {counts}{scoring_precision()}", twofold=True)
    return demo.home / "report" / "report.md"


GENERATOR = Chapter("generator", run, "a generator, a noised CLIP and an upsampler", (10, 2))
