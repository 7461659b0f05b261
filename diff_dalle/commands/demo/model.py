"""What makes one of the models that come along: networks, pictures by them, their scores, and the model's folder."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .contract import Demo
from .networks import Network, trained_file, training_jobs

#: The flag that takes each network, the one that a model is known for first.
FLAGS = {"generator": "--model_path", "upsampler": "--upsampler_paths", "classifier": "--classifier_path"}


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

    demo.run_jobs(training_jobs(demo, recipe.networks, folders, ("--bpe_path", recipe.vocabulary)))

    given = {network: [flag, trained_file(folders[network])] for network, flag in FLAGS.items()}
    drawing = [*given["generator"], *given["upsampler"]]
    models = [*drawing, *given["classifier"]]
    samples, report, folder = (home / f"{name}_{what}" for what in ("samples", "report", "model"))
    demo.run("sample.py", *drawing, *recipe.sampling, "--logdir", samples, "--prompts", recipe.prompts)
    demo.run("evaluate.py", *models, *recipe.sampling, *recipe.scoring, "--report_dir", report, twofold=True)
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier demo
    texts = [part for what, text in recipe.card.items() for part in (f"--{what}", text)]
    demo.run("share.py", "push", *models, "--to", folder, "--report_dir", report, *texts)
    return report / "report.md"
