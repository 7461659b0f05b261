"""Loaders: local files, URLs, wandb."""

import io
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from file_server import serving
from refusing import refused

from diff_dalle.tracking import loader
from diff_dalle.tracking.loader import LoaderConfig, fetch_source, source_path
from diff_dalle.tracking.trackers import TrackingConfig

pytestmark = pytest.mark.usefixtures("fast_retries")


@pytest.fixture
def server():
    with serving() as server:
        server.files = {"/a/latest.pth": b"weights" * 100}
        yield server


def loaded(tmp_path):
    folder = tmp_path / "loaded"
    return sorted(os.listdir(folder)) if folder.exists() else []


def fetch(tmp_path, kind, **settings):
    return fetch_source(LoaderConfig(kind, **settings), str(tmp_path / "loaded"))


def assert_refused(tmp_path, server, words, path="/a/latest.pth"):
    """In words, and nothing is left."""
    with refused(words):
        fetch(tmp_path, "url", url=server.url(path))
    assert loaded(tmp_path) == []


def test_a_local_file_stays_where_it_is(tmp_path):
    (tmp_path / "a.pth").write_text("x")
    for kind, settings in (("local", {"file_path": f"{tmp_path}/a.pth"}), ("url", {"url": f"file://{tmp_path}/a.pth"})):
        assert fetch(tmp_path, kind, **settings) == str(tmp_path / "a.pth") and not loaded(tmp_path)


@pytest.mark.parametrize("config", [("local", "file_path", "{}/b.pth"), ("url", "url", "file://{}/b.pth")])
def test_a_missing_file_is_one_sentence(tmp_path, config):
    kind, name, value = config
    with refused(rf"b.pth does not exist, but load_from {kind} names it"):
        fetch(tmp_path, kind, **{name: value.format(tmp_path)})


def test_a_url_is_downloaded_across_lost_connections(tmp_path, server):
    server.cut = 2
    config = LoaderConfig("url", url=server.url("/a/latest.pth?token=7"))
    path = fetch_source(config, str(tmp_path / "loaded"))
    assert path == source_path(config, str(tmp_path / "loaded")) == str(tmp_path / "loaded" / "latest.pth")
    assert Path(path).read_bytes() == b"weights" * 100 and loaded(tmp_path) == ["latest.pth"]


@pytest.mark.parametrize(
    ("url", "name"), [("http://h/a%20b?x", "a_20b"), ("http://h/..", "downloaded.pth"), ("http://h/", "downloaded.pth")]
)
def test_downloads_have_plain_names(url, name):
    assert source_path(LoaderConfig("url", url=url), "folder") == os.path.join("folder", name)


def test_a_server_that_has_no_file_or_is_away_leaves_nothing(tmp_path, server):
    assert_refused(tmp_path, server, "does not exist", "/b.pth")
    server.busy = 10**6
    assert_refused(tmp_path, server, "is not available")


def test_a_download_has_a_bounded_size(tmp_path, server, monkeypatch):
    """Whether the server tells the size or not."""
    monkeypatch.setattr(loader, "MAX_BYTES", 600)
    assert_refused(tmp_path, server, "has 700 bytes, more than 600")
    monkeypatch.setattr(loader.storage, "size_and_tag", lambda url: (-1, ""))
    assert_refused(tmp_path, server, "has more than 600 bytes")


def test_a_download_that_ends_early_leaves_nothing(tmp_path, server, monkeypatch):
    monkeypatch.setattr(loader.storage, "open_read", lambda url: io.BytesIO(b"weights"))
    assert_refused(tmp_path, server, "ended after 7 of 700 bytes")


def test_a_file_of_wandb_is_downloaded(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    asked = []

    def download(name, root):
        asked.append(name)
        if "missing" in name:
            raise RuntimeError("no such file")
        target = Path(root, name)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(b"weights")

    def run(path):
        if "unknown" in path:
            raise ValueError("Could not find run")
        asked.append(path)
        return SimpleNamespace(file=lambda name: SimpleNamespace(download=lambda root, replace: download(name, root)))

    monkeypatch.setattr(wandb, "Api", lambda: SimpleNamespace(run=run))
    folder = str(tmp_path / "loaded")
    path = fetch(tmp_path, "wandb", wandb_run_path="e/p/i", wandb_file_path="a/b.pth")
    assert Path(path).read_bytes() == b"weights" and path == os.path.join(folder, "a/b.pth")
    fetch_source(LoaderConfig("wandb", wandb_file_path="b.pth"), folder, resumed="e/p/logged")
    assert asked == ["e/p/i", "a/b.pth", "e/p/logged", "b.pth"]
    for settings, words in (
        ({"wandb_run_path": "e/p/i", "wandb_file_path": "missing.pth"}, "cannot be downloaded: no such file"),
        ({"wandb_run_path": "e/p/unknown", "wandb_file_path": "b.pth"}, "cannot be opened"),
        ({"wandb_file_path": "b.pth"}, "no run is resumed, so name one by wandb_run_path"),
    ):
        with refused(words):
            fetch(tmp_path, "wandb", **settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"load_from": "local"}, "file_path is missing"),
        ({"load_from": "url", "file_path": "a"}, "file_path has no effect with load_from url: it is for local"),
        ({"load_from": "url", "url": "pipe:cat x"}, "url is a command"),
        ({"load_from": "wandb", "wandb_file_path": "../a"}, "must be relative"),
        ({"load_from": "wandb", "wandb_file_path": "a", "wandb_run_path": "a"}, "entity/project/id"),
        ({"file_path": "a"}, "no effect with load_from null"),
    ],
)
def test_impossible_settings_are_refused(settings, words):
    with refused(words):
        LoaderConfig(**settings)


def test_the_resumed_wandb_run_is_known(tmp_path):
    (tmp_path / "wandb_run_id.txt").write_text("abc\n")

    def path(**settings):
        config = TrackingConfig(("wandb",), wandb_project="p", wandb_entity="e", **settings)
        return config.wandb_run_path(str(tmp_path))

    assert path() == "e/p/abc" and path(wandb_resume="must", wandb_run_id="xyz") == "e/p/xyz"
    assert path(wandb_resume="never") == ""
    assert TrackingConfig(("wandb",)).wandb_run_path(str(tmp_path)) == ""
