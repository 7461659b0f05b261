"""Reading the folder of a run, whole or damaged, finished or being written."""

import json
import math
import os

import numpy as np
import pytest
from PIL import Image

from diff_dalle.checkpoints.checkpoint import Identity
from diff_dalle.checkpoints.record import Record, save_record
from diff_dalle.config import InputError
from diff_dalle.tracking.files import CsvLog, JsonLog, SampleGrids
from diff_dalle.tracking.tracker import Run
from diff_dalle.web.watch_run import labels, read_watched, thinned


def lines(folder, *rows, name="progress.jsonl", end=""):
    text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    (folder / name).write_text(text + end)


def watched(folder):
    return read_watched(str(folder))


def record(folder, **training):
    save_record(str(folder), Record(Identity("generator", {"training": training}, None), [], {}, []))


def test_a_log_is_read_by_name(tmp_path):
    lines(
        tmp_path,
        {"step": 2, "loss": 0.5, "loss_q0": 0.1, "samples": 8},
        {"step": 4, "loss": 0.25, "loss_q0": None, "samples": 16},
        {"step": 4, "held_out/loss": 0.75},
    )
    run = watched(tmp_path)
    assert run.series == {
        "loss": [(2, 0.5), (4, 0.25)],
        "loss_q0": [(2, 0.1)],
        "samples": [(2, 8), (4, 16)],
        "held_out/loss": [(4, 0.75)],
    }
    assert (run.step, run.samples, run.batch, run.parts, run.notes) == (4, 16, 4.0, [""], [])


def test_what_the_trackers_write_is_read_alike(tmp_path):
    """Both logs, with values that are not finite, and a column that comes later; and the image grids."""
    for folder in ("json", "csv"):
        (tmp_path / folder).mkdir()
    described = [Run(str(tmp_path / folder)) for folder in ("json", "csv")]
    logs = [JsonLog(described[0]), CsvLog(described[1])]
    for log in logs:
        log.log(50, {"loss": 0.1 + 0.2, "samples": 3200})
        log.log(100, {"loss": math.nan, "samples": 6400})
        log.log(100, {"held_out/caption_swap_gap": -1.5e-7})
    found = [watched(tmp_path / folder) for folder in ("json", "csv")]
    assert found[0].series == found[1].series
    assert found[0].series["loss"] == [(50, 0.1 + 0.2)]
    assert found[0].series["held_out/caption_swap_gap"] == [(100, -1.5e-7)]
    grids = SampleGrids(described[0])
    for step in (100, 50):
        grids.images(step, "text/samples", np.zeros((2, 2, 3), np.uint8))
    (tmp_path / "json/samples/notes.txt").write_text("")
    shown = watched(tmp_path / "json").grids
    assert list(shown) == ["text_samples"] and list(shown["text_samples"]) == [50, 100]
    assert Image.open(shown["text_samples"][100]).size == (2, 2)


@pytest.mark.parametrize("cut", range(1, 20))
def test_a_line_that_is_being_written_waits(tmp_path, cut):
    """At every place it may be cut, for both formats: never a wrong value, and no complaint."""
    lines(tmp_path, {"step": 1, "loss": 0.5}, end=json.dumps({"step": 2, "loss": 0.0625})[:cut])
    run = watched(tmp_path)
    assert run.series == {"loss": [(1, 0.5)]} and not run.notes
    (tmp_path / "progress.jsonl").unlink()
    lines(tmp_path, "step,loss", "1,0.5", name="progress.csv", end="2,0.0625"[:cut])
    run = watched(tmp_path)
    assert run.series == {"loss": [(1, 0.5)]} and not run.notes


def test_damaged_lines_are_counted_and_left_out(tmp_path):
    bad = ['{"step": 3, "loss": 0.', "\0\0\0", "[1]", '{"loss": 1}', '{"step": -1}', '{"step": "x", "loss": 1}']
    bad += ["[" * 100_000, '{"step": 1e999}', '{"step": null}']
    lines(tmp_path, {"step": 1, "loss": 1.0}, *bad, {"step": 2, "loss": True, "lr": "fast", "x": [1], "y": 0.5})
    run = watched(tmp_path)
    assert run.series == {"loss": [(1, 1.0)], "y": [(2, 0.5)]}
    assert len(run.notes) == 1 and run.notes[0].startswith("9 lines of ") and "cannot be read" in run.notes[0]
    (tmp_path / "progress.jsonl").write_bytes(b'{"step": 1, "loss": 2}\n\xff\xfe\n{"step": 2, "loss": 1}\n')
    run = watched(tmp_path)
    assert run.series["loss"] == [(1, 2), (2, 1)] and run.notes[0].startswith("1 line of ")


def test_damaged_rows_of_a_table_are_counted_and_left_out(tmp_path):
    lines(tmp_path, "step,loss,lr", "1,0.5,", "2,0.4,1,7", "3,0.3", "", "x,1,1", "4,nan,inf", name="progress.csv")
    run = watched(tmp_path)
    assert run.series == {"loss": [(1, 0.5), (3, 0.3)]} and run.notes[0].startswith("2 lines of ")
    lines(tmp_path, "a,b", "1,2", name="progress.csv")
    assert watched(tmp_path).series == {}


