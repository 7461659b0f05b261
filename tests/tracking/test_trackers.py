import hashlib
import io
import json
import sys
from unittest.mock import Mock, call

import numpy as np
import pytest
from PIL import Image
from refusing import refused

from diff_dalle.tracking.tracker import Run, Table, Tracker
from diff_dalle.tracking.trackers import TRACKERS, Trackers, TrackingConfig, check_trackers, create_trackers

GRID = np.zeros((4, 6, 3), dtype=np.uint8)
TABLE = Table({"caption": ["a cat", "two dogs"], "sampled": np.stack([GRID, GRID + 200])})


@pytest.mark.parametrize("name", TRACKERS)
def test_every_tracker(name, tmp_path, offline):
    """Each accepts all calls, twice in the same log directory, as in a resumed run."""
    for step in (0, 10):
        settings = {"training": {"lr": 3e-4, "betas": [0.9, 0.999]}, "steps": step}
        tracker = create_trackers(TrackingConfig((name,)), str(tmp_path), settings, step, total_steps=20)
        tracker.log(step + 1, {"loss": 0.5})
        tracker.log(step + 2, {"loss": float("nan"), "held_out/loss": 1.0, "samples": 7})
        tracker.images(step + 2, "fixed/prompts", GRID)
        tracker.table(step + 2, "fixed/table", TABLE)
        tracker.progress(step + 3)
        tracker.note("a note")
        tracker.finish()
        assert list(tracker.members) == [name]


def test_one_failing_service_stops_neither_the_run_nor_the_others():
    """It is reported once and removed; the others get all calls."""
    before, broken, after = (Mock(Tracker, optional=optional) for optional in (False, True, False))
    broken.log.side_effect = [None, OSError("gone")]
    trackers = Trackers({"before": before, "service": broken, "after": after})
    for step in (1, 2, 3):
        trackers.log(step, {"loss": step})
    trackers.finish()
    assert broken.mock_calls == [call.log(1, {"loss": 1}), call.log(2, {"loss": 2})]
    for other in (before, after):
        other.note.assert_called_once_with(
            "Tracker service is turned off after an error; training continues: OSError: gone"
        )
        assert other.log.mock_calls == [call(step, {"loss": step}) for step in (1, 2, 3)]
        assert other.mock_calls[-1] == call.finish()


def test_a_failing_local_file_ends_the_run():
    member = Mock(Tracker, optional=False)
    member.log.side_effect = OSError("gone")
    with pytest.raises(OSError, match="gone"):
        Trackers({"csv": member}).log(1, {"loss": 1})


def test_arrays_that_are_not_images_are_refused():
    trackers = Trackers({})
    for bad in (GRID.astype(np.float32), GRID[0], GRID.transpose(2, 0, 1)):
        with pytest.raises(TypeError, match="uint8"):
            trackers.images(1, "bad", bad)
        with pytest.raises(TypeError, match="uint8"):
            trackers.table(1, "bad", Table({"caption": ["a"], "sampled": [bad]}))


def test_a_table_reaches_the_members_whole():
    recorder = Mock(Tracker)
    trackers = Trackers({"recorder": recorder, "without tables": Tracker()})
    trackers.table(3, "samples", TABLE)
    assert recorder.mock_calls == [call.table(3, "samples", TABLE)]
    with pytest.raises(ValueError, match="longer"):
        trackers.table(3, "samples", Table({"caption": ["a"], "sampled": [GRID, GRID]}))


