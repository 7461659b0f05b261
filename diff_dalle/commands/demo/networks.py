"""Networks of the demo that are trained side by side, and the bundled models, made of such networks."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .contract import Demo, Job

#: The flag of sample.py, evaluate.py and share.py that takes each network of a model.
FLAGS = {"generator": "--model_path", "upsampler": "--upsampler_paths", "classifier": "--classifier_path"}
JUDGE = "judge"  # a network that only scores


@dataclass(frozen=True)
class Network:
    """How one of them is trained.

    command: with a preset and flags of its own.
    data:    folders with its shards for training, with commas between them, and for held-out loss.
    quick:   iterations of the quick demo; iterations: otherwise, None = the preset's.
    after:   the networks that are trained before it.
    first:   a folder with shards to begin on, and for how many steps; it goes on when all others have been trained.
    """

    command: str
    data: tuple[Path | str, Path]
    quick: int
    iterations: int | None = None
    after: tuple[str, ...] = ()
    first: tuple[Path, int] | None = None


def training_jobs(
    demo: Demo, networks: Mapping[str, Network], folders: Mapping[str, Path], common: tuple[object, ...] = ()
) -> dict[str, Job]:
    """The jobs that train networks, by name. folders: their log directories; common: flags of all."""
    jobs: dict[str, Job] = {}
    for name, how in networks.items():
        iterations, after, (data, held_out) = how.quick if demo.quick else how.iterations, how.after, how.data
        words = [*demo.words(how.command), "--logdir", folders[name], *common, "--val_data_dir", held_out]
        if how.first:
            first, steps = how.first
            begin = ["--data_dir", first, "--iterations", how.quick // 2 if demo.quick else steps]
            jobs[f"{name}_first"] = Job([*words, *begin], after, shown=True)
            after = (f"{name}_first", *(other for other in networks if other != name))
            words += ["--accept_changed_data", True] if first != data else []
        words += ["--data_dir", data, *(["--iterations", iterations] if iterations else [])]
        jobs[name] = Job(words, after)
    return jobs


def run_training(
    demo: Demo, networks: Mapping[str, Network], folders: Mapping[str, Path], common: tuple[object, ...] = ()
) -> dict[str, Path]:
    """Train networks, see ``training_jobs``. Returns their checkpoints by name."""
    demo.run_jobs(training_jobs(demo, networks, folders, common))
    return {name: trained_file(folder) for name, folder in folders.items()}


def trained_file(logdir: Path) -> Path:
    """A run's best checkpoint, or its last EMA where it keeps no best one."""
    *_, last = [*sorted(logdir.glob("ema_*.pt")), *logdir.glob("best.pt")]
    return last


@dataclass(frozen=True)
class Recipe:
    """A bundled model.

    networks: by name, of FLAGS and JUDGE; two are trained at a time, and the last one's output is shown.
    shown:    folder of shards of which examples are shown. captions: one from which the vocabulary of so many merges is
              learned.
    sampling: flags of sample.py and evaluate.py. scoring: further ones of evaluate.py.
    card:     what only people know about it, as flags of share.py.
    """

    name: str
    networks: Mapping[str, Network]
    shown: Path
    captions: Path
    merges: int
    prompts: str
    sampling: str
    scoring: str
    card: Mapping[str, Any]


def make_model(demo: Demo, recipe: Recipe) -> Path:
    """Train, sample, score and write the folder ``{name}_model``. Returns the path of the report."""
    name, vocabulary = recipe.name, demo.home / f"{recipe.name}_vocabulary.txt"
    demo.run(
        "prepare_data.py inspect --data_dir {shown} --grid {home}/{name}_examples.png", shown=recipe.shown, name=name
    )
    learn = "train_tokenizer.py --data_dir {captions} --num_merges {merges} --out {vocabulary}"
    demo.run(learn, captions=recipe.captions, merges=recipe.merges, vocabulary=vocabulary)
    folders = {network: demo.home / f"{name}_{network}" for network in recipe.networks}
    files: dict[str, Any] = run_training(demo, recipe.networks, folders, ("--bpe_path", vocabulary))
    drawing, classifier = (_flags(files, chosen) for chosen in (("generator", "upsampler"), ("classifier",)))
    judge = f"--judge_path {{{JUDGE}}}" if JUDGE in files else ""
    samples, report, folder = (demo.home / f"{name}_{what}" for what in ("samples", "report", "model"))
    sampled = f"{drawing} {recipe.sampling} --logdir {{samples}} --prompts {{prompts}}"
    demo.run(f"sample.py {sampled}", samples=samples, prompts=recipe.prompts, **files)
    scored = f"{drawing} {classifier} {judge} {recipe.sampling} {recipe.scoring} --report_dir {{report}}"
    demo.run(f"evaluate.py {scored}", twofold=True, report=report, **files)
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier demo
    texts = " ".join(f"--{what} {{{what}}}" for what in recipe.card)
    sent = f"{drawing} {classifier} --to {{folder}} --report_dir {{report}} {texts}"
    demo.run(f"share.py push {sent}", folder=folder, report=report, **files, **recipe.card)
    return report / "report.md"


def _flags(files: Mapping[str, Any], names: Sequence[str]) -> str:
    """The flags of those of the networks that there are."""
    return " ".join(f"{FLAGS[name]} {{{name}}}" for name in names if name in files)
