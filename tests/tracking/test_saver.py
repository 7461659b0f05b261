"""Savers: which files they keep where, and what happens when a place fails."""

import os
import urllib.request
from pathlib import Path
from unittest.mock import Mock, call

import pytest
from hub_server import LARGE
from refusing import refused

from diff_dalle.config import InputError
from diff_dalle.tracking.saver import SaverConfig, check_name, check_relative, fill_name
from diff_dalle.tracking.tracker import Saved, Tracker
from diff_dalle.tracking.trackers import TRACKERS, TrackingConfig, create_trackers

META = {"decoder.json": '{"url": "http://user:word@host/x"}'}


def saved(step=200, best=False, loss=0.25, trainees=("unet0", "unet1"), data=b"x"):
    forms = {
        name: lambda file, name=name: file.write(f"{name} {step} ".encode() + data) for name in ("checkpoint", "model")
    }
    return Saved(step, 8 * step, trainees, loss, best, forms)


def make(tmp_path, *savers, trackers=("log",)):
    config = TrackingConfig(trackers, savers=tuple(SaverConfig(**saver) for saver in savers))
    return create_trackers(config, str(tmp_path / "run"), {}, epoch_samples=1000, meta=META)


def save_and_finish(tracker, **settings):
    tracker.saved(saved(**settings))
    tracker.finish()


def log(tmp_path):
    return (tmp_path / "run" / "log.txt").read_text()


def test_a_local_saver(tmp_path, monkeypatch):
    """Relative to the working directory; the best only when it is; the configuration without secrets."""
    monkeypatch.chdir(tmp_path)
    tracker = make(
        tmp_path,
        {
            "save_latest_to": "out/unet{unet}_{step:06d}_{epoch}_{sample}_{samples_seen}.pth",
            "save_best_to": str(tmp_path / "best_{val_loss}.pth"),
            "save_meta_to": "meta",
            "save_type": "model",
        },
    )
    tracker.saved(saved(200, trainees=("unet1",)))
    tracker.saved(saved(300, best=True, loss=0.125))
    tracker.finish()
    assert (tmp_path / "out" / "unet1_000200_1_600_1600.pth").read_bytes() == b"model 200 x"
    assert (tmp_path / "out" / "unet0-1_000300_2_400_2400.pth").read_bytes() == b"model 300 x"
    assert [name for name in os.listdir(tmp_path) if name.startswith("best")] == ["best_0.125.pth"]
    assert (tmp_path / "meta" / "decoder.json").read_text() == '{"url": "http://***@host/x"}'


def test_without_a_file_the_settings_configure_the_run(tmp_path):
    config = TrackingConfig(("log",), savers=(SaverConfig(save_meta_to=str(tmp_path / "meta")),))
    create_trackers(config, str(tmp_path / "run"), {"optim": {"lr": 0.5}})
    assert '"lr": 0.5' in (tmp_path / "meta" / "config.json").read_text()


def test_a_local_saver_that_fails_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    tracker = make(tmp_path, {"save_latest_to": str(tmp_path / "file" / "latest.pth")})
    with refused("file"):
        tracker.saved(saved())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "set what is to be saved where"),
        ({"save_latest_to": "{stp}.pth"}, "save_latest_to has {stp}"),
        ({"save_best_to": "a/"}, "save_best_to is 'a/'"),
        ({"save_latest_to": "a", "save_best_to": "a"}, "each save needs its own path"),
        ({"save_to": "huggingface", "save_latest_to": "a"}, "huggingface_repo is missing"),
        ({"save_to": "huggingface", "save_latest_to": "a", "huggingface_repo": "a/b/c"}, "such as user/name"),
        ({"save_to": "huggingface", "save_latest_to": "../a", "huggingface_repo": "a/b"}, "must be relative"),
        ({"save_to": "huggingface", "save_meta_to": "/a", "huggingface_repo": "a/b"}, "save_meta_to is '/a'"),
        ({"save_to": "wandb", "save_latest_to": "a", "wandb_run_path": "a/b"}, "entity/project/id"),
        ({"save_latest_to": "a", "huggingface_repo": "a/b"}, "no effect with save_to local: it is for huggingface"),
        ({"save_to": "wandb", "save_latest_to": "a", "token_path": "a"}, "no effect with save_to wandb"),
    ],
)
def test_impossible_settings_are_refused(settings, words):
    with pytest.raises(InputError) as error:
        SaverConfig(**settings)
    assert words in str(error.value)


def test_two_savers_do_not_share_a_path():
    same = SaverConfig(save_latest_to="a.pth")
    with refused(r"savers\[1\].save_latest_to is 'a.pth', but another saver with the same"):
        TrackingConfig(savers=(same, same))
    TrackingConfig(savers=(same, SaverConfig("huggingface", "a.pth", huggingface_repo="a/b")))


# ------------------------------------------------------------------------------------------------- the Hugging Face hub

HUB = {"save_to": "huggingface", "huggingface_repo": "me/it"}
LATEST = {**HUB, "save_latest_to": "latest.pth"}


