"""``train.py``: from a folder of pictures to a trained model and its samples, by the commands that do each part."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .. import storage
from ..config import Fault, InputError, named, option, quantity, settings
from ..config.bounds import MAX_SIDE
from ..data.accounting import REPORT
from ..data.inspection import caption_texts
from ..data.sources import TARS
from ..images.files import EXTENSIONS
from ..recipes.generator import GeneratorRun
from ..training.settings import TrainingConfig
from .command_line import HELPS, parse
from .running import as_typed, run_shown
from .sources import preset_text
from .training_kinds import parse_lora

SHOWN = 8  # captions of which a picture is sampled at the end
#: The number of pictures below which a preset suits, the preset without a GPU, and with one.
PRESETS = ((2_000, "pictures_300", "pictures_300"), (10**9, "pictures_5000", "generator_64_small"))
MANY = 30_000  # pictures above which a CPU sees too few of them
LORA = "pictures_lora"
FOLDER = "FOLDER"  # what comes before the flags


@settings
class OwnPictures:
    """Own pictures"""

    model_path: str = option(
        "", "train a LoRA of this generator, such as the bundled emoji, on the pictures; none = train from scratch"
    )
    shards_dir: str = option(
        "", "new folder for the shards that the pictures are packed into; none = one in ./data for the folder's state"
    )
    resize: int = option(
        512,
        "shorter side in pixels to which larger pictures are resized in the shards, since decoding a camera's "
        "photograph takes longer than a training step; 0 = not resized",
        least=0,
        most=MAX_SIDE,
    )
    name_captions: bool = option(
        True, "caption a picture without a caption with the words of its file name, or else of its folder"
    )
    plan: bool = option(False, "print what would be done and exit")


@dataclass(frozen=True)
class Plan:
    """Commands, as words.

    shards: folder of the pictures' shards. pack: what packs them; None = they are there.
    train:  with flags. sample: what samples from the result, without prompts.
    caption_field: of the shards. notes: what to expect.
    """

    shards: str
    caption_field: str
    pack: list[str] | None
    train: list[str]
    sample: list[str]
    notes: list[str]


def read_command_line(words: Sequence[str], description: str) -> tuple[str, OwnPictures, list[str]]:
    """``FOLDER [flags]`` as the folder, the settings of this command, and the flags for training. InputError without
    exactly one folder."""
    if not {*HELPS}.isdisjoint(words):
        parse(OwnPictures, ["--help"], description, FOLDER)
    names = {f"--{name}" for name in (*OwnPictures.__dataclass_fields__, "dry_run")}
    folders: list[str] = []
    own: list[str] = []
    others: list[str] = []
    flag = None
    for word in words:
        if word.startswith("--"):
            flag = own if word.partition("=")[0] in names else others
            flag.append(word)
            flag = flag if "=" not in word else None
        else:
            (folders if flag is None else flag).append(word)
            flag = None
    if len(folders) != 1:
        found = f", but these are {', '.join(folders)}" if folders else ""
        raise InputError(f"give one folder of pictures, before the flags{found}: diff-dalle train path/to/folder")
    return folders[0], parse(OwnPictures, own, description, FOLDER), others


def make_plan(folder: str, own: OwnPictures, flags: Sequence[str]) -> Plan:
    """What is to be done with a folder of pictures or shards. flags: for training, in place of what is chosen here.

    Nothing is written. InputError for a folder without pictures, and for flags that training does not take.
    """
    if not os.path.isdir(folder):
        raise InputError(f"{folder} is not a folder: give one of pictures, or of shards")
    name = re.sub(r"[^\w-]+", "_", os.path.basename(os.path.realpath(folder))) or "pictures"
    files = sorted(os.path.join(place, each) for place, _, names in os.walk(folder) for each in names)
    pictures = sum(each.lower().endswith(EXTENSIONS) for each in files)
    shards, pack = folder, None
    if pictures:
        shards = own.shards_dir or os.path.join("data", f"{name}-{_state(files, own)}")
        if not storage.exists(storage.join(shards, REPORT)):
            words = ["prepare_data.py", "folder", "--source", folder, "--out_dir", shards]
            pack = [*words, "--resize", str(own.resize), "--name_captions", str(own.name_captions)]
    elif not any(each.lower().endswith(TARS) for each in files):
        raise InputError(f"{folder} holds no pictures ({', '.join(EXTENSIONS)}) and no shards ({', '.join(TARS)})")
    given = {word.partition("=")[0] for word in flags}
    preset = LORA if own.model_path else _preset(pictures)
    chosen = {"--preset": preset, "--logdir": os.path.join("runs", name + "_lora" * bool(own.model_path))}
    fixed = ["--model_path", own.model_path] if own.model_path else []
    added = [text for flag, value in chosen.items() if flag not in given for text in (flag, value)]
    words = [*fixed, *added, "--data_dir", shards, *flags]
    run = parse_lora(words) if own.model_path else parse(GeneratorRun, words)
    if pictures and 0 < own.resize < run.image_size:
        raise InputError(Fault("resize", f"must be at least {named('image_size')} ({run.image_size})", own.resize))
    logdir = run.training.logdir
    train = ["train_lora.py" if own.model_path else "train_generator.py", *words]
    sample = ["sample.py", *([*fixed, "--lora", logdir] if own.model_path else ["--model_path", logdir])]
    notes = [] if "--preset" in given else _expectations(preset, pictures, run.training)
    return Plan(shards, run.data.caption_field, pack, train, sample, notes)


def _state(files: Sequence[str], own: OwnPictures) -> str:
    """What changes when a file of a folder does, or how it is packed."""
    states = [os.stat(path, follow_symlinks=False) for path in files]
    found = [(path, each.st_size, each.st_mtime_ns) for path, each in zip(files, states, strict=True)]
    return hashlib.sha256(repr([*found, own.resize, own.name_captions]).encode()).hexdigest()[:8]


def _preset(pictures: int) -> str:
    has_gpu = torch.cuda.is_available()
    return next(with_gpu if has_gpu else without for below, without, with_gpu in PRESETS if pictures < below)


def _expectations(preset: str, pictures: int, training: TrainingConfig) -> list[str]:
    """Notes of a preset that was chosen here."""
    lines = []
    if pictures and training.iterations:
        seen = training.iterations * training.batch_size / pictures
        steps = f"{training.iterations:,} steps of {training.batch_size} pictures"
        lines.append(f"{quantity(pictures, 'picture')}: {steps}, each about {seen:,.{0 if seen > 10 else 1}f} times")
    if said := re.search(r"^# Expect: (.*(?:\n#   .*)*)", preset_text(preset), re.MULTILINE):
        lines.append(re.sub(r"\n#\s+", " ", said[1]))
    if pictures > MANY and not torch.cuda.is_available():
        lines.append("Without a GPU, each is shown only a few times: enough for a few subjects in many pictures.")
    return [*lines, "The time that remains is printed after the second step."]


def train_on(folder: str, own: OwnPictures, flags: Sequence[str]) -> None:
    """Pack, train and sample, each by a command that is printed. SystemExit with the status of one that fails.

    Training resumes when it is called again. InputError as ``make_plan``.
    """
    plan = make_plan(folder, own, flags)
    for note in plan.notes:
        print(note)
    if own.plan:
        for words in filter(None, (plan.pack, plan.train, plan.sample)):
            print(f"$ {as_typed(words)}")
        return
    if plan.pack:
        if not own.shards_dir:
            storage.remove_folder(plan.shards)  # which was left unfinished
        run_shown(plan.pack)
    run_shown(plan.train)
    captions = caption_texts([plan.shards], plan.caption_field)
    prompts = _spread(list(dict.fromkeys(text for text in captions if "|" not in text)))
    logdir = plan.sample[-1]
    run_shown([*plan.sample, "--prompts", "|".join(prompts), "--logdir", os.path.join(logdir, "pictures")])
    more = [*plan.sample, "--prompts", "".join(prompts[:1]), "--num_samples", "16"]
    print(f"\nMore pictures:\n$ {as_typed(more)}")


def _spread(texts: list[str]) -> list[str]:
    """Some of them, from the first to the last."""
    count = min(SHOWN, len(texts))
    return [texts[i * len(texts) // count] for i in range(count)]
