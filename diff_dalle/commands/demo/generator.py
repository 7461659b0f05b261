"""The demo's chapter on Diff-DALLE: a generator, a noised CLIP and an upsampler."""

from __future__ import annotations

import shutil
from pathlib import Path

from .contract import RENDER, Chapter, Demo, Network, run_training, scoring_precision

PROMPTS = "a large red circle in the top left|a small blue square to the right of a yellow triangle|two green crosses"
#: On patches of 4 pixels, which takes half of the time; the noise levels that guide most lose nothing.
CLASSIFIER = (
    "train_classifier.py --preset shapes_32_classifier --classifier_patch_size 4 --classifier_channel_mult 2,2 "
    "--classifier_attention_resolutions 8,4 --eval_interval 125"
)
MODELS = (
    "--model_path {home}/generator.pt --classifier_path {home}/classifier.pt --upsampler_paths {home}/upsampler.pt "
    "--upsampler_steps 4"
)


def run(demo: Demo) -> Path:
    demo.run(RENDER)
    demo.run("prepare_data.py inspect --data_dir {shapes}/train --grid {home}/examples.png")

    data = (demo.shapes / "train", demo.shapes / "val")
    networks = {
        "classifier": Network(CLASSIFIER, data, 40, 250),
        "upsampler": Network("train_generator.py --preset shapes_64_upsampler", data, 60, after=("classifier",)),
        "generator": Network("train_generator.py --preset shapes_32", data, 100),
    }
    for name, file in run_training(demo, networks).items():
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
