"""Training that goes on from what a saver kept, as users run it."""

import json
import os

import pytest
import torch
from file_server import serving
from script_running import losses, train

from diff_dalle.checkpoints.checkpoint import load_file
from diff_dalle.worlds.shapes.scenes import ShapesConfig
from diff_dalle.worlds.shapes.shards import write_shapes


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    write_shapes(ShapesConfig(image_size=16, train_samples=16, val_samples=4, samples_per_shard=8), str(folder))
    return folder / "train"


@pytest.fixture(scope="module")
def kept(tmp_path_factory, data):
    """The folder of a run of four steps, beside what it kept after the second and at the end."""
    folder = tmp_path_factory.mktemp("kept")
    run(folder / "run", data, 4, savers=[
        {"save_to": "local", "save_latest_to": f"{folder}/run_{{step}}.pth"},
        {"save_to": "local", "save_latest_to": f"{folder}/model_{{step}}.pth", "save_type": "model"},
    ])  # fmt: skip
    return folder


def run(logdir, data, iterations, ok=True, ranks=1, **tracking):
    logdir.mkdir(exist_ok=True)
    config = logdir.parent / f"{logdir.name}.json"
    config.write_text(json.dumps({"tracking": {"trackers": ["csv", "jsonl"], **tracking}}))
    flags = {"config": config, "iterations": iterations, "save_interval": 2, "batch_size": 4 // ranks}
    return train(logdir, data, ok=ok, ranks=ranks, **flags)


def weights(logdir, step):
    return load_file(str(logdir / f"model{step:06d}.pt"))["state"]


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def from_file(path, **others):
    return {"load": {"load_from": "local", "file_path": str(path), **others}}


def test_a_run_goes_on_elsewhere_from_a_kept_checkpoint(tmp_path, data, kept):
    """With its history; and then from its own checkpoints, without the file."""
    (tmp_path / "2.pth").write_bytes((kept / "run_2.pth").read_bytes())
    output = run(tmp_path / "new", data, 4, **from_file(tmp_path / "2.pth")).stdout
    assert "Starting at step 2 (8 samples) of" in output and "Settings that differ" in output  # iterations
    assert same(weights(tmp_path / "new", 4), weights(kept / "run", 4))
    assert losses(tmp_path / "new") == losses(kept / "run")
    os.remove(tmp_path / "2.pth")
    assert "Resuming at step 4" in run(tmp_path / "new", data, 6, **from_file(tmp_path / "2.pth")).stdout


def test_several_processes_go_on_from_a_url(tmp_path, data, kept):
    with serving() as server:
        server.files = {"/latest.pth": (kept / "run_2.pth").read_bytes()}
        load = {"load_from": "url", "url": server.url("/latest.pth")}
        output = run(tmp_path / "new", data, 4, ranks=2, load=load).stdout
    assert output.count("Starting at step 2") == 1
    assert losses(tmp_path / "new") == pytest.approx(losses(kept / "run"), rel=1e-5)


def test_a_kept_model_is_what_a_run_starts_from(tmp_path, data, kept):
    """On each process; also when it is resumed; with another file, it is not the same run."""
    output = run(tmp_path / "new", data, 2, ranks=2, **from_file(kept / "model_4.pth")).stdout
    assert "Starting from the weights of" in output
    assert "Resuming at step 2" in run(tmp_path / "new", data, 3, **from_file(kept / "model_4.pth")).stdout
    result = run(tmp_path / "new", data, 4, ok=False, **from_file(kept / "model_2.pth"))
    assert result.returncode == 2 and "model_2.pth, but" in result.stderr and "model_4.pth" in result.stderr


def test_what_is_missing_or_something_else_is_one_sentence(tmp_path, data, kept):
    (tmp_path / "odd.pth").write_text("odd")
    for path, words in (
        (tmp_path / "no.pth", "no.pth does not exist"),
        (tmp_path / "odd.pth", "is truncated or is not"),
    ):
        result = run(tmp_path / "new", data, 2, ok=False, **from_file(path))
        assert result.returncode == 2 and words in result.stderr and result.stderr.count("\n") == 1, result.stderr


def test_only_a_run_that_is_resumed_may_load(tmp_path, data, kept):
    """A first session starts from nothing, and need not find the file."""
    load = from_file(kept / "run_2.pth", only_auto_resume=True)
    assert "Note: no earlier session" in run(tmp_path / "new", data, 2, **load).stdout
    for path in (tmp_path / "new").glob("*.pt"):
        path.unlink()
    record = json.loads((tmp_path / "new" / "run.json").read_text())
    (tmp_path / "new" / "run.json").write_text(json.dumps({**record, "checkpoints": []}))
    assert "Starting at step 2" in run(tmp_path / "new", data, 4, **load).stdout


def test_a_load_and_an_init_checkpoint_exclude_each_other(tmp_path, data, kept):
    model = kept / "model_4.pth"
    config = tmp_path / "c.json"
    config.write_text(json.dumps({"tracking": from_file(model)}))
    result = train(tmp_path / "new", data, ok=False, config=config, init_checkpoint=model, iterations=2)
    assert result.returncode == 2 and "exclude each other" in result.stderr
