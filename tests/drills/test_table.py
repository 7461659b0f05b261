"""The table of the drill: which faults with which kinds, and what counts as passed."""

import importlib.util
import json
import random
import sys

import pytest
from script_running import ROOT

from diff_dalle.config import InputError
from drills import table as drill_table
from drills.contract import Fault, Skipped, require
from drills.place import KINDS, Place
from drills.table import GROUPS, DrillConfig, Row, cells, drill, table, write_table


class FakeBench:
    """Places without data."""

    quick, seed = True, 0

    def __init__(self, folder):
        self.folder = self.world = folder

    def place(self, kind):
        path = self.folder / f"{len(list(self.folder.iterdir()))}"
        path.mkdir()
        return Place(self, kind, path, random.Random(0))


def make_fault(act, **changed):
    return Fault(
        **{"group": "g", "name": "n", "promised": "p", "drill": act, "quick_kinds": 1, "every_kind": True, **changed}
    )


def seen(place):
    return "as promised"


def deviates(place):
    require(False, "not as promised")


def skips(place):
    raise Skipped("not here")


def fails(place):
    raise OSError("the drill's own")


@pytest.mark.parametrize(
    ("act", "result", "words"),
    [
        (seen, "PASS", "as promised"),
        (deviates, "FAIL", "not as promised"),
        (skips, "SKIP", "not here"),
        (fails, "FAIL", "the drill failed: OSError"),
    ],
)
def test_a_fault_becomes_a_row(tmp_path, act, result, words):
    row = drill(make_fault(act), "generator", FakeBench(tmp_path))
    assert (row.group, row.fault, row.promised, row.kind, row.result) == ("g", "n", "p", "generator", result)
    assert words in row.seen and not list(tmp_path.iterdir())


def test_the_folder_of_a_failed_fault_is_kept_on_request(tmp_path):
    row = drill(make_fault(deviates), "generator", FakeBench(tmp_path), keep=True)
    (kept,) = tmp_path.iterdir()
    assert str(kept) in row.seen


def test_the_long_form_drills_every_kind_and_the_quick_form_takes_them_in_turn():
    faults = [fault for group in GROUPS.values() for fault in group.faults]
    long = list(cells(DrillConfig()))
    assert len(long) == sum(len(KINDS) if fault.every_kind else 1 for fault in faults)
    quick = list(cells(DrillConfig(quick=True)))
    assert 0 < len(quick) < len(long) / 2
    assert {kind for fault, kind in quick if fault.quick_kinds == 1 and fault.every_kind} == set(KINDS)
    assert len({fault.name for fault in faults}) == len(faults)


def test_groups_and_kinds_are_chosen():
    chosen = list(cells(DrillConfig(faults=("ends",), kinds=("classifier",))))
    assert {(fault.group, kind) for fault, kind in chosen} == {("ends", "classifier")}
    for bad in ({"faults": ("end",)}, {"kinds": ("clasifier",)}, {"jobs": 0}):
        with pytest.raises(InputError):
            DrillConfig(**bad)


ROWS = [
    Row("g", "a | b", "generator", "ends", "ended", "PASS", 1.2),
    Row("g", "c", "generator", "ends", "hangs\nfor long", "FAIL", 3),
]


def test_the_table_counts_and_is_written(tmp_path):
    text = table(ROWS)
    assert "| g | a / b | generator | ends | ended | PASS | 1 |" in text and "hangs for long" in text
    assert text.endswith("2 rows: 1 PASS, 1 FAIL, 0 SKIP")
    write_table(ROWS, str(tmp_path / "out"))
    assert (tmp_path / "out/drill.md").read_text() == text + "\n"
    assert [row["result"] for row in json.loads((tmp_path / "out/drill.json").read_text())] == ["PASS", "FAIL"]


@pytest.mark.parametrize(("rows", "status"), [(ROWS[:1], None), (ROWS, 1)])
def test_the_script_fails_with_a_failed_row(monkeypatch, rows, status):
    spec = importlib.util.spec_from_file_location("drill_script", ROOT / "scripts/drill.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setattr(script, "run_drill", lambda config: rows)
    monkeypatch.setattr(sys, "argv", ["drill.py"])
    if status is None:
        script.main()
        return
    with pytest.raises(SystemExit) as left:
        script.main()
    assert left.value.code == status


def test_all_cells_are_drilled(monkeypatch, tmp_path):
    monkeypatch.setattr(drill_table, "Bench", lambda folder, seed, quick: FakeBench(tmp_path))
    monkeypatch.setattr(
        drill_table, "cells", lambda config: [(make_fault(seen), "generator"), (make_fault(fails), "upsampler")]
    )
    rows = drill_table.run_drill(DrillConfig(jobs=1))
    assert [(row.kind, row.result) for row in rows] == [("generator", "PASS"), ("upsampler", "FAIL")]
