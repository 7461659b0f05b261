"""What makes one of the models that come along: networks, pictures by them, their scores, and the model's folder."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .contract import Demo, Job

#: The flag that takes each network, the one that a model is known for first.
FLAGS = {"generator": "--model_path", "upsampler": "--upsampler_paths", "classifier": "--classifier_path"}


@dataclass(frozen=True)
class Network:
    """How one of them is trained.

    data:  folders with its shards for training and held-out loss.
    first: a folder with shards to begin on, and for how many steps.
    flags: beside the preset's settings. iterations: instead of the preset's; quick: those of the quick demo.
    after: the networks that are trained before it.
    """

    script: str
    preset: str
    data: tuple[Path, Path]
    quick: int
    iterations: int | None = None
    flags: tuple[object, ...] = ()
    after: tuple[str, ...] = ()
    first: tuple[Path, int] | None = None


@dataclass(frozen=True)
class Recipe:
    """A model that comes along.

    networks: by name, one for each of FLAGS; two are trained at a time, and the last one's output is shown.
    sampling: flags of sample.py and evaluate.py. scoring: further ones of evaluate.py.
    card:     what only people know about it, as flags of share.py.
    """

    name: str
    networks: Mapping[str, Network]
    vocabulary: Path
    prompts: str
    sampling: tuple[object, ...]
    scoring: tuple[object, ...]
    card: Mapping[str, str]


def make_model(demo: Demo, recipe: Recipe) -> Path:
    """Train, sample, score and write the folder ``{name}_model``. Returns the path of the report."""
    home, name = demo.home, recipe.name
    folders = {network: home / f"{name}_{network}" for network in FLAGS}

    jobs: dict[str, Job] = {}
    for network, how in recipe.networks.items():
        iterations, after = how.quick if demo.quick else how.iterations, how.after
        flags: list[object] = ["--preset", how.preset, "--logdir", folders[network], "--bpe_path", recipe.vocabulary]
        flags += ["--val_data_dir", how.data[1], *how.flags]
        if how.first:
            data, steps = how.first
            begin = ["--data_dir", data, "--iterations", how.quick // 2 if demo.quick else steps]
            jobs[f"{network}_first"] = Job(how.script, [*flags, *begin], after, shown=True)
            flags, after = [*flags, "--accept_changed_data", True], (f"{network}_first",)
        flags += ["--data_dir", how.data[0], *(["--iterations", iterations] if iterations else [])]
        jobs[network] = Job(how.script, flags, after)
    demo.run_jobs(jobs)

    given = {network: [flag, _trained(folders[network])] for network, flag in FLAGS.items()}
    drawing = [*given["generator"], *given["upsampler"]]
    models = [*drawing, *given["classifier"]]
    samples, report, folder = (home / f"{name}_{what}" for what in ("samples", "report", "model"))
    demo.run("sample.py", *drawing, *recipe.sampling, "--logdir", samples, "--prompts", recipe.prompts)
    demo.run("evaluate.py", *models, *recipe.sampling, *recipe.scoring, "--report_dir", report)
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier demo
    texts = [part for what, text in recipe.card.items() for part in (f"--{what}", text)]
    demo.run("share.py", "push", *models, "--to", folder, "--report_dir", report, *texts)
    return report / "report.md"


def _trained(logdir: Path) -> Path:
    """A run's best checkpoint, or its last EMA where it keeps no best one."""
    *_, last = [*sorted(logdir.glob("ema_*.pt")), *logdir.glob("best.pt")]
    return last