def test_the_hub_gets_small_and_large_files(tmp_path, hub):
    """The repository is made, private; two savers share it; what is there can be fetched."""
    tracker = make(
        tmp_path,
        {**HUB, "save_latest_to": "a/latest.pth", "save_best_to": "a/best.pth", "save_meta_to": "meta/"},
        {**HUB, "save_latest_to": "model.pth", "save_type": "model"},
    )
    tracker.saved(saved(200, data=b"l" * LARGE))
    tracker.saved(saved(300, best=True))
    tracker.finish()
    files = hub.repos["me/it"]
    assert files["a/best.pth"] == files["a/latest.pth"] == b"checkpoint 300 x" and files["model.pth"] == b"model 300 x"
    assert files["meta/decoder.json"].startswith(b"{") and hub.private == {"me/it"}
    assert "Saved a/best.pth to the repository me/it" in log(tmp_path)
    url = f"{hub.url}/me/it/resolve/main/a/latest.pth"
    with urllib.request.urlopen(urllib.request.Request(url, headers={"Authorization": "Bearer hf_right"})) as reply:
        assert reply.read() == b"checkpoint 300 x"
    assert all(data.startswith((b"checkpoint 200", b"model 200")) for data in hub.objects.values())


def test_a_large_file_arrives_whole_in_an_existing_repository(tmp_path, hub):
    """Although the hub is busy at first."""
    hub.busy, hub.repos["me/it"], data = 1, {"README.md": b"mine"}, os.urandom(3 * LARGE)
    save_and_finish(make(tmp_path, LATEST), data=data)
    assert hub.repos["me/it"] == {"README.md": b"mine", "latest.pth": b"checkpoint 200 " + data}
    assert len(hub.objects) == 1


def test_what_is_said_at_the_end_is_still_shown(tmp_path, hub, monkeypatch):
    shown = Mock(Tracker)
    monkeypatch.setitem(TRACKERS, "csv", lambda run: shown)
    save_and_finish(make(tmp_path, LATEST, trackers=("csv",)))
    said = f"Saved latest.pth to the repository me/it of {hub.url}"
    assert shown.mock_calls[-2:] == [call.note(said), call.finish()]


def test_a_hub_that_is_away_stops_nothing(tmp_path, hub, monkeypatch):
    """At the start and in the middle: reported, and sent by the next session."""
    hub.shutdown()
    hub.server_close()
    tracker = make(tmp_path, LATEST)
    tracker.saved(saved())
    tracker.progress(201)
    tracker.finish()
    assert "latest.pth was not saved to the repository me/it" in log(tmp_path)
    assert "the next session of this run will try again" in log(tmp_path)


def test_a_silent_hub_counts_as_away(tmp_path, hub, monkeypatch):
    """The client itself would wait without end."""
    monkeypatch.setattr("diff_dalle.storage.hub.SILENT_SECONDS", 0.1)
    monkeypatch.setattr("diff_dalle.tracking.stores.HURRY_SECONDS", 40.0)
    hub.silent = True
    tracker = make(tmp_path, LATEST)
    tracker.saved(saved())
    tracker.hurry()
    tracker.finish()
    assert "latest.pth was not saved to the repository me/it" in log(tmp_path)


def test_a_hub_that_refuses_in_mid_run_stops_nothing(tmp_path, hub):
    tracker = make(tmp_path, LATEST)
    hub.refuse = 403
    save_and_finish(tracker)
    assert "latest.pth was not saved" in log(tmp_path) and "permission denied" in log(tmp_path)