def test_after_a_resumption_the_later_values_count(tmp_path):
    """Steps of both sessions, and one that only the first reached in between."""
    first = [{"step": step, "loss": float(step), "lr": 1.0} for step in (1, 2, 3, 4)]
    second = [{"step": step, "loss": step + 0.5} for step in (2, 4)]
    lines(tmp_path, *first, *second)
    run = watched(tmp_path)
    assert run.series["loss"] == [(1, 1.0), (2, 2.5), (4, 4.5)]
    assert run.series["lr"] == [(1, 1.0), (2, 1.0)]  # of step 2, which was logged again without it


def test_the_forecast(tmp_path):
    """4,000 samples that are left, at 40 samples a second: the harmonic mean of 30 and 60."""
    rows = [{"step": step, "samples": 10 * step, "samples_per_second": rate} for step, rate in ((100, 30), (200, 60))]
    lines(tmp_path, *rows)
    record(tmp_path, iterations=600, samples=0)
    run = watched(tmp_path)
    assert run.batch == 10 and run.last_step == 600 and run.samples_per_second == pytest.approx(40)
    assert run.seconds_left == pytest.approx(100)
    record(tmp_path, iterations=0, samples=2996)
    assert watched(tmp_path).last_step == 300
    record(tmp_path, iterations=250, samples=2996)
    assert watched(tmp_path).last_step == 250
    record(tmp_path, iterations=0, samples=0, hours=3.0)
    assert watched(tmp_path).last_step is None and watched(tmp_path).seconds_left is None
    record(tmp_path, iterations=200)
    assert watched(tmp_path).seconds_left == 0
    lines(tmp_path, {"step": 5, "loss": 1.0})
    assert watched(tmp_path).seconds_left is None


def test_old_throughput_is_forgotten(tmp_path):
    lines(tmp_path, *[{"step": step, "samples_per_second": 1000 if step < 20 else 8} for step in range(30)])
    assert watched(tmp_path).samples_per_second == pytest.approx(8)


def test_curves_over_samples(tmp_path):
    """The batch changes from 10 to 20; held-out values between log lines are interpolated."""
    rows = [{"step": 10, "samples": 100, "loss": 1.0}, {"step": 20, "samples": 300, "loss": 0.5}]
    lines(tmp_path, rows[0], {"step": 15, "held_out/loss": 2.0}, rows[1])
    run = watched(tmp_path)
    assert run.curve("loss") == [(10, 1.0), (20, 0.5)]
    assert run.curve("loss", "samples") == [(100, 1.0), (300, 0.5)]
    assert run.curve("held_out/loss", "samples") == [(200, 2.0)]
    assert run.curve("lr", "samples") == []


def test_runs_of_several_networks_have_parts(tmp_path):
    lines(tmp_path, {"step": 1, "unet0/loss": 1, "unet1/loss": 2, "unet1/held_out/loss": 3, "lr": 1})
    assert watched(tmp_path).parts == ["unet0/", "unet1/"]


def test_a_folder_without_a_run_is_one_sentence(tmp_path):
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(InputError, match="holds no run to watch: give a log directory, which has run.json or"):
            watched(folder)


def test_a_run_that_has_logged_nothing_and_a_damaged_record(tmp_path):
    record(tmp_path, iterations=10)
    run = watched(tmp_path)
    assert (run.step, run.series, run.kind, run.last_step) == (
        0,
        {},
        "generator",
        10,
    ) and "Nothing is logged" in run.notes[0]
    lines(tmp_path, {"step": 1, "loss": 1.0})
    (tmp_path / "run.json").write_text('{"kind": ')
    run = watched(tmp_path)
    assert run.step == 1 and run.last_step is None and "run.json is damaged" in run.notes[0]


def test_a_run_is_running_while_its_lock_is_fresh(tmp_path):
    lines(tmp_path, {"step": 1, "loss": 1.0})
    lock = tmp_path / "run.lock"
    assert not watched(tmp_path).running
    lock.write_text('{"pid": 1}')
    assert watched(tmp_path).running
    os.utime(lock, (0, 0))  # its process was killed
    assert not watched(tmp_path).running
    lock.write_text("")  # released
    assert not watched(tmp_path).running


def test_nothing_is_written(tmp_path):
    """Neither files nor their times change."""
    lines(tmp_path, {"step": 1, "loss": 1.0}, end='{"st')
    record(tmp_path, iterations=10)
    (tmp_path / "samples").mkdir()

    def state():
        return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in [tmp_path, *tmp_path.rglob("*")]}

    before = state()
    assert watched(tmp_path).step == 1
    assert state() == before


def test_long_curves_are_thinned_to_means():
    points = [(float(x), float(x % 2)) for x in range(1000)]
    found = thinned(points, 100)
    assert len(found) == 100 and found[0] == (4.5, 0.5) and found[-1] == (994.5, 0.5)
    assert thinned(points[:100], 100) == points[:100] and thinned([], 100) == []
    assert len(thinned(points[:101], 100)) <= 100


def test_labels_tell_runs_apart():
    assert labels(["runs/a", "runs/b/"]) == ["a", "b"]
    assert labels(["x/run", "y/run", "z/other"]) == ["x/run", "y/run", "other"]
