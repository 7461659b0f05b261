"""hf:// on a hub of this machine: files, revisions, the cache, and what is said when something is in the way."""

import sys
import time
import types

import pytest
from hub_server import LARGE, hub_to_use
from refusing import refused

from diff_dalle import storage
from diff_dalle.config import InputError
from diff_dalle.storage import ChangedError
from diff_dalle.storage.hub import commit

REPO = "hf://me/it"


@pytest.fixture
def hub(monkeypatch, tmp_path):
    # The client itself asks again for a quarter of a minute.
    impatient = types.SimpleNamespace(**{**vars(time), "sleep": lambda seconds: None})
    monkeypatch.setattr("huggingface_hub.utils._http.time", impatient)
    with hub_to_use(monkeypatch, tmp_path / "cache") as server:
        yield server


@pytest.fixture
def files(tmp_path):
    """A small and a large file by their names in a repository."""
    for name, data in (("small", b"small"), ("large", b"l" * LARGE)):
        (tmp_path / name).write_bytes(data)
    return {"model.json": str(tmp_path / "small"), "weights/large.bin": str(tmp_path / "large")}


def test_files_come_in_one_commit_and_are_listed_and_read(hub, files):
    commit(REPO, files)
    assert hub.commits == ["diff_dalle: model.json, weights/large.bin"] and hub.private == {"me/it"}
    paths = [f"{REPO}/model.json", f"{REPO}/weights/large.bin"]
    assert storage.list_files(REPO, recursive=True) == paths
    assert all(storage.size_and_tag(path, listed=True) == storage.size_and_tag(path) for path in paths)
    assert storage.read_bytes(paths[0]) == b"small" and storage.read_bytes(paths[1], 3, 5) == b"l" * 5
    with storage.open_read(paths[1]) as stream:
        assert len(stream.read()) == LARGE
    assert storage.exists(REPO) and storage.exists(paths[0]) and not storage.exists(f"{REPO}/none.json")
    with refused(r"none\.json does not exist"):
        storage.read_bytes(f"{REPO}/none.json")


def test_a_file_is_fetched_once_and_again_when_it_has_changed(hub, files):
    commit(REPO, files, private=False)
    path = f"{REPO}/model.json"
    assert [storage.read_bytes(path) for _ in range(3)] == [b"small"] * 3 and hub.private == set()
    assert hub.sent.count("model.json") == 1
    state = storage.size_and_tag(path)
    storage.write_bytes(path, b"new")
    assert storage.read_bytes(path) == b"new" and hub.sent.count("model.json") == 2
    with pytest.raises(ChangedError, match="has changed"):
        storage.read_bytes(path, 0, None, state)


def test_a_revision_stays(hub, files):
    commit(REPO, files)
    storage.write_bytes(f"{REPO}/model.json", b"new")
    revision = next(name for name, old in hub.old["me/it"].items() if old)
    assert storage.read_bytes(f"{REPO}@{revision}/model.json") == b"small"
    assert storage.list_files(f"{REPO}@{revision}/") == [f"{REPO}@{revision}/model.json"]
    with refused(r"the repository me/it has no revision v9"):
        storage.read_bytes(f"{REPO}@v9/model.json")


def test_what_was_sent_is_not_sent_again(hub, files):
    """After an interruption between the large files and the commit."""
    hub.repos["me/it"] = {}
    commit(REPO, {"weights/large.bin": files["weights/large.bin"]})
    hub.repos["me/it"].clear()
    commit(REPO, files)
    assert len(hub.sent) == 1 and set(hub.repos["me/it"]) == {"model.json", "weights/large.bin"}


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("hf://me/none/a", "has no repository me/none that this login may see"),
        ("hf://me", "hf://me must be hf://USER/NAME, or"),
        ("hf://me/it/../a", "must be hf://USER/NAME"),
        ("hf://me/it/a\\..\\b", "must be hf://USER/NAME"),
        ("hf://me/it@/a", "must be hf://USER/NAME"),
        (REPO, "hf://me/it is a repository, but a file is required here"),
    ],
)
def test_wrong_paths_are_named(hub, files, path, said):
    commit(REPO, files)
    with refused(said):
        storage.read_bytes(path)


def test_no_login_and_a_wrong_one(hub, files, monkeypatch):
    commit(REPO, files)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong_0123")
    for write in (lambda: commit(REPO, files), lambda: storage.write_bytes(f"{REPO}/a", b"")):
        with pytest.raises(InputError, match="hf://me/it(/a)? cannot be read or written: permission denied") as error:
            write()
        assert "hf_wrong_0123" not in str(error.value)
    monkeypatch.delenv("HF_TOKEN")
    with refused("no repository me/it that is visible without `hf auth login`"):
        storage.list_files(REPO)
    with refused("needs a login to be written: run `hf auth login`, or set HF_TOKEN"):
        commit(REPO, files)


def test_offline_the_cache_is_used(hub, files, monkeypatch):
    commit(REPO, files)
    storage.read_bytes(f"{REPO}/model.json")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert storage.read_bytes(f"{REPO}/model.json") == b"small"
    for ask in (storage.read_bytes, storage.exists, storage.list_files, lambda path: commit(REPO, files)):
        with refused("is not in the client's cache, and HF_HUB_OFFLINE forbids"):
            ask(f"{REPO}/weights/large.bin")


def test_a_hub_that_is_busy_or_away(hub, files):
    commit(REPO, files)
    hub.busy = 2
    assert storage.read_bytes(f"{REPO}/model.json") == b"small" and hub.busy == 0
    hub.busy = 10**6
    for ask in (
        lambda: storage.read_bytes(f"{REPO}/weights/large.bin"),
        lambda: storage.list_files(REPO),
        lambda: commit(REPO, files),
    ):
        with pytest.raises(storage.UnavailableError, match="hf://me/it.* is not available"):
            ask()


@pytest.mark.parametrize("name", ["../../evil", "/etc/evil", "a/../../evil", "C:\\evil", "a\nb", "a//b"])
def test_hostile_names_in_a_listing_are_refused(hub, files, name):
    commit(REPO, files)
    hub.repos["me/it"][name] = b"x"
    with refused("which would lie elsewhere"):
        storage.list_files(REPO, recursive=True)


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with refused(r"hf:// paths need huggingface_hub: pip install 'diff_dalle\[hub\]'"):
        storage.read_bytes(f"{REPO}/a")
