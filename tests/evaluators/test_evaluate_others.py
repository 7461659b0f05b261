"""Evaluation of others' networks, converted: with classes, and without any condition."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_making import make_classifier_file
from eval_making import QUARTERS
from others import Other
from shard_making import encoded, random_image, tar_bytes

from diff_dalle.commands.command_line import parse
from diff_dalle.commands.convert import ConvertConfig, convert
from diff_dalle.commands.evaluate import EvaluateRun, Evaluation
from diff_dalle.config import InputError
from diff_dalle.data.loader import DataConfig, Loader
from diff_dalle.data.spec import ImageSpec, SampleSpec
from diff_dalle.distributed.world import ALONE
from diff_dalle.sampling.pipeline import Pipeline

SHAPE = {"image_size": 16, "noise_schedule": "cosine", "num_head_channels": 16, "diffusion_steps": 50}
CLASSES, N = [0, 2, 1] * 4, 12


def spelled(flags):
    return [str(part) for name, value in flags.items() for part in (f"--{name}", value)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Guided-Diffusion's networks with and without 3 classes, as checkpoints of ours; shards of 12 images with and
    without ``CLASSES``."""
    folder = tmp_path_factory.mktemp("others")
    for name, classes in (("plain", 0), ("classes", 3)):
        theirs = folder / f"{name}_theirs.pt"
        torch.save(Other(classes=classes).file, theirs)
        convert(parse(ConvertConfig, spelled({"model_path": theirs, "out": folder / f"{name}.pt", **SHAPE})))
    for name in ("bare", "classified"):
        files = []
        for i in range(N):
            files += [(f"{i:03d}.png", encoded(random_image(16, 16, i), "PNG")), (f"{i:03d}.txt", b"a picture")]
            files += [(f"{i:03d}.cls", str(CLASSES[i]).encode())] if name == "classified" else []
        (folder / name).mkdir()
        (folder / name / "0.tar").write_bytes(tar_bytes(files))
    return folder


def compared(folder, model, data, **flags):
    """An evaluation of a generator against the images of shards, in the features of a network."""
    usual = {"model_path": folder / model, "data_dir": folder / data, "metrics": "fid", "feature_network": QUARTERS}
    usual |= {"steps": 2, "report_dir": folder / "report", "seed": 5}
    return Evaluation(parse(EvaluateRun, spelled({**usual, **flags})), ALONE)


@pytest.fixture()
def requests(monkeypatch):
    """What is sampled: the classes, the different prompts, and the classifier's scale."""
    asked, sample = [], Pipeline.sample_stages

    def recorded(self, request, settings, **kwargs):
        asked.append((request.labels, set(request.prompts), settings[0].classifier_scale))
        return sample(self, request, settings, **kwargs)

    monkeypatch.setattr(Pipeline, "sample_stages", recorded)
    return asked


def test_a_class_conditional_generator_gets_the_classes_of_the_data(folder, requests):
    result = compared(folder, "classes.pt", "classified")
    data = Loader(DataConfig(data_dir=(str(folder / "classified"),)), SampleSpec(ImageSpec((16, 16))), shuffle=False)
    classes = [CLASSES[int(data.describe(i)[-3:])] for i in range(N)]  # keys are numbers
    assert "frechet" in result.run() and requests == [(classes, {""}, 0.0)]
    scores = json.loads(Path(result.write()).with_name("scores.json").read_text())
    assert np.isfinite(scores["feature_metrics"]["generated"]["frechet_distance"])


def test_classes_are_as_given_else_random_by_the_seed(folder, requests):
    compared(folder, "classes.pt", "classified", labels="2,0").run()
    assert requests.pop()[0] == [2, 0] * 6
    for seed in (5, 5, 6):
        compared(folder, "classes.pt", "bare", seed=seed).run()
    first, again, moved = (labels for labels, *_ in requests)
    assert len(first) == N and set(first) == {0, 1, 2} and first == again and moved[:-1] == first[1:]


@pytest.mark.parametrize(
    ("model", "labels", "words"),
    [
        ("classes.pt", "0,4", "labels must lie between 0 and 2"),
        ("plain.pt", "1", "--labels is given, but no generator is class-conditional: leave it out"),
    ],
)
def test_classes_that_do_not_exist_are_refused(folder, model, labels, words):
    with pytest.raises(InputError, match=words):
        compared(folder, model, "bare", labels=labels).run()


def test_an_unconditional_generator_is_scored_with_and_without_a_classifier(folder, requests):
    """It reads no captions: those of the data are the classifier's."""
    assert "frechet" in compared(folder, "plain.pt", "bare").run()
    clip = make_classifier_file(folder, **{name: SHAPE[name] for name in ("noise_schedule", "diffusion_steps")})
    flags = {"classifier_path": clip, "classifier_scale": 2, "evaluators": "guidance,feature_metrics"}
    result = compared(folder, "plain.pt", "bare", **flags)
    result.run()
    assert requests == [(None, {""}, scale) for scale in (0.0, 0.0, 2.0)]
    assert [each["classifier_scale"] for each in result.report.scores["guidance"]] == [0.0, 2.0]
