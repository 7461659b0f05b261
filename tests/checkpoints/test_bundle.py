"""A run in one file: restored byte for byte, and distrusted."""

import io
import os

import pytest
import torch
from refusing import damaged, refused

from diff_dalle import storage
from diff_dalle.checkpoints.bundle import is_bundle, restore_bundle, write_bundle
from diff_dalle.checkpoints.checkpoint import Identity, load_file, networks_content, networks_in, write_file
from diff_dalle.checkpoints.content import DamagedError
from diff_dalle.checkpoints.run_folder import RunFolder, discard_run, open_run, read_run
from diff_dalle.config import InputError
from diff_dalle.data.fingerprint import Fingerprint
from diff_dalle.training.optim import OptimConfig

IDENTITY = Identity("toy", {"lr": 0.1}, None)


def make_run(path):
    """Two checkpoints of two trainees, with best weights, a list of shards, a history and other files."""
    path.mkdir()
    run = RunFolder(IDENTITY, path=str(path))
    run.data = {"data_dir": Fingerprint.of(["a.tar"], [100], [8])}
    for step in (2, 4):
        roles = {"model": {"w": torch.arange(step)}, "optimizer": {"lr": 0.5, "m": [torch.ones(step)]}}
        run.lowest_loss = 1 / step
        run.save(step, 8 * step, {f"{name}/{role}": state for name in "ab" for role, state in roles.items()})
    run.keep_best("a", 2, 16, 0.5, {"w": torch.zeros(1)}, "ema_0.9")
    (path / "progress.jsonl").write_text('{"step": 2}\n')
    (path / "progress.csv").write_text("")
    (path / "log.txt").write_text("stays")
    return run


def test_a_run_that_fell_back_forgets_the_sets_after_its_step(tmp_path):
    """Saving step 3 after a return to step 2 drops step 4 from the record."""
    run = make_run(tmp_path / "run")
    run.save(3, 24, {"a/model": {"w": torch.ones(1)}})
    for known in (run, read_run(run.path)):
        assert [entry.step for entry in known.checkpoints] == [2, 3]


def test_backups_are_kept_beside_the_newest_sets(tmp_path):
    (tmp_path / "run").mkdir()
    run = RunFolder(IDENTITY, path=str(tmp_path / "run"), keep=2, is_backup=lambda step: step % 3 == 0)
    for step in range(1, 8):
        run.save(step, 8 * step, {"model": {"w": torch.ones(1)}})
    assert [entry.step for entry in run.checkpoints] == [3, 6, 7]
    assert sorted(name for name in os.listdir(run.path) if name.endswith(".pt")) == [
        f"model{step:06d}.pt" for step in (3, 6, 7)
    ]


def bundle(run, path):
    with open(path, "wb") as file:
        write_bundle(file, run)
    return str(path)


@pytest.fixture
def path(tmp_path):
    """The bundle of a run, which lies beside it."""
    return bundle(make_run(tmp_path / "run"), tmp_path / "b.pth")


def contents(folder):
    return {name: (folder / name).read_bytes() for name in os.listdir(folder)}


def test_a_run_is_restored_byte_for_byte(tmp_path):
    """The latest checkpoint and what belongs to it, and nothing else."""
    run = make_run(tmp_path / "run")
    path = bundle(run, tmp_path / "latest.pth")
    assert is_bundle(path) and not is_bundle(str(tmp_path / "run" / "a_model000004.pt"))
    assert restore_bundle(path, str(tmp_path / "new")) == 4
    before, after = contents(tmp_path / "run"), contents(tmp_path / "new")
    kept = {name for name in before if "000002" not in name} - {"log.txt"}
    assert set(after) == kept and len(kept) == 9
    assert {name for name in kept if before[name] != after[name]} == {"run.json"}
    found = open_run(str(tmp_path / "new"), IDENTITY, OptimConfig)
    assert found.checkpoints == run.checkpoints[1:] and found.best == run.best and found.lowest_loss == 0.25
    assert restore_bundle(bundle(found, tmp_path / "again.pth"), str(tmp_path / "newer")) == 4
    assert contents(tmp_path / "newer") == after


def test_a_folder_with_a_run_is_left_alone(path, tmp_path):
    before = contents(tmp_path / "run")
    with refused("has a run already"):
        restore_bundle(path, str(tmp_path / "run"))
    assert contents(tmp_path / "run") == before


def test_a_restoration_that_is_interrupted_can_be_repeated(path, tmp_path, monkeypatch):
    """The record comes last: without it, a folder has no run."""
    write, written = storage.atomic_writer, []

    def fail(target):
        if target.startswith(str(tmp_path)) and len(written) == 5:
            raise InputError("the disk is full")
        written.extend([target] * target.startswith(str(tmp_path / "new")))
        return write(target)

    monkeypatch.setattr(storage, "atomic_writer", fail)
    with refused("full"):
        restore_bundle(path, str(tmp_path / "new"))
    assert len(contents(tmp_path / "new")) == 5 and read_run(str(tmp_path / "new")) is None
    monkeypatch.undo()
    assert restore_bundle(path, str(tmp_path / "new")) == 4


def test_a_record_without_checkpoints_is_replaced(path, tmp_path):
    """That of a session that was killed before its first checkpoint."""
    open_run(str(tmp_path / "new"), IDENTITY, OptimConfig)
    assert restore_bundle(path, str(tmp_path / "new")) == 4


