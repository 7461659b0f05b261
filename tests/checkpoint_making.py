"""Checkpoints of tiny networks, and sampling from them."""

from __future__ import annotations

import numpy as np
import torch
from tiny_settings import CLASSIFIER, GENERATOR, flags

from diff_dalle.checkpoints.checkpoint import save_file
from diff_dalle.commands.command_line import parse
from diff_dalle.diffusion.sampling import SamplerConfig
from diff_dalle.distributed.world import ALONE
from diff_dalle.recipes.classifier import ClassifierRun
from diff_dalle.recipes.generator import GeneratorRun

TINY = {**GENERATOR, "text_length": 12, "diffusion_steps": 50}
TINY_CLASSIFIER = {**CLASSIFIER, "text_length": 12, "diffusion_steps": 50}
FEW = SamplerConfig(steps=4)


def make_run(run_class=GeneratorRun, settings=TINY, **changed):
    return parse(run_class, flags({**settings, **changed}))


def save_model(run, path, fresh, spread):
    """A checkpoint of the run's network, ``fresh`` times its initial weights plus random numbers: an untrained network
    predicts 0."""
    session = run.recipe().open(ALONE)
    model = session.network()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(fresh * parameter + spread * torch.randn(parameter.shape))
    save_file(str(path), "ema", session.identity(), 7, 70, model.state_dict())
    return str(path)


def make_file(folder, **changed):
    return save_model(make_run(**changed), folder / "ema.pt", fresh=0.0, spread=0.2)


def make_classifier_file(folder, **changed):
    return save_model(make_run(ClassifierRun, TINY_CLASSIFIER, **changed), folder / "best.pt", fresh=1.0, spread=0.1)


def samples_in(folder):
    """The images that ``sample.py`` wrote into a folder, uint8 [N, H, W, 3]; its file's name says their shape."""
    (path,) = folder.glob("samples_*.npz")
    images = np.load(path)["arr_0"]
    assert path.stem == f"samples_{'x'.join(map(str, images.shape))}" and images.dtype == np.uint8
    return images


def sample(pipeline, *arguments, **options):
    return pipeline.sample(*arguments, **{"progress": False, "sampler": FEW, **options})
