"""run.json: written and read back, and distrusted; and where runs go when nothing says it."""

import json
import os
import re
from datetime import date
from types import SimpleNamespace

import pytest
from refusing import refused

from diff_dalle.checkpoints import record
from diff_dalle.checkpoints.checkpoint import Identity
from diff_dalle.checkpoints.record import CheckpointSet, Record, load_record, save_record
from diff_dalle.checkpoints.run_folder import choose_logdir, read_run
from diff_dalle.config import InputError

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


def test_missing_entries_are_one_sentence(tmp_path):
    for path in (["kind"], ["config"], ["tokenizer"], ["checkpoints"], ["checkpoints", 0, "step"]):
        edited(tmp_path, *path, value=...)
        with refused("damaged or was not written by diff_dalle"):
            load_record(str(tmp_path))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"3",
        b"[" * 10**5,
        b'{"kind": "toy"',
        b"\0",
        b'{"checkpoints": ' + b"1" * 5000 + b"}",
        b"\xff\xfe\0",
    ],
    ids=range(9),
)
def test_other_contents_are_one_sentence(tmp_path, data):
    (tmp_path / "run.json").write_bytes(data)
    with refused("run.json is damaged or was not written by diff_dalle"):
        load_record(str(tmp_path))


def test_records_out_of_order_or_of_another_size_are_damaged(tmp_path, monkeypatch):
    edited(tmp_path, "checkpoints", 0, "step", value=4)
    with refused("damaged"):
        load_record(str(tmp_path))
    save_record(str(tmp_path), RECORD)
    monkeypatch.setattr(record, "MAX_BYTES", 100)
    with refused("damaged"):
        load_record(str(tmp_path))


NAMES = [
    "", ".", "..", ".pt", "../a.pt", "a/b.pt", "a\\b.pt", "/tmp/a.pt", "run.json", "a.pt\n", "pipe:touch b.pt",
    "s3://bucket/a.pt", "~/a.pt", "C:a.pt", "-a.pt", ".a.pt", "a\x00.pt",
]  # fmt: skip


def test_only_plain_names_are_accepted(tmp_path):
    for name in NAMES:
        edited(tmp_path, "checkpoints", 0, "files", "model", value=name)
        with refused("which is no plain name: choose another logdir"):
            read_run(str(tmp_path))


def test_a_foreign_record_does_not_delete_the_file_of_a_checkpoint_that_is_kept(tmp_path):
    edited(tmp_path, "checkpoints", 0, "files", "model", value="model000006.pt")
    folder = read_run(str(tmp_path))
    folder.keep = 1
    folder.save(6, 48, {"model": {}})
    assert {name for name in os.listdir(tmp_path) if name.endswith(".pt")} == {"model000006.pt"}


# -------------------------------------------------------------------------------------------------------- where runs go


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENAI_LOGDIR", raising=False)
    return tmp_path


def test_a_folder_here_named_by_the_time(here):
    """It is not created yet, and is another one once it is there."""
    found = choose_logdir("")
    assert re.fullmatch(r"runs/\d{8}-\d{6}", found) and not (here / "runs").exists()
    assert choose_logdir("", "samples").startswith("samples/")


def test_a_folder_that_is_there_is_not_taken(here, monkeypatch):
    monkeypatch.setattr("diff_dalle.checkpoints.run_folder.datetime", SimpleNamespace(now=lambda: date(2026, 11, 28)))
    names = []
    for _ in range(3):
        names.append(choose_logdir(""))
        (here / names[-1]).mkdir(parents=True)
    assert names == [f"runs/20261128-000000{end}" for end in ("", "-2", "-3")]


def test_what_is_said_comes_first(here, monkeypatch):
    monkeypatch.setenv("OPENAI_LOGDIR", "elsewhere")
    assert (choose_logdir("given"), choose_logdir("")) == ("given", "elsewhere")
