"""run.json: written and read back, and distrusted."""

import json
import os

import pytest

from diff_dalle.checkpoints import record
from diff_dalle.checkpoints.checkpoint import Identity
from diff_dalle.checkpoints.record import CheckpointSet, Record, load_record, save_record
from diff_dalle.checkpoints.run_folder import RunFolder, read_run
from diff_dalle.errors import InputError

DATA = {"data_dir": {"digest": "0" * 64, "totals": "1 shard with 2 samples"}}
RECORD = Record(
    Identity("toy", {"optim": {"lr": 0.1, "betas": [0.9, 0.99]}}, "wordnet-9:0"),
    [
        CheckpointSet(2, 16, {"model": "model000002.pt"}),
        CheckpointSet(4, 32, {"a/ema_0.9": "a_ema_0.9_000004.pt"}, 8, DATA),
    ],
    {"": {"step": 2, "loss": 0.5}},
    ["s3://bucket/model000001.pt"],
)


def test_a_record_is_read_back(tmp_path):
    assert load_record(str(tmp_path)) is None
    save_record(str(tmp_path), RECORD)
    assert load_record(str(tmp_path)) == RECORD


def test_a_record_of_an_earlier_version_is_read(tmp_path):
    old = {"kind": "toy", "config": {}, "tokenizer": None}
    old["checkpoints"] = [{"step": 1, "samples": 8, "files": {"model": "model000001.pt"}}]
    (tmp_path / "run.json").write_text(json.dumps(old))
    found = load_record(str(tmp_path))
    assert found.checkpoints == [CheckpointSet(1, 8, {"model": "model000001.pt"})]
    assert found.best == {} and found.started_from is None


def edited(tmp_path, *path, value):
    save_record(str(tmp_path), RECORD)
    content = json.loads((tmp_path / "run.json").read_text())
    node = content
    for key in path[:-1]:
        node = node[key]
    if value is ...:
        del node[path[-1]]
    else:
        node[path[-1]] = value
    (tmp_path / "run.json").write_text(json.dumps(content))


PLACES = [
    ("kind",), ("config",), ("checkpoints",), ("best",), ("started_from",), ("best", ""), ("best", "", "step"),
    ("best", "", "loss"), ("checkpoints", 0), ("checkpoints", 0, "step"), ("checkpoints", 0, "samples"),
    ("checkpoints", 0, "files"), ("checkpoints", 0, "files", "model"), ("checkpoints", 1, "batch"),
    ("checkpoints", 1, "data"), ("checkpoints", 1, "data", "data_dir"),
    ("checkpoints", 1, "data", "data_dir", "digest"),
    ("checkpoints", 1, "data", "data_dir", "totals"), ("tokenizer",),
]  # fmt: skip
VALUES = [True, -1, 1.5, "x", [3], {"a": [1]}, 2**70, float("nan")]
ALLOWED = {"kind": ["x"], "tokenizer": ["x"], "totals": ["x"], "loss": [-1, 1.5, 2**70], "config": [{"a": [1]}]}


@pytest.mark.parametrize("path", PLACES, ids=lambda path: ".".join(map(str, path)))
def test_wrong_types_are_one_sentence(tmp_path, path):
    for value in VALUES:
        edited(tmp_path, *path, value=value)
        if value is not True and value in ALLOWED.get(path[-1], []):
            load_record(str(tmp_path))
            continue
        with pytest.raises(InputError, match="run.json") as error:
            load_record(str(tmp_path))
        assert "another logdir" in str(error.value) and "\n" not in str(error.value), (path, value)


@pytest.mark.parametrize("path", [("kind",), ("config",), ("tokenizer",), ("checkpoints",), ("checkpoints", 0, "step")])
def test_missing_entries_are_one_sentence(tmp_path, path):
    edited(tmp_path, *path, value=...)
    with pytest.raises(InputError, match="damaged or was not written by diff_dalle"):
        load_record(str(tmp_path))


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", "[" * 10**5, '{"kind": "toy"', "\x00", '{"checkpoints": ' + "1" * 5000 + "}"]
)
def test_other_texts_are_one_sentence(tmp_path, text):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(InputError, match="run.json is damaged or was not written by diff_dalle"):
        load_record(str(tmp_path))


def test_other_bytes_and_sizes_are_one_sentence(tmp_path, monkeypatch):
    (tmp_path / "run.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="damaged"):
        load_record(str(tmp_path))
    save_record(str(tmp_path), RECORD)
    monkeypatch.setattr(record, "MAX_BYTES", 100)
    with pytest.raises(InputError, match="damaged"):
        load_record(str(tmp_path))


def test_steps_are_in_order(tmp_path):
    edited(tmp_path, "checkpoints", 0, "step", value=4)
    with pytest.raises(InputError, match="damaged"):
        load_record(str(tmp_path))


NAMES = [
    "", ".", "..", ".pt", "../a.pt", "a/b.pt", "a\\b.pt", "/tmp/a.pt", "run.json", "a.pt\n", "pipe:touch b.pt",
    "s3://bucket/a.pt", "~/a.pt", "C:a.pt", "-a.pt", ".a.pt", "a\x00.pt",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_only_plain_names_are_accepted(tmp_path, name):
    edited(tmp_path, "checkpoints", 0, "files", "model", value=name)
    with pytest.raises(InputError, match="which is no plain name: choose another logdir"):
        read_run(str(tmp_path))


def test_a_foreign_record_deletes_nothing_outside_its_folder(tmp_path):
    """Neither in another folder nor the file of a checkpoint that is kept."""
    victim, run = tmp_path / "victim.pt", tmp_path / "run"
    run.mkdir()
    victim.write_text("precious")
    for name in (str(victim), "../victim.pt"):
        edited(run, "checkpoints", 0, "files", "model", value=name)
        with pytest.raises(InputError, match="no plain name"):
            read_run(str(run))
    assert victim.read_text() == "precious"
    edited(run, "checkpoints", 0, "files", "model", value="model000006.pt")
    folder = read_run(str(run))
    folder.keep = 1
    folder.save(6, 48, {"model": {}})
    assert {name for name in os.listdir(run) if name.endswith(".pt")} == {"model000006.pt"}


def test_a_folder_without_record_is_empty(tmp_path):
    assert read_run(str(tmp_path)) is None and RunFolder(Identity("toy", {}), path="x").checkpoints == []