def test_a_wrong_token_is_known_before_training(tmp_path, hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with refused("huggingface_repo me/it cannot be used"):
        make(tmp_path, LATEST)
    (tmp_path / "token").write_text("hf_right\n")
    make(tmp_path, {**HUB, "save_latest_to": "latest.pth", "token_path": str(tmp_path / "token")}).finish()


def test_a_missing_login_is_known_before_training(tmp_path, hub, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with refused("needs a login: run `hf auth login`"):
        make(tmp_path, LATEST)


def test_the_missing_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with refused(r"pip install 'diff_dalle\[hub\]'`, or leave save_to huggingface out"):
        make(tmp_path, LATEST)


# ---------------------------------------------------------------------------------------------------------------- wandb


def test_the_logged_wandb_run_gets_files(tmp_path, offline):
    """Offline they lie in the run's folder, for `wandb sync`; a second save takes the place of the first."""
    wandb = {"save_to": "wandb", "save_latest_to": "a/latest.pth", "save_best_to": "best_{step}.pth"}
    tracker = make(tmp_path, wandb, trackers=("log", "wandb"))
    tracker.saved(saved(200))
    tracker.saved(saved(300, best=True))
    files = tracker.members["wandb"].run.settings.files_dir
    tracker.finish()
    for name in ("a/latest.pth", "best_300.pth"):
        assert Path(files, name).read_bytes() == b"checkpoint 300 x"
    assert "not saved" not in log(tmp_path)


def test_wandb_is_asked_to_send_files_at_once(tmp_path, offline, monkeypatch):
    """Not at the end of the run."""
    tracker = make(tmp_path, {"save_to": "wandb", "save_latest_to": "a/b"}, trackers=("wandb",))
    asked = []
    monkeypatch.setattr(tracker.members["wandb"].run, "save", lambda *paths, **options: asked.append((paths, options)))
    save_and_finish(tracker)
    (((path,), options),) = asked
    assert os.path.relpath(path, options["base_path"]) == os.path.join("a", "b") and options["policy"] == "now"


def test_wandb_without_a_run_is_refused(tmp_path):
    with refused("log to wandb too, or name a run by wandb_run_path"):
        make(tmp_path, {"save_to": "wandb", "save_latest_to": "a"})


def test_a_failing_wandb_stops_nothing(tmp_path, offline, monkeypatch):
    tracker = make(tmp_path, {"save_to": "wandb", "save_latest_to": "a"}, trackers=("log", "wandb"))
    monkeypatch.setattr(tracker.members["wandb"].run, "save", None)
    save_and_finish(tracker)
    assert "a was not saved to wandb: TypeError" in log(tmp_path)


def test_another_wandb_run_gets_files(tmp_path, monkeypatch, fast_retries):
    """Through the service's interface, without touching the run that is logged."""
    wandb = pytest.importorskip("wandb")
    sent = {}

    def upload(path, root):
        sent[os.path.relpath(path, root)] = Path(path).read_bytes()

    monkeypatch.setattr(wandb, "Api", api := Mock())
    api().run.return_value.upload_file = upload
    tracker = make(tmp_path, {"save_to": "wandb", "save_latest_to": "a/b.pth", "wandb_run_path": "e/p/i"})
    save_and_finish(tracker)
    assert sent == {os.path.join("a", "b.pth"): b"checkpoint 200 x"}
    api().run.assert_called_once_with("e/p/i")


# ---------------------------------------------------------------------------------------------------------------- names

VALUES = {"epoch": 3, "step": 200, "sample": 17, "samples_seen": 6417, "unet": "0-1", "val_loss": 0.123456}


@pytest.mark.parametrize(
    ("name", "filled"),
    [
        ("latest.pth", "latest.pth"),
        ("e{epoch}/s{step}_{sample}_{samples_seen}.pth", "e3/s200_17_6417.pth"),
        ("unet{unet}_{step:06d}.pth", "unet0-1_000200.pth"),
        ("{step:4}|{step:04}", " 200|0200"),
        ("best_{val_loss}.pth", "best_0.1235.pth"),
        ("best_{val_loss:.2f}.pth", "best_0.12.pth"),
        ("{{step}}{step}", "{step}200"),
    ],
)
def test_placeholders_are_filled(name, filled):
    check_name(name, "save_best_to", relative=False)
    assert fill_name(name, VALUES) == filled


def test_a_loss_that_is_not_known_is_none():
    assert fill_name("{val_loss}_{val_loss:.3f}.pth", {**VALUES, "val_loss": None}) == "none_none.pth"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("{stp}.pth", r"save_best_to has \{stp\}, but the placeholders are \{epoch\}, .*; did you mean step\?"),
        ("{step.real}.pth", "placeholders"),
        ("{step.__class__.__mro__}.pth", "placeholders"),
        ("{step[0]}.pth", "placeholders"),
        ("{0}.pth", "placeholders"),
        ("{}.pth", "placeholders"),
        ("{step!r}.pth", "leave !r out"),
        ("{step:>9}.pth", r"like that of \{step:06d\}"),
        ("{step:999999999}.pth", "a format must be"),
        ("{step:.2f}.pth", "a format must be"),
        ("{step:{epoch}}.pth", "a format must be"),
        ("{unet:02d}.pth", "a format must be"),
        ("{val_loss:06d}.pth", r"like that of \{val_loss:.4f\}"),
        ("{step.pth", "does not end"),
        ("step}.pth", "does not end"),
        ("", "must be the path of a file"),
        (" ", "must be the path of a file"),
        ("folder/", "must be the path of a file"),
        ("a\nb.pth", "must be the path of a file"),
    ],
)
def test_others_are_refused(name, words):
    with pytest.raises(InputError, match=words) as error:
        check_name(name, "save_best_to", relative=False)
    assert "save_best_to" in str(error.value)


@pytest.mark.parametrize("path", ["/etc/x", "../x", "a/../x", "a//x", "./x", "a\\x", "C:x", "s3://b/x", ""])
def test_names_in_a_repository_stay_inside(path):
    with refused("must be relative"):
        check_relative(path, "save_meta_to")
    check_relative("a/b.c/x.pth", "save_meta_to")


def test_absolute_paths_are_for_local_savers():
    check_name("/runs/x.pth", "save_latest_to", relative=False)
    with refused("must be relative"):
        check_name("/runs/x.pth", "save_latest_to", relative=True)
