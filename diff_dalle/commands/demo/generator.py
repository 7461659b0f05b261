"""The demo's chapter on Diff-DALLE: a generator, a noised CLIP and an upsampler."""

from __future__ import annotations

import shutil
from pathlib import Path

from .contract import Chapter, Demo, Job

PROMPTS = "a large red circle in the top left|a small blue square to the right of a yellow triangle|two green crosses"
# Name, script, preset, iterations of the quick demo, and what it waits for: the generator trains beside the two others.
MODELS: tuple[tuple[str, str, str, int, tuple[str, ...]], ...] = (
    ("classifier", "train_classifier.py", "shapes_32_classifier", 40, ()),
    ("upsampler", "train_generator.py", "shapes_64_upsampler", 60, ("classifier",)),
    ("generator", "train_generator.py", "shapes_32", 100, ()),
)


def run(demo: Demo) -> Path:
    from ...models.precision import has_fast_bf16

    home, data = demo.home, demo.shapes
    report, progress = home / "report", home / "generator" / "progress.csv"
    demo.render_shapes()
    demo.run("prepare_data.py", "inspect", "--data_dir", data / "train", "--grid", home / "examples.png")

    def training(name: str, script: str, preset: str, iterations: int, after: tuple[str, ...]) -> Job:
        flags: list[object] = ["--preset", preset, "--logdir", home / name]
        flags += ["--data_dir", data / "train", "--val_data_dir", data / "val"]
        flags += ["--iterations", iterations] if demo.quick else []
        return Job(script, flags, after, lambda: shutil.copy(home / name / "best.pt", home / f"{name}.pt"))

    demo.run_jobs({model[0]: training(*model) for model in MODELS})

    models = ["--model_path", home / "generator.pt", "--classifier_path", home / "classifier.pt"]
    models += ["--upsampler_paths", home / "upsampler.pt", "--upsampler_timestep_respacing", 4]
    demo.run("sample.py", *models, "--classifier_scale", "0,4", "--logdir", home / "samples", "--prompts", PROMPTS)
    per_task, per_setting, edits = (4, 4, 2) if demo.quick else (100, 64, 8)
    sampling = ["--sampler", "ancestral", "--timestep_respacing", 20, "--upsampler_batch_size", 32]
    counts = ["--prompts_per_task", per_task, "--guidance_prompts", per_setting, "--edits", edits]
    paths = ["--shapes_dir", data, "--progress", progress, "--report_dir", report]
    precision = ["--precision", "bf16" if has_fast_bf16() else "fp32"]  # in 0.75 of the time, with the same scores
    demo.run("evaluate.py", *models, *paths, *sampling, *counts, *precision)
    return report / "report.md"


GENERATOR = Chapter("generator", run, "a generator, a noised CLIP and an upsampler", (10, 2))
