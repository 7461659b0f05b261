"""``diff_dalle.train``: what the training commands do, called from Python."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import decoder_file_making
import numpy as np
import pytest
import torch
from cascade_file_making import content
from cascade_file_making import make_world as make_pictures
from checkpoint_making import make_file
from control_making import QUICK
from document_reading import blocks
from forking import run_ranks
from script_running import ROOT, environment, hashes, train
from tiny_settings import CLASSIFIER_RUN, GENERATOR_RUN

import diff_dalle
from diff_dalle.config import InputError
from diff_dalle.training.loop import TrainLoop
from diff_dalle.worlds.shapes.scenes import ShapesConfig
from diff_dalle.worlds.shapes.shards import write_shapes

OWN = {"text_length": 24, "diffusion_steps": 100, "batch_size": 4, "iterations": 2, "num_workers": 0}
TINY = {**GENERATOR_RUN, **OWN}
FEW = {"steps": 2, "progress": False}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shapes")
    write_shapes(ShapesConfig(image_size=16, train_samples=24, val_samples=8, samples_per_shard=8), str(folder))
    return folder / "train"


@pytest.fixture(scope="module")
def trained(tmp_path_factory, data):
    return diff_dalle.train("generator", data, **TINY, logdir=tmp_path_factory.mktemp("trained") / "run")


def test_the_weights_are_those_of_the_command(trained, data, tmp_path):
    train(tmp_path, data, iterations=2, batch_size=4)
    assert hashes(tmp_path) == hashes(trained.logdir) and len(hashes(tmp_path)) == 3


def test_a_run_says_where_it_is_and_loads_as_a_pipeline(trained):
    assert {key: Path(path).name for key, path in trained.checkpoints.items()} == {
        "model": "model000002.pt",
        "ema_0.9": "ema_0.9_000002.pt",
        "optimizer": "opt000002.pt",
    }
    assert trained.paths == [trained.checkpoints["ema_0.9"]] and trained.settings.training.iterations == 2
    assert repr(trained) == f"TrainedRun(logdir={trained.logdir!r}, settings of GeneratorRun)"
    pipeline = trained.load(device="cpu")
    assert pipeline.step == 2 and pipeline.sample("a red circle", **FEW).shape == (1, 16, 16, 3)
    assert isinstance(pipeline, diff_dalle.Pipeline)


def test_the_same_call_resumes(trained, data, capsys):
    again = diff_dalle.train("generator", str(data), **{**TINY, "iterations": 3}, logdir=trained.logdir)
    assert Path(again.checkpoints["model"]).name == "model000003.pt" and "2 are done" in capsys.readouterr().out


def test_settings_come_from_a_preset_a_file_or_an_object(data, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("diff_dalle.commands.train.launch_training", lambda run: seen.append(run) or "")
    shards = [data, data]
    run = diff_dalle.train("shapes_32", shards, iterations=7, optim={"lr": 0.5}, use_fp16=True).settings
    assert run.data.data_dir == (str(data), str(data)) and run.training.iterations == 7 and run.optim.lr == 0.5
    assert run.model.unet.image_size == 32 and run.training.precision == "fp16"
    file = tmp_path / "run.yaml"
    file.write_text("kind: classifier\noptim:\n  lr: 0.25\n")
    assert diff_dalle.train(file).settings.optim.lr == 0.25
    settings = diff_dalle.GeneratorRun(optim=replace(run.optim, lr_anneal_steps=0, warmup_steps=0))
    found = diff_dalle.train(settings, data, lr_anneal="linear", lr_anneal_steps=9, iterations=9).settings
    assert found.optim.lr == 0.5 and found.optim.lr_anneal == "linear" and found.data.data_dir == (str(data),)
    whole = {"webdataset_base_url": "x/{}.tar", "img_embeddings_url": "e"}
    decoder = diff_dalle.train("decoder_tiny", whole).settings
    assert decoder.data.webdataset_base_url == "x/{}.tar" and decoder.data.img_embeddings_url == "e"
    assert len(seen) == 4 and isinstance(seen[1], diff_dalle.ClassifierRun)


@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        ("shapes_23", {}, "config is 'shapes_23', but there is no such preset, file or kind; did you mean shapes_32?"),
        (3, {}, "config is 3, but must be the name of a preset or kind, the path of a file, or settings such as Gen"),
        ("generator", {"learning_rate": 1}, "learning_rate is an unknown setting; did you mean lr?"),
        ("generator", {"lr": "x"}, "lr is 'x', but must be a number"),
        ("generator", {"lr": -1.0}, "lr is -1, but must be above 0"),
        ("generator", {"min_snr_gamma": 4.0}, "min_snr_gamma has no effect while loss_weighting is none: set loss_wei"),
        ("generator", {"image_size": 16, "small_size": 16}, "must be smaller than image_size (16)"),
        ("generator", {"optim": {"lr": 1.0}, "lr": 2.0}, "sets optim.lr to 1.0, but lr sets it to 2.0: give one of th"),
        ("generator", {"iterations": 1}, "data_dir is required: a folder of shards, a tar"),
        ("generator_lora", {}, "model_path is required: the checkpoint of the network to adapt"),
        (
            "decoder_tiny",
            {"check": True, "data": {"webdataset_base_url": "x/{}.tar"}},
            "check is for the command train",
        ),
    ],
)
def test_errors_are_spelled_as_python_arguments(config, settings, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as error:
        diff_dalle.train(config, **settings)
    assert message in str(error.value) and "--" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_a_file_must_say_what_it_trains(tmp_path):
    (tmp_path / "run.yaml").write_text("optim:\n  lr: 0.25\n")
    with pytest.raises(InputError, match=r"run.yaml does not say what it trains: give kind, one of gen"):
        diff_dalle.train(tmp_path / "run.yaml")


def test_ctrl_c_saves_and_interrupts(data, tmp_path, monkeypatch):
    update = TrainLoop.update

    def interrupted(self, batch):
        update(self, batch)
        if self.step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(TrainLoop, "update", interrupted)
    with pytest.raises(KeyboardInterrupt):
        diff_dalle.train("generator", data, **{**TINY, "iterations": 100}, logdir=tmp_path / "run")
    assert (tmp_path / "run" / "model000003.pt").exists()


def test_an_upsampler_loads_as_one(data, tmp_path):
    run = diff_dalle.train("generator", data, **TINY, small_size=8, logdir=tmp_path / "run")
    pipeline = run.load(device="cpu")
    assert not pipeline.has_base and pipeline.factor == 2


def test_a_classifier_loads_as_one(data, tmp_path):
    run = diff_dalle.train("classifier", data, **{**CLASSIFIER_RUN, **OWN}, logdir=tmp_path / "run")
    assert isinstance(run.load(device="cpu"), diff_dalle.Classifier)


def test_a_lora_loads_with_its_base(data, tmp_path):
    base = make_file(tmp_path)
    settings = {"iterations": 2, "batch_size": 4, "num_workers": 0, "sample_interval": 0, "device": "cpu", "lr": 0.1}
    run = diff_dalle.train("generator_lora", data, model_path=base, **settings, logdir=tmp_path / "run")
    assert [Path(path).name for path in run.paths] == ["lora000002.safetensors"]
    changed = run.load(device="cpu").sample("a red circle", **FEW)
    assert not np.array_equal(changed, diff_dalle.load(base, "cpu").sample("a red circle", **FEW))


def test_a_controlnet_loads_with_its_base(data, tmp_path):
    base = make_file(tmp_path)
    run = diff_dalle.train("controlnet", data, model_path=base, **QUICK, logdir=tmp_path / "run")
    assert run.load(device="cpu").stages[0].steering is not None


def test_a_decoder_loads_as_a_pipeline(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    world = decoder_file_making.make_world(tmp_path / "shards")
    run = diff_dalle.train(decoder_file_making.write_file(tmp_path), world, kind="decoder")
    assert run.paths == [run.checkpoints["unet0/best"]] and "unet0/model" in run.checkpoints
    assert run.load(device="cpu").image_size == 8


def test_a_stage_of_a_cascade_trains_from_its_file(tmp_path):
    import yaml

    world = make_pictures(tmp_path / "shards")
    path = tmp_path / "stage_a.yaml"
    path.write_text(yaml.safe_dump({**content("stage_a", tmp_path, ""), "webdataset_path": []}))
    run = diff_dalle.train(path, world, updates=1, save_every=1)
    assert run.settings.webdataset_path == (world,) and Path(run.logdir) == tmp_path / "run"
    assert Path(run.paths[0]).name == "model000001.pt"


def test_the_documented_call(data, tmp_path, monkeypatch):
    (block,) = blocks((ROOT / "diff_dalle/tasks/README.md").read_text(encoding="utf-8"), "python")
    assert "iterations=20_000" in block
    few = "iterations=1, batch_size=2, sample_interval=0, num_channels=32, num_workers=0"
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(block.replace("path/to/shards", str(data)).replace("iterations=20_000", few), names)
    assert names["images"].shape == (2, 64, 64, 3) and (tmp_path / "runs" / "tiny" / "run.json").exists()


SEVERAL = """
import sys, diff_dalle
run = diff_dalle.train("generator", sys.argv[1], logdir=sys.argv[2], **{settings})
print("done", run.paths)
"""


@pytest.mark.slow
def test_processes_train_together(data, tmp_path, trained):
    script = tmp_path / "own.py"
    script.write_text(SEVERAL.replace("{settings}", repr({**TINY, "batch_size": 2})))
    result = run_ranks([str(script), str(data), str(tmp_path / "two")], environment(), 2)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("done") == 2
    one, two = (
        torch.load(path, weights_only=True)["state"]
        for path in (trained.logdir + "/model000002.pt", tmp_path / "two/model000002.pt")
    )
    assert all(torch.allclose(one[name], two[name], atol=1e-5) for name in one)
