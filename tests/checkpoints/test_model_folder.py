"""Model folders: what is written, what a location means, what is refused, and the bundled models."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_making import TINY, make_classifier_file, make_file, sample
from decoder_making import make_decoder, save_decoder
from refusing import damaged, refused

import diff_dalle
from diff_dalle.checkpoints import model_folder
from diff_dalle.checkpoints.checkpoint import Identity, load_file
from diff_dalle.checkpoints.decoder import ClipConfig
from diff_dalle.checkpoints.model_folder import ModelFolder, find_file, open_model
from diff_dalle.checkpoints.model_writing import portable, write_model
from diff_dalle.checkpoints.record import Record, save_record
from diff_dalle.checkpoints.safetensors import write_weights_file
from diff_dalle.commands.command_line import parse
from diff_dalle.evaluators.settings import EvaluateInputs


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    home = tmp_path_factory.mktemp("checkpoints")
    (home / "upsampler").mkdir()
    upsampler = make_file(home / "upsampler", image_size=32, small_size=16)
    return {
        "model_path": [make_file(home)],
        "upsampler_paths": [upsampler],
        "classifier_path": [make_classifier_file(home)],
    }


@pytest.fixture(scope="module")
def written(checkpoints, tmp_path_factory) -> ModelFolder:
    return write_model(str(tmp_path_factory.mktemp("written") / "tiny"), checkpoints, "fp32")


@pytest.fixture
def model(written, tmp_path) -> ModelFolder:
    """A copy, which a test may damage."""
    return open_model(shutil.copytree(written.path, str(tmp_path / "tiny")))


@pytest.fixture
def shipped(model, monkeypatch) -> ModelFolder:
    monkeypatch.setattr(model_folder, "_shipped", lambda: {"tiny": model})
    return model


def test_a_folder_samples_as_its_checkpoints_do(checkpoints, model):
    pipeline, parts = (
        diff_dalle.load(model.path),
        diff_dalle.load(checkpoints["model_path"][0], upsampler_paths=checkpoints["upsampler_paths"]),
    )
    assert pipeline.image_size == diff_dalle.load([model.path]).image_size == 32
    guided = {"classifier": model.path, "classifier_scale": 2.0}
    images = sample(pipeline, ["a red circle"], seed=3, **guided)
    expected = sample(parts, ["a red circle"], seed=3, **{**guided, "classifier": checkpoints["classifier_path"][0]})
    assert np.array_equal(images, expected)
    assert not np.array_equal(images, sample(parts, ["a red circle"], seed=3))


def test_half_precision_halves_the_file_and_rounds_the_weights(checkpoints, model, tmp_path):
    half = write_model(str(tmp_path / "half"), checkpoints)
    plain, rounded = (load_file(each.paths("model_path")[0])["state"] for each in (model, half))
    assert all(torch.equal(value.half().float(), rounded[name]) for name, value in plain.items())
    sizes = [(tmp_path / name / "generator.safetensors").stat().st_size for name in ("half", "tiny")]
    numbers = sum(value.numel() for value in plain.values())
    assert sizes[1] - sizes[0] == pytest.approx(2 * numbers, abs=2000)


def test_a_folder_says_nothing_of_the_run(checkpoints):
    content = load_file(checkpoints["model_path"][0])
    assert "data" in content["config"] and "optim" in content["config"]
    kept = portable(content)
    assert kept["config"].keys() == {"model", "tokenizer", "diffusion", "denoising", "augmentation", "preview"}
    assert kept["config"]["preview"] == {"guidance": content["config"]["preview"]["guidance"]}
    assert kept["config"]["diffusion"]["diffusion_steps"] == TINY["diffusion_steps"]
    content["config"]["tokenizer"]["bpe_path"] = "/home/someone/merges.txt"
    assert portable(content)["config"]["tokenizer"]["bpe_path"] == ""
    assert {name: kept[name] for name in ("role", "step", "samples")} == {"role": "ema", "step": 7, "samples": 70}


@pytest.mark.parametrize(
    ("make", "model", "kept"), [("diff_dalle", "/home/someone/clip.pt", "clip.pt"), ("openai", "ViT-L/14", "ViT-L/14")]
)
def test_a_folder_says_nothing_of_where_a_decoders_clip_was(make, model, kept, tmp_path):
    path = save_decoder(tmp_path / "decoder.pt", make_decoder(clip=ClipConfig(make, model, "abc")))
    clip = portable(load_file(str(path)))["config"]["decoder"]["clip"]
    assert clip == {"make": make, "model": kept, "identity": "abc", "outputs": "unit"}
    content = load_file(str(path))
    del content["config"]["decoder"]["clip"]["outputs"]  # as an earlier version wrote it
    assert portable(content)["config"]["decoder"]["clip"]["model"] == kept


def test_what_a_location_means(checkpoints, shipped, tmp_path, monkeypatch):
    path = checkpoints["model_path"][0]
    assert find_file(path) == path
    for location in (shipped.path, "tiny"):
        assert find_file(location) == shipped.paths("model_path")[0]
        assert find_file(location, "classifier_path").endswith("classifier.safetensors")
        assert find_file(location + "/upsampler.safetensors") == shipped.paths("upsampler_paths")[0]
    assert diff_dalle.load("tiny/generator.safetensors").image_size == 16
    assert diff_dalle.load("tiny/generator.safetensors", upsampler_paths=["tiny"]).image_size == 32
    assert diff_dalle.load_classifier("tiny").step == 7
    assert find_file("tiny/../tiny/generator.safetensors") == "tiny/../tiny/generator.safetensors"
    assert diff_dalle.models() == {"tiny": shipped} and "generator.safetensors" in str(shipped)
    monkeypatch.chdir(tmp_path.parent)
    shutil.copytree(shipped.path, tmp_path.parent / "other")
    assert open_model("other").path == "other"  # what is here has precedence
    os.mkdir("tiny")
    with refused("the folder tiny here holds no model.*rename it"):
        diff_dalle.load("tiny")
    save_record("tiny", Record(Identity("generator", {}, None)))
    assert open_model("tiny") is None  # a run has precedence too


@pytest.mark.parametrize(
    ("table", "word"),
    [
        ({}, "no file"),
        ({"model": ["a.safetensors"]}, "'model'"),
        ({"model_path": ["../a.safetensors"]}, "beside it"),
        ({"model_path": ["a.pt"]}, "beside it"),
        ({"model_path": "a.safetensors"}, "beside it"),
        ({"model_path": []}, "beside it"),
        ({"classifier_path": ["a.safetensors", "b.safetensors"]}, "beside it"),
    ],
)
def test_impossible_tables_are_refused(tmp_path, table, word):
    (tmp_path / "model.json").write_text(json.dumps(table))
    with damaged(word):
        open_model(str(tmp_path))


def test_what_is_no_model_is_named(shipped, model, checkpoints, tmp_path):
    with refused("did you mean tiny"):
        diff_dalle.load("tny")
    with damaged("does not exist"):
        diff_dalle.load(str(tmp_path / "none.safetensors"))
    alone = write_model(str(tmp_path / "alone"), {"model_path": checkpoints["model_path"]})
    with refused("no file for classifier_path"):
        diff_dalle.load_classifier(alone.path)
    with refused("no network for lora"):
        write_model(str(tmp_path / "other"), {"lora": ["a.safetensors"]})


def test_damage_is_noticed(model):
    path = Path(model.paths("model_path")[0])
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    with damaged("checksum"):
        diff_dalle.load(str(path))


def test_values_beyond_half_precision_are_refused(checkpoints, tmp_path):
    content = load_file(checkpoints["model_path"][0])
    name = next(iter(content["state"]))
    content = {**content, "state": {**content["state"], name: torch.full((2,), 1e6)}}
    with open(tmp_path / "a", "wb") as file, refused(f"values in {name}"):
        write_weights_file(file, content, "ema.pt")


def test_evaluation_scores_the_upsamplers_of_a_folder(model):
    run = parse(EvaluateInputs, ["--model_path", model.path, "--shapes_dir", "shapes"])
    assert run.upsampler_paths == model.paths("upsampler_paths") and run.upsampler_paths
    given = parse(EvaluateInputs, ["--model_path", model.path, "--shapes_dir", "shapes", "--upsampler_paths", "up.pt"])
    assert given.upsampler_paths == ("up.pt",)


def test_the_card(model):
    assert model.card == ""
    Path(model.path, "README.md").write_text("# A model\n")
    assert open_model(model.path).card == "# A model\n"
