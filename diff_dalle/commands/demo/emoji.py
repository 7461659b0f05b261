"""The demo's chapter on the emoji world: real pictures, of which a part is held out."""

from __future__ import annotations

import shutil
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


# Of the card of the model.
CARD = {
    "title": "emoji",
    "license": "mit",
    "example_prompt": "cat with heart eyes",
    "description": "Draws emoji on white by their English CLDR names, such as 'woman astronaut dark skin tone' or "
    "'flag: Norway', in the style of the color font Noto Emoji (SIL Open Font License), from which its training "
    "pictures were rendered.",
    "limits": "Of what is held out from training, it draws combinations of person, activity and skin tone; things that "
    "it has never seen come out as patterns of color. It reads names, not sentences.",
}


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
        return Job(script, flags, after)

    demo.run_jobs({model[0]: training(*model) for model in MODELS})

    base: list[object] = ["--model_path", _trained(home / "emoji_generator")]
    base += ["--upsampler_paths", _trained(home / "emoji_upsampler")]
    sampling = ["--timestep_respacing", 20, "--upsampler_timestep_respacing", 4, "--guidance_scale", 1.5]
    demo.run("sample.py", *base, *sampling, "--logdir", home / "emoji_samples", "--prompts", PROMPTS)

    models, report = [*base, "--classifier_path", _trained(home / "emoji_classifier")], home / "emoji_report"
    scored = ["--emoji_dir", data, "--evaluators", "emoji,retrieval,upsampling", "--report_dir", report]
    demo.run("evaluate.py", *models, *sampling, *scored)

    folder = home / "emoji_model"
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier demo
    texts = [part for name, text in CARD.items() for part in (f"--{name}", text)]
    demo.run("share.py", "push", *models, "--to", folder, "--report_dir", report, *texts)
    return report / "report.md"


def _trained(logdir: Path) -> Path:
    """A run's best checkpoint, or its last EMA where it keeps no best one."""
    *_, last = [*sorted(logdir.glob("ema_*.pt")), *logdir.glob("best.pt")]
    return last


EMOJI = Chapter("emoji", run, "a generator, a noised CLIP and an upsampler of the emoji of a color font", (30, 3))
