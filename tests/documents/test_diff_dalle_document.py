"""The commands of the Diff-DALLE document, to the letter, with smaller sizes."""

import os
import re
from pathlib import Path

import numpy as np
import pytest
from document_reading import commands, sections, shrunk
from script_running import json_lines, run
from shard_making import make_shards

from diff_dalle.sampling import telling

DOCUMENT = sections("diff_dalle.md")
MISSPELLED = {"scripts/train_genrator.py": "scripts/train_generator.py"}  # in the document itself
SIZES = {
    "--image_size": 16,
    "--num_channels": 8,
    "--num_res_blocks": 1,
    "--enc_attn_dim": 16,
    "--batch_size": 4,
    "--microbatch": 2,
    "--classifier_depth": 1,
    "--classifier_width": 8,
    "--classifier_enc_attn_dim": 16,
    "--iterations": 2,
    "--timestep_respacing": 10,
}
VARIABLES_OF = {"Training/Distributed training": ["Training/Generator"]}
HERE = {"num_workers": 0, "device": "cpu", "threads": 1}
# What the document leaves at its defaults, and the end of a training that would go on for days.
OTHERS = {
    "train_generator.py": {"iterations": 2, "enc_depth": 1, "enc_heads": 2, "sample_interval": 0, **HERE},
    "train_classifier.py": {"classifier_enc_depth": 1, "classifier_enc_heads": 2, **HERE},
    "sample.py": {"num_samples": 3, "device": "cpu"},
}


def run_documented(section, logdir, paths=(), changed=(), **others):
    """Run a section's last command; returns its script's result.

    paths:   what stands for the document's own.
    changed: other values of flags of the command.
    others:  further flags.
    """
    text = "".join(DOCUMENT[f"Diff-DALLE/{name}"] for name in (*VARIABLES_OF.get(section, ()), section))
    words = shrunk(commands(text, NUM_GPUS="2")[-1], SIZES | dict(changed))
    words = [dict(paths).get(word, MISSPELLED.get(word, word)) for word in words]
    ranks = int(words[words.index("-n") + 1]) if "mpiexec" in words else 1
    place = words.index("python") + 1
    script = Path(words[place]).name
    given = {**OTHERS[script], **others}
    flags = [str(word) for name, value in given.items() for word in (f"--{name}", value)]
    return run(script, *flags, *words[place + 1 :], ranks=ranks, OPENAI_LOGDIR=str(logdir))


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """The working directory, with the folders that the document names."""
    folder = tmp_path_factory.mktemp("home")
    for name in ("images", "train_data", "val_data", "texts"):
        (folder / "path/to" / name).mkdir(parents=True)
        make_shards(folder / "path/to" / name, [6, 6]) if name != "texts" else None
    (folder / "path/to/texts/prompts.txt").write_text("a red circle\n\na square\ntwo stars\n")
    return folder


@pytest.fixture(scope="module")
def trained(home):
    """The folders of the generator and of the classifier."""
    before = Path.cwd()
    os.chdir(home)
    try:
        results = {name: run_documented(f"Training/{name}", home / name) for name in ("Generator", "Classifier")}
    finally:
        os.chdir(before)
    return results


def test_training_writes_what_the_document_names(home, trained):
    assert {"ema_0.9999_000002.pt", "model000002.pt"} <= set(os.listdir(home / "Generator"))
    assert "model000002.pt" in os.listdir(home / "Classifier")
    for name in trained:
        assert json_lines(home / name / "progress.jsonl")[-1]["step"] == 2


@pytest.mark.slow
@pytest.mark.usefixtures("trained")
def test_several_processes_and_an_upsampler_are_trained(home, tmp_path, monkeypatch):
    monkeypatch.chdir(home)
    run_documented("Training/Distributed training", tmp_path / "two")
    one, two = (json_lines(path / "progress.jsonl") for path in (home / "Generator", tmp_path / "two"))
    assert [2 * row["samples"] for row in one] == [row["samples"] for row in two]  # batch_size is that of a process
    (blur,) = re.findall("`(--gaussian_blur True)`", DOCUMENT["Diff-DALLE/Training/Generator/Cascaded training"])
    name, value = blur[2:].split()
    run_documented("Training/Generator", tmp_path / "up", small_size=8, **{name: value})
    assert "ema_0.9999_000002.pt" in os.listdir(tmp_path / "up")


def test_a_misspelled_flag_of_the_document_is_answered_with_its_name(home, monkeypatch):
    monkeypatch.chdir(home)
    (flag,) = re.findall("`(--resume_checkpoints) ", DOCUMENT["Diff-DALLE/Major hyperparameters"])
    result = run("train_generator.py", "--data_dir", "path/to/images", flag, "x.pt", ok=False)
    assert result.returncode == 2 and "did you mean --resume_checkpoint?" in result.stderr


def sampled(home, out, monkeypatch, changed=(), **others):
    monkeypatch.chdir(home)
    paths = {
        "/path/to/model_ema.pt": "Generator/ema_0.9999_000002.pt",
        "/path/to/classifier.pt": "Classifier/model000002.pt",
    }
    return run_documented("Sampling", out, paths.items(), changed, **others)


@pytest.mark.usefixtures("trained")
def test_sampling_writes_what_the_document_names(home, tmp_path, monkeypatch, caplog):
    """A classifier of another noise schedule guides by noise level, after one warning."""
    telling._warn.cache_clear()
    for out in ("out", "again"):
        result = sampled(home, tmp_path / out, monkeypatch)
    (warning,) = [record.getMessage() for record in caplog.records if "classifier was trained" in record.getMessage()]
    assert "linear schedule of 1,000 steps" in warning and "noise_schedule cosine would fit" in warning
    assert ": ancestral, 10 steps (even), guidance scale 1, classifier scale 1 (mean)" in result.stdout
    names = set(os.listdir(tmp_path / "out"))
    assert {"grid.jpg", "samples_3x16x16x3.npz", "captions.txt"} <= names
    with np.load(tmp_path / "out/samples_3x16x16x3.npz") as found:
        assert found["arr_0"].shape == (3, 16, 16, 3) and found["arr_0"].dtype == np.uint8
    lines = (tmp_path / "out/captions.txt").read_text().splitlines()
    assert [line.split("\t")[-1] for line in lines] == ["a red circle", "a square", "two stars"]


@pytest.mark.usefixtures("trained")
def test_other_steps_and_samplers_of_the_document(home, tmp_path, monkeypatch):
    remarks = re.findall("`--(.+) (.+)`", DOCUMENT["Diff-DALLE/Sampling"])
    assert remarks == [("timestep_respacing", "250"), ("timestep_respacing", "ddim25"), ("use_ddim", "True")]
    said = []
    for (flag, value), shorter in zip(remarks, ("8", "ddim5", "True"), strict=True):
        given = {"changed": [(f"--{flag}", shorter)]} if f"--{flag}" in SIZES else {flag: value}
        said.append(sampled(home, tmp_path / value, monkeypatch, **given).stdout.partition(", guidance")[0])
    assert [each.partition(": ")[2] for each in said] == [
        "ancestral, 8 steps (even)",
        "ancestral, 5 steps (ddim5)",
        "ddim, 10 steps (even)",
    ]
