"""Injections: at the planned pass of a point, on the planned rank, and nowhere else."""

import math
from types import SimpleNamespace

import pytest
import torch
from forking import ends, start

from diff_dalle import storage
from diff_dalle.batch import Batch, Conditioning
from diff_dalle.data.loader import Loader
from drills import inside
from drills.inside import ACTIONS, POINTS, POISONS, Injection, install, planned
from drills.processes import environment


@pytest.fixture
def passes(monkeypatch):
    """Passes of a point of the tests, as a function, and the actions that were taken."""
    taken, installed = [], []
    monkeypatch.setitem(POINTS, "here", installed.append)
    monkeypatch.setitem(ACTIONS, "note", taken.append)

    def go(count):
        for _ in range(count):
            for passed in reversed(installed):  # the one that was installed last wraps the others
                passed()
        return taken

    return go


def test_an_action_is_taken_once_at_its_pass(passes):
    install([Injection("here", 3, "note", "a")])
    assert passes(2) == [] and passes(1) == ["a"] and passes(5) == ["a"]


def test_actions_of_one_pass_are_taken_in_the_order_of_the_plan(passes):
    install([Injection("here", 1, "note", "first"), Injection("here", 1, "note", "second")])
    assert passes(1) == ["first", "second"]


def test_only_the_planned_rank_is_injected(passes, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    install([Injection("here", 1, "note", "zero", 0), Injection("here", 1, "note", "one", 1)])
    assert passes(1) == ["one"]


def test_a_write_is_counted_over_all_files(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(storage, "atomic_writer", storage.atomic_writer)  # restored afterwards
    POINTS["write"](lambda: seen.append(None))
    for name in "ab":
        with storage.atomic_writer(str(tmp_path / name)) as file:
            file.write(b"1")
            file.write(b"2")
    assert len(seen) == 4 and (tmp_path / "b").read_bytes() == b"12"


def test_the_wrapper_runs_the_script_as_it_is_and_with_a_fault(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\nprint(__name__, sys.argv[1:])\nos.replace(sys.argv[1], sys.argv[1])\nprint('end')"
    )
    command = ["-m", "drills.inside", str(script), str(script), "--b"]
    plain, killed = ends(
        [start(command, environment()), start(command, environment(**planned(Injection("rename", 1, "kill"))))]
    )
    assert plain[0] == 0 and plain[1].startswith("__main__ ['") and plain[1].endswith("end\n")
    assert killed[0] == -9 and "end" not in killed[1]


@pytest.mark.parametrize("action", ["truncate", "rewrite", "delete", "fifo", "folder"])
def test_shards_are_changed(tmp_path, action):
    data = bytes(range(256)) * 8
    (tmp_path / "a.tar").write_bytes(data)
    (tmp_path / "b.txt").write_bytes(b"other")
    ACTIONS[action](str(tmp_path))
    path = tmp_path / "a.tar"
    after = path.read_bytes() if path.is_file() else None
    expected = {"truncate": data[: len(data) // 3], "rewrite": data[1024:] + data[:1024]}
    assert after == expected.get(action) and (tmp_path / "b.txt").read_bytes() == b"other"
    assert path.exists() == (action != "delete") and path.is_dir() == (action == "folder")


def test_the_clock_goes_back(monkeypatch):
    now = inside.time.time()
    monkeypatch.setattr(inside.time, "time", inside.time.time)
    ACTIONS["clock_back"]("1000")
    assert now - 1001 < inside.time.time() < now - 900


def batch(value=0.5):
    images = torch.full((2, 3, 4, 4), value)
    return Batch(images, Conditioning(), torch.arange(2))


def test_one_image_of_one_batch_is_poisoned(monkeypatch):
    monkeypatch.setattr(Loader, "batches", lambda self, position: (batch() for _ in range(4)))
    POISONS["images"](range(2, 3), math.inf)
    counts = [int(each.images.isinf().sum()) for each in Loader.batches(SimpleNamespace(), 0)]
    assert counts == [0, 1, 0, 0]