def test_unknown_and_repeated_names():
    with refused("trackers is 'tensorbord', but must be one of .*; did you mean tensorboard"):
        TrackingConfig(("console", "tensorbord"))
    with refused("lists csv twice"):
        TrackingConfig(("csv", "console", "csv"))


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_missing_extra(name, tmp_path, monkeypatch):
    """The error names the extra to install."""
    for module in (name, "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, module, None)
    with refused(rf"pip install 'diff_dalle\[{name}\]'"):
        TRACKERS[name](Run(str(tmp_path)))
    with refused(rf"pip install 'diff_dalle\[{name}\]'`, or remove {name} from trackers$"):
        check_trackers(TrackingConfig(("console", name)))
    check_trackers(TrackingConfig())


def test_tensorboard_hides_repeated_steps(tmp_path):
    """After a resume every step has one value, that of the later session."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first, value in ((0, 1.0), (2, 2.0)):
        tracker = TRACKERS["tensorboard"](Run(str(tmp_path), step=first))
        for step in range(first + 1, first + 4):
            tracker.log(step, {"loss": value})
        tracker.finish()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("loss")
    assert [(event.step, event.value) for event in events] == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0), (5, 2.0)]


def test_wandb_shows_captions_beside_pictures(tmp_path, offline):
    """A row for each sample, a picture of its own in each cell that is one."""
    tracker = TRACKERS["wandb"](Run(str(tmp_path)))
    tracker.table(7, "samples_table", TABLE)
    tracker.finish()
    staged = {path.read_bytes() for path in (tmp_path / "data").rglob("*") if path.is_file()}
    (table,) = (json.loads(data) for data in staged if data.startswith(b'{"_type": "table"'))
    assert table["columns"] == ["caption", "sampled"] and [row[0] for row in table["data"]] == ["a cat", "two dogs"]
    pictures = {hashlib.sha256(data).hexdigest(): data for data in staged}
    for row, expected in zip(table["data"], TABLE.columns["sampled"], strict=True):
        with Image.open(io.BytesIO(pictures[row[1]["sha256"]])) as picture:
            assert np.array_equal(np.asarray(picture), expected)


def test_secrets_reach_neither_notes_nor_services(tmp_path, monkeypatch):
    url, seen = "https://user:word@host/a.tar?sig=abc", []
    monkeypatch.setitem(TRACKERS, "csv", lambda run: seen.append(run.settings) or Mock(Tracker))
    tracker = create_trackers(TrackingConfig(("csv",)), str(tmp_path), {"data": {"data_dir": (url, "a"), "n": 1}})
    tracker.note(f"replaced {url} : 7")
    tracker.members["csv"].note.assert_called_once_with("replaced https://***@host/a.tar?*** : 7")
    assert seen == [{"data": {"data_dir": ["https://***@host/a.tar?***", "a"], "n": 1}}]


@pytest.mark.parametrize(
    ("settings", "same"),
    [({}, True), ({"wandb_resume": "never"}, False), ({"wandb_run_id": "given"}, True)],
)
def test_which_wandb_run_a_session_logs_to(settings, same, tmp_path, offline):
    """auto: that of the log directory, or the given one, also when a setting has changed; never: a new one in each
    session."""
    ids = []
    for step in (0, 10):
        config = TrackingConfig(("wandb",), **settings)
        tracker = create_trackers(config, str(tmp_path), {"iterations": step}, step)
        ids.append(tracker.members["wandb"].run.id)
        tracker.finish()
    assert (ids[0] == ids[1]) is same and ids[1] == (tmp_path / "wandb_run_id.txt").read_text()
    assert "given" in ids or "wandb_run_id" not in settings


def test_a_wandb_run_that_must_exist(tmp_path, monkeypatch):
    """It is asked for by its id, whatever the log directory says."""
    wandb, asked = pytest.importorskip("wandb"), []

    def init(**options):
        asked.append(options)
        raise wandb.errors.UsageError("no such run")

    monkeypatch.setattr(wandb, "init", init)
    (tmp_path / "wandb_run_id.txt").write_text("other")
    config = TrackingConfig(("wandb",), wandb_run_id="given", wandb_resume="must")
    with refused("wandb does not start"):
        create_trackers(config, str(tmp_path), {})
    assert (asked[0]["id"], asked[0]["resume"]) == ("given", "must")


def test_wandb_settings_that_contradict_each_other_are_refused():
    with refused("wandb_resume is must, but wandb_run_id is empty"):
        TrackingConfig(("wandb",), wandb_resume="must")
    with refused("wandb_run_id is given, but wandb_resume is never"):
        TrackingConfig(("wandb",), wandb_resume="never", wandb_run_id="a")
