"""Sharded checkpoints on disk: what they hold, and what is refused. (tests/distributed has those of several ranks.)"""

import os
import re

import pytest
import torch
from refusing import damaged, refused
from script_running import run as run_script

from diff_dalle.checkpoints import shards
from diff_dalle.checkpoints.checkpoint import INDEX, Identity, load_file, save_file
from diff_dalle.checkpoints.content import DamagedError
from diff_dalle.checkpoints.shards import ROLE, ShardedFolder, consolidate, save_sharded
from diff_dalle.commands.gathering import ConsolidateConfig, consolidate_checkpoint
from diff_dalle.config import InputError
from diff_dalle.distributed.world import ALONE

IDENTITY = Identity("toy", {"lr": 0.1}, "tokens-1", "vocabulary")
MODEL = {
    "weight": torch.arange(12.0).view(4, 3),
    "half": torch.ones(3, dtype=torch.bfloat16) / 3,
    "flags": torch.tensor([True, False]),
    "one": torch.tensor(2.5, dtype=torch.float64),
    "none": torch.zeros(0, 3),
}
OPTIMIZER = {
    "state": {0: {"step": torch.tensor(3.0), "m": torch.ones(2, 2)}},
    "groups": [{"lr": 0.5, "betas": (0.9, 1)}],
}


def make_folder(path, **states):
    states = states or {"model": MODEL, "ema_0.9": MODEL, "optimizer": OPTIMIZER}
    save_sharded(str(path), states, ALONE, IDENTITY, 3, 24)
    return path


def change_index(path, change):
    content = load_file(str(path / INDEX), (ROLE,))
    change(content["state"])
    save_file(str(path / INDEX), ROLE, IDENTITY, 3, 24, content["state"])


def test_all_values_return_in_their_types(tmp_path):
    folder = ShardedFolder(str(make_folder(tmp_path / "sharded")))
    state = folder.read("model", str(tmp_path))
    for name, value in MODEL.items():
        assert state[name].dtype is value.dtype and torch.equal(state[name], value), name
    outline = folder.outline("optimizer")
    assert outline["groups"] == [{"lr": 0.5, "betas": [0.9, 1]}]
    assert outline["state"][0]["step"] == 3 and outline["state"][0]["m"].is_meta


def test_ordinary_files_say_all_that_a_run_would_have_said(tmp_path):
    make_folder(tmp_path / "sharded")
    result = run_script("consolidate.py", "--model_path", str(tmp_path / "sharded") + "/")
    names = ("model000003.pt", "ema_0.9_000003.pt", "opt000003.pt")
    assert result.stdout.splitlines() == [f"Wrote {tmp_path}/{name}." for name in names]
    model, optimizer = (load_file(str(tmp_path / name), ("ema", "optimizer")) for name in names[1:])
    assert (model["role"], model["step"], model["samples"], model["vocabulary"]) == ("ema", 3, 24, "vocabulary")
    assert (model["kind"], model["config"], model["tokenizer"]) == ("toy", {"lr": 0.1}, "tokens-1")
    assert all(torch.equal(model["state"][name], value) for name, value in MODEL.items())
    assert optimizer["state"]["groups"] == [{"lr": 0.5, "betas": [0.9, 1]}]
    make_folder(tmp_path / "several", **{"a/model": MODEL})
    (path,) = consolidate(str(tmp_path / "several"), str(tmp_path / "new" / "out"))
    assert os.path.basename(path) == "a_model000003.pt" and load_file(path)["trainee"] == "a"


def test_a_folder_is_no_ordinary_file(tmp_path):
    path = make_folder(tmp_path / "sharded")
    with refused(r"is a sharded checkpoint: .*diff-dalle consolidate --model_path"):
        load_file(str(path))
    with refused("holds the index of a sharded checkpoint, but a model's weights"):
        load_file(str(path / INDEX))
    with damaged("does not exist"):
        consolidate(str(tmp_path / "missing"), str(tmp_path))
    with refused("model_path is required"):
        consolidate_checkpoint(ConsolidateConfig())


@pytest.mark.parametrize("keep", [0.5, None])
def test_a_file_that_is_cut_off_or_missing_is_noticed_at_once(tmp_path, keep):
    file = make_folder(tmp_path / "sharded") / "rank00000.bin"
    if keep:
        os.truncate(file, int(keep * file.stat().st_size))
    else:
        file.unlink()
    with damaged("rank00000.bin is missing or truncated"):
        ShardedFolder(str(tmp_path / "sharded"))


def test_a_changed_byte_is_noticed_when_it_is_read(tmp_path):
    file = make_folder(tmp_path / "sharded", model=MODEL) / "rank00000.bin"
    data = bytearray(file.read_bytes())
    data[5] ^= 1
    file.write_bytes(data)
    with damaged("the checksum of bytes from 0 on is wrong"):
        consolidate(str(tmp_path / "sharded"), str(tmp_path / "out"))


def rows(change):
    def apply(state):
        change(state["tensors"][0]["rows"])

    return apply


HOSTILE = {
    "no tensors": lambda state: state.pop("tensors"),
    "a path": lambda state: state.update(files=["../rank00000.bin"]),
    "an absolute path": lambda state: state.update(files=["/etc/passwd"]),
    "a type": lambda state: state["tensors"][0].update(dtype="object"),
    "a shape": lambda state: state["tensors"][0].update(shape=[-4, 3]),
    "a huge shape": lambda state: state["tensors"][0].update(shape=[2**40, 3]),
    "a slot": lambda state: state["states"]["model"].update(weight=torch.tensor(99)),
    "no chunk": lambda state: state["tensors"][0].update(rows=torch.zeros(0, 6, dtype=torch.int64)),
    "columns": lambda state: state["tensors"][0].update(rows=torch.zeros(1, 5, dtype=torch.int64)),
    "a gap": rows(lambda rows: rows[:, 0].add_(1)),
    "a length": rows(lambda rows: rows[:, 4].add_(1)),
    "a file": rows(lambda rows: rows[:, 2].fill_(7)),
    "no file": rows(lambda rows: rows[:, 2].fill_(-1)),
    "an offset": rows(lambda rows: rows[:, 3].fill_(-8)),
    "tensors that share all values": lambda state: state["tensors"].extend([state["tensors"][0]] * 50),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_an_index_that_cannot_be_true_is_refused(tmp_path, what):
    path = make_folder(tmp_path / "sharded", model=MODEL)
    change_index(path, HOSTILE[what])
    with damaged(re.escape(f"{path}{os.sep}{INDEX} is damaged: it does not say where")):
        ShardedFolder(str(path))


def test_a_save_that_is_interrupted_leaves_no_whole_folder(tmp_path, monkeypatch):
    """Also where an earlier one of the same step was whole."""
    path = make_folder(tmp_path / "sharded")

    def full(place):
        raise InputError("the disk is full")

    monkeypatch.setattr(shards.storage, "atomic_writer", full)
    with refused("the disk is full"):
        make_folder(path)
    with pytest.raises(DamagedError):
        ShardedFolder(str(path))
