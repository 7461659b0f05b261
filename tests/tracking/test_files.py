import csv
import json
import math
import os

import numpy as np
import pytest
from PIL import Image
from refusing import refused

from diff_dalle import storage
from diff_dalle.tracking.files import CsvLog, JsonLog, SampleGrids, TextLog
from diff_dalle.tracking.tracker import Run, Table


def rows(folder):
    with open(folder / "progress.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def objects(folder):
    return [json.loads(line) for line in (folder / "progress.jsonl").read_text().splitlines()]


def test_csv_grows_columns(tmp_path):
    """A name that appears later gets a column, and no earlier row changes."""
    log = CsvLog(Run(str(tmp_path)))
    log.log(1, {"loss": 0.1})
    log.log(2, {"loss": 1 / 3, 'a, "b"': 2})
    log.log(3, {"grad": math.nan})
    assert rows(tmp_path) == [
        {"step": "1", "loss": "0.1", 'a, "b"': "", "grad": ""},
        {"step": "2", "loss": repr(1 / 3), 'a, "b"': "2", "grad": ""},
        {"step": "3", "loss": "", 'a, "b"': "", "grad": "nan"},
    ]


@pytest.mark.parametrize(("tracker", "read"), [(CsvLog, rows), (JsonLog, objects)])
def test_resume_drops_what_will_be_logged_again(tmp_path, tracker, read):
    """Rows after the resumed step and an incomplete last line are dropped; the file ends as in an uninterrupted run."""
    folders = [tmp_path / name for name in ("whole", "resumed")]
    for folder in folders:
        folder.mkdir()
    whole, first = (tracker(Run(str(folder))) for folder in folders)
    for step in range(10, 80, 10):
        whole.log(step, {"loss": step / 7})
    for step in range(10, 60, 10):
        first.log(step, {"loss": step / 7})
    for path in folders[1].iterdir():
        path.write_bytes(path.read_bytes()[:-3])
    second = tracker(Run(str(folders[1]), step=30))
    for step in range(40, 80, 10):
        second.log(step, {"loss": step / 7})
    assert read(folders[0]) == read(folders[1])
    tracker(Run(str(folders[1]), step=0))
    assert read(folders[1]) == []


def test_foreign_csv_is_left_alone(tmp_path):
    (tmp_path / "progress.csv").write_text("epoch,loss\n1,2\n")
    with refused(r"progress\.csv has no column step"):
        CsvLog(Run(str(tmp_path)))
    assert (tmp_path / "progress.csv").read_text() == "epoch,loss\n1,2\n"


@pytest.mark.parametrize(
    ("tracker", "name", "content"),
    [
        (CsvLog, "progress.csv", "step,loss\n1,2\nx,3\n"),
        (CsvLog, "progress.csv", "loss,step\n1\n"),
        (JsonLog, "progress.jsonl", '{"step": 1}\n{"ste\n'),
        (JsonLog, "progress.jsonl", "[1]\n"),
    ],
)
def test_damage_is_named(tmp_path, tracker, name, content):
    (tmp_path / name).write_text(content)
    with refused(f"{name} is damaged"):
        tracker(Run(str(tmp_path), step=5))
    assert (tmp_path / name).read_text() == content


def test_json_stays_json(tmp_path):
    """JSON has no numbers that are not finite."""
    JsonLog(Run(str(tmp_path))).log(5, {"loss": math.inf, "samples": 7})
    assert objects(tmp_path) == [{"step": 5, "loss": None, "samples": 7}]


def test_text_log_keeps_everything(tmp_path):
    """Tables and notes of all sessions, in order."""
    for step in (0, 20):
        log = TextLog(Run(str(tmp_path), step=step))
        log.log(step + 10, {"loss": 0.012345, "samples": 128000.0})
        log.note("saved")
    text = (tmp_path / "log.txt").read_text()
    words = ["started", "| step    | 10     |", "saved", "resumed at step 20", "| step    | 30     |", "saved"]
    position = -1
    for word in words:
        position = text.index(word, position + 1)
    assert "-" * 20 + "\n| loss    | 0.0123 |\n| samples | 128000 |\n| step    | 10     |\n" + "-" * 20 + "\n" in text


def test_sample_grids(tmp_path):
    """The written image equals the grid; a slash in its name makes no folder."""
    grid = np.random.default_rng(0).integers(0, 256, (6, 9, 3), dtype=np.uint8)
    SampleGrids(Run(str(tmp_path))).images(200, "ema/fixed", grid)
    with Image.open(tmp_path / "samples" / "ema_fixed_000200.png") as image:
        assert np.array_equal(np.asarray(image), grid)


def test_the_texts_of_a_table_are_beside_the_grids(tmp_path):
    """A line for each row, those of the latest table; no file without texts."""
    pictures, grids = np.zeros((2, 4, 4, 3), np.uint8), SampleGrids(Run(str(tmp_path)))
    for step, last in ((1, "old"), (2, "a  dög\nruns")):
        grids.table(step, "ema/table", Table({"caption": ["a cat", last], "sampled": pictures}))
    grids.table(2, "silent", Table({"caption": ["", ""], "sampled": pictures}))
    (path,) = (tmp_path / "samples").iterdir()
    assert path.name == "ema_table.txt" and path.read_bytes().decode() == "a cat\na dög runs\n"


def test_remote_log_directory(tmp_path, monkeypatch):
    """Files that cannot be appended to are rewritten, with the same content."""
    store = {}
    monkeypatch.setattr(storage, "is_remote", lambda path: True)
    monkeypatch.setattr(storage, "exists", store.__contains__)
    monkeypatch.setattr(storage, "read_text", lambda path: store[path].decode())
    monkeypatch.setattr(storage, "write_bytes", store.__setitem__)
    for tracker in (CsvLog, JsonLog, TextLog):
        log = tracker(Run("gs://bucket/run"))
        for step in (1, 2):
            log.log(step, {"loss": 0.5})
    assert store["gs://bucket/run/progress.csv"] == b"step,loss\n1,0.5\n2,0.5\n"
    assert store["gs://bucket/run/progress.jsonl"] == b'{"step": 1, "loss": 0.5}\n{"step": 2, "loss": 0.5}\n'
    assert store["gs://bucket/run/log.txt"].count(b"| loss | 0.5 |") == 2


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux's device that is always full")
def test_a_full_disk_is_named(tmp_path):
    log = JsonLog(Run(str(tmp_path)))
    log.path = "/dev/full"
    with refused("/dev/full cannot be written: the disk is full"):
        log.log(1, {"loss": 0.5})
