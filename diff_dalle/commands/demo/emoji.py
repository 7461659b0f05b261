"""The demo's chapter on the emoji world: real pictures, of which a part is held out."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from ...emoji.font import find_font
from .contract import Chapter, Demo, Job

PROMPTS = "woman astronaut dark skin tone|man astronaut light skin tone|cat with heart eyes|red heart|flag: Norway"
MERGES = 1024  # of the names' vocabulary, most of whose words are its tokens
# Name, script, preset, iterations of the quick demo, and what it waits for: the generator trains beside the two others.
MODELS: tuple[tuple[str, str, str, int, tuple[str, ...]], ...] = (
    ("emoji_classifier", "train_classifier.py", "emoji_32_classifier", 20, ()),
    ("emoji_upsampler", "train_generator.py", "emoji_64_upsampler", 40, ("emoji_classifier",)),
    ("emoji_generator", "train_generator.py", "emoji_32", 40, ()),
)


def run(demo: Demo) -> Path:
    find_font()  # now, not after the other chapters
    home, data, vocabulary = demo.home, demo.home / "emoji", demo.home / "emoji_vocabulary.txt"
    demo.run("prepare_data.py", "emoji", "--out_dir", data, "--image_size", 64)
    demo.run("prepare_data.py", "inspect", "--data_dir", data / "train", "--grid", home / "emoji_examples.png")
    demo.run("train_tokenizer.py", "--data_dir", data / "train", "--num_merges", MERGES, "--out", vocabulary)

    def training(name: str, script: str, preset: str, iterations: int, after: tuple[str, ...]) -> Job:
        flags: list[object] = ["--preset", preset, "--logdir", home / name, "--bpe_path", vocabulary]
        flags += ["--data_dir", data / "train", "--val_data_dir", data / "names"]
        flags += ["--iterations", iterations] if demo.quick else []
        return Job(script, flags, after, _keep(home / name, home / f"{name}.pt"))

    demo.run_jobs({model[0]: training(*model) for model in MODELS})

    models = ["--model_path", home / "emoji_generator.pt", "--upsampler_paths", home / "emoji_upsampler.pt"]
    models += ["--timestep_respacing", 20, "--upsampler_timestep_respacing", 4, "--guidance_scale", 1.5]
    demo.run("sample.py", *models, "--logdir", home / "emoji_samples", "--prompts", PROMPTS)
    report = home / "emoji_report"
    scored = ["--emoji_dir", data, "--evaluators", "emoji,retrieval,upsampling", "--report_dir", report]
    demo.run("evaluate.py", *models, "--classifier_path", home / "emoji_classifier.pt", *scored)
    return report / "report.md"


def _keep(logdir: Path, path: Path) -> Callable[[], object]:
    """Copies a run's best checkpoint, or its last EMA."""

    def copy() -> None:
        *_, last = [*sorted(logdir.glob("ema_*.pt")), *logdir.glob("best.pt")]
        shutil.copy(last, path)

    return copy


EMOJI = Chapter("emoji", run, "a generator, a noised CLIP and an upsampler of the emoji of a color font", (26, 2))