def test_a_bundle_is_no_network(path):
    with refused("holds a whole run, not one network: give it to tracking.load"):
        load_file(path)


def text(value):
    return torch.tensor(list(value.encode()), dtype=torch.uint8)


RECORD_OF_NONE = text('{"kind": "toy", "config": {}, "tokenizer": null, "checkpoints": []}')
SHARED = torch.zeros(40_000, dtype=torch.uint8)
HOSTILE = {
    "a path": {"../x.pt": text("x")},
    "an absolute path": {"/tmp/x.pt": text("x")},
    "a path with a folder": {"a/x.pt": text("x")},
    "another file": {"setup.py": text("x")},
    "a hidden file": {".x.pt": text("x")},
    "a line end": {"x.pt\n": text("x")},
    "a number as a name": {7: text("x")},
    "numbers": {"x.pt": torch.ones(3)},
    "two dimensions": {"x.pt": text("xx")[None]},
    "a text": {"x.pt": "x"},
    "shared values": {f"x{i}.pt": SHARED for i in range(9)},
    "an expanded tensor": {"x.pt": torch.zeros(1, dtype=torch.uint8).expand(10**9)},
    "a step over values": {"x.pt": SHARED[::2]},
    "no record": {"run.json": None},
    "no json": {"run.json": text("{")},
    "a record of nothing": {"run.json": RECORD_OF_NONE},
    "a file missing": {"b_opt000004.pt": None},
    "a list missing": {"data-": None},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_others_are_one_sentence_and_write_nothing(path, tmp_path, name):
    files, changed = torch.load(path, weights_only=True)["files"], HOSTILE[name]
    removed = tuple(start for start, value in changed.items() if value is None)
    kept = {name: value for name, value in files.items() if not name.startswith(removed)}
    given = {name: value for name, value in changed.items() if value is not None}
    torch.save({"bundle": 1, "files": kept | given}, tmp_path / "bad.pth")
    with pytest.raises(DamagedError, match=r"bad\.pth is damaged") as error:
        restore_bundle(str(tmp_path / "bad.pth"), str(tmp_path / "new"))
    assert "\n" not in str(error.value) and not (tmp_path / "new").exists()


@pytest.mark.parametrize("content", [{"bundle": 1}, {"bundle": "1", "files": {}}, {"bundle": 1, "files": []}, [1], {}])
def test_other_contents_are_one_sentence(tmp_path, content):
    torch.save(content, tmp_path / "bad.pth")
    with damaged("bad.pth"):
        restore_bundle(str(tmp_path / "bad.pth"), str(tmp_path / "new"))


def test_a_flipped_bit_and_a_cut_are_noticed(path, tmp_path):
    whole = bytearray((tmp_path / "b.pth").read_bytes())
    (tmp_path / "b.pth").write_bytes(whole[: len(whole) // 2])
    with damaged("truncated"):
        restore_bundle(path, str(tmp_path / "new"))
    place = whole.index(b"PK\x03\x04", 5000) - 40
    whole[place] ^= 1
    (tmp_path / "b.pth").write_bytes(whole)
    with pytest.raises(DamagedError):
        restore_bundle(path, str(tmp_path / "new"))
    assert not (tmp_path / "new").exists()


def test_a_newer_format_is_named(tmp_path):
    torch.save({"bundle": 2, "files": {}}, tmp_path / "b.pth")
    with refused("newer than this version reads"):
        restore_bundle(str(tmp_path / "b.pth"), str(tmp_path / "new"))


def test_discarding_a_run_removes_its_files_and_no_others(tmp_path):
    make_run(tmp_path / "run")
    discard_run(str(tmp_path / "run"))
    assert set(os.listdir(tmp_path / "run")) == {"log.txt", "progress.csv", "progress.jsonl"}
    assert read_run(str(tmp_path / "run")) is None
    discard_run(str(tmp_path / "run"))


# ----------------------------------------------------------------------------------------------------- several networks


def written(states, path):
    file = io.BytesIO()
    write_file(file, networks_content("ema", IDENTITY, 3, 24, states))
    path.write_bytes(file.getvalue())
    return load_file(str(path))


def test_several_networks_in_one_file_are_told_apart(tmp_path):
    states = {"unet1": {"w": torch.ones(1)}, "unet0": {"a.b": torch.zeros(2)}}
    content = written(states, tmp_path / "m.pt")
    assert content["trainee"] == "" and list(content["state"]) == ["unet0.a.b", "unet1.w"]
    parts = networks_in(content, ["unet0", "unet1", "unet10"])
    assert {name: list(part["state"]) for name, part in parts.items()} == {"unet0": ["a.b"], "unet1": ["w"]}
    assert parts["unet1"]["trainee"] == "unet1"


def test_a_single_network_is_a_file_as_any_other(tmp_path):
    content = written({"unet1": {"unet1.w": torch.ones(1)}}, tmp_path / "m.pt")
    assert content["trainee"] == "unet1" and list(content["state"]) == ["unet1.w"]
    assert networks_in(content, ["unet1"]) == {}
    assert networks_in(written({"": {"w": torch.ones(1)}}, tmp_path / "n.pt"), [""]) == {}
