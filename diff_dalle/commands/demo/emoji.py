"""The demo's chapter on the emoji world: real pictures, of which a part is held out."""

from __future__ import annotations

import shutil
from pathlib import Path

from ...emoji.font import find_font
from .contract import Chapter, Demo, Job

PROMPTS = "woman astronaut dark skin tone|man astronaut light skin tone|cat with heart eyes|a red heart|flag: Norway"
# Name, script, preset, and iterations of the quick demo.
MODELS: tuple[tuple[str, str, str, int], ...] = (
    ("emoji_classifier", "train_classifier.py", "emoji_32_classifier", 20),
    ("emoji_generator", "train_generator.py", "emoji_32", 40),
)


def run(demo: Demo) -> Path:
    find_font()  # now, not after the other chapters
    home, data = demo.home, demo.home / "emoji"
    demo.run("prepare_data.py", "emoji", "--out_dir", data)
    demo.run("prepare_data.py", "inspect", "--data_dir", data / "train", "--grid", home / "emoji_examples.png")

    def training(name: str, script: str, preset: str, iterations: int) -> Job:
        flags: list[object] = ["--preset", preset, "--logdir", home / name]
        flags += ["--data_dir", data / "train", "--val_data_dir", data / "names"]
        flags += ["--iterations", iterations] if demo.quick else []
        return Job(script, flags, finish=lambda: shutil.copy(home / name / "best.pt", home / f"{name}.pt"))

    demo.run_jobs({model[0]: training(*model) for model in MODELS})

    generator, report = home / "emoji_generator.pt", home / "emoji_report"
    demo.run("sample.py", "--model_path", generator, "--logdir", home / "emoji_samples", "--prompts", PROMPTS)
    models = ["--model_path", generator, "--classifier_path", home / "emoji_classifier.pt"]
    scored = ["--emoji_dir", data, "--evaluators", "emoji,retrieval", "--report_dir", report]
    demo.run("evaluate.py", *models, *scored)
    return report / "report.md"


EMOJI = Chapter("emoji", run, "a generator and a noised CLIP of the emoji of a color font", (25, 2))
