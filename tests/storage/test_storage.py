import errno
import os
import sys

import pytest
import torch
from refusing import refused

from diff_dalle import storage
from diff_dalle.config import InputError
from diff_dalle.storage import ChangedError, retries
from diff_dalle.storage import objects as blob_module
from diff_dalle.storage.objects import Blob


@pytest.mark.parametrize(
    ("path", "scheme", "parts"),
    [
        ("a/b.tar", "", ("a", "b.tar")),
        ("file:/a/b.tar", "", ("/a", "b.tar")),
        ("file:///a/b%20c.tar", "", ("/a", "b c.tar")),
        ("s3://bucket/a/b.tar", "s3", ("s3://bucket/a", "b.tar")),
        ("https://host/a/b.tar?token=x/y", "https", ("https://host/a", "b.tar")),
        ("C:\\a", "", ("", "C:\\a")),
    ],
)
def test_paths_are_classified_and_split(path, scheme, parts):
    if os.name == "posix":
        assert (storage.scheme(path), storage.split(path)) == (scheme, parts)
        assert storage.is_remote(path) == bool(scheme)


def test_a_local_file_round_trips_and_is_listed(tmp_path):
    folder = storage.join(str(tmp_path), "a")
    storage.make_dirs(storage.join(folder, "b"))
    for name in ("2.txt", "1.txt", "b/3.txt", ".hidden"):
        storage.write_bytes(storage.join(folder, name), name.encode())
    assert storage.read_text(f"file://{folder}/1.txt") == "1.txt"
    assert storage.read_bytes(storage.join(folder, "b/3.txt"), 2, 3) == b"3.t"
    assert storage.list_files(folder) == [storage.join(folder, name) for name in ("1.txt", "2.txt")]
    os.symlink(folder, storage.join(folder, "b/circle"))
    assert storage.list_files(folder, recursive=True) == [
        storage.join(folder, name) for name in ("1.txt", "2.txt", "b/3.txt")
    ]
    before = storage.size_and_tag(storage.join(folder, "1.txt"))
    os.utime(storage.join(folder, "1.txt"), ns=(1, 1))
    assert storage.size_and_tag(storage.join(folder, "1.txt")) == (before[0], "1") != before
    storage.remove(storage.join(folder, "1.txt"))
    assert not storage.exists(storage.join(folder, "1.txt"))


class FullDisk:
    """A file on a disk without space."""

    def write(self, *args):
        raise OSError(errno.ENOSPC, "No space left on device")

    flush = write


@pytest.mark.parametrize("fault", ["write", "fsync", "torch.save"])
def test_a_failed_write_leaves_the_old_file_and_no_temporary(tmp_path, monkeypatch, fault):
    path = str(tmp_path / "model.pt")
    storage.write_bytes(path, b"old")
    full = pytest.raises(InputError, match=r"model\.pt cannot be written: the disk is full")
    with full, storage.atomic_writer(path) as file:
        file.write(b"new")
        if fault == "write":
            FullDisk().write()
        elif fault == "fsync":
            monkeypatch.setattr(os, "fsync", FullDisk().write)
        else:
            torch.save({"a": torch.zeros(10)}, FullDisk())
    assert os.listdir(tmp_path) == ["model.pt"]
    assert storage.read_bytes(path) == b"old"


def test_an_error_of_the_writer_is_passed_on_unchanged(tmp_path):
    with pytest.raises(FileNotFoundError, match="other"), storage.atomic_writer(str(tmp_path / "a")):
        os.stat("/nowhere/other")
    assert not os.listdir(tmp_path)


def test_writing_replaces_the_target_of_a_link(tmp_path):
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    storage.write_bytes(str(tmp_path / "link"), b"new")
    assert (tmp_path / "real").read_bytes() == b"new" and (tmp_path / "link").is_symlink()


def test_failures_name_the_path_and_the_reason(tmp_path, server):
    cases = {
        str(tmp_path / "none"): "none does not exist",
        str(tmp_path): "is a folder, not a file",
        server.url("/none"): "none does not exist",
        server.url("/secret"): "secret cannot be read or written: permission denied",
        "ftp://host/a": "ftp:// is not supported",
    }
    for path, reason in cases.items():
        with refused(reason):
            storage.read_bytes(path)
    with refused("is read-only"):
        storage.write_bytes(server.url("/a"), b"")
    with refused("cannot be listed"):
        storage.list_files(server.url("/"))
    with refused("nowhere does not exist"):
        storage.write_bytes(str(tmp_path / "nowhere/a"), b"")


def test_a_missing_boto3_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "boto3", None)
    with refused(r"diff_dalle\[s3\]"):
        storage.read_bytes("s3://bucket/key")


def test_blobfile_is_called_correctly(tmp_path):
    """With blobfile's local paths in place of gs:// and az://, which need a server."""
    blob, folder = Blob(), str(tmp_path / "made")
    blob.make_dirs(folder + "/below")
    (tmp_path / "upload").write_bytes(b"0123456789")
    for name in ("a", "below/b"):
        blob.put(str(tmp_path / "upload"), f"{folder}/{name}")
    state = blob.size_and_tag(f"{folder}/a")
    assert list(blob.list_files(folder, False)) == [(f"{folder}/a", *state)]
    assert sorted(info.path for info in blob.list_files(folder, True)) == [f"{folder}/a", f"{folder}/below/b"]
    assert blob.read(f"{folder}/a", 3, 4, state) == b"3456" and blob.read(f"{folder}/a", 8, 9, state) == b"89"
    assert (
        blob.read(f"{folder}/a", 0, None, (-1, "")) == b"0123456789" and blob.read(f"{folder}/a", 20, 9, state) == b""
    )
    with pytest.raises(ChangedError, match="a has changed"):
        blob.read(f"{folder}/a", 0, 3, (11, state[1]))
    with blob.open_read(f"{folder}/a", state) as stream:
        assert stream.read() == b"0123456789"
    blob.remove(f"{folder}/a")
    assert not blob.exists(f"{folder}/a")


def test_blobfile_gives_up_and_is_repeated_by_the_one_policy(monkeypatch, tmp_path):
    """Its own retries are without end by default."""
    (tmp_path / "a").write_bytes(b"0123456789")
    context = blob_module._context()
    conf = context._conf
    assert conf.retry_limit == blob_module.REQUEST_TRIES - 1
    assert (conf.connect_timeout, conf.read_timeout) == (retries.CONNECT_SECONDS, retries.SILENT_SECONDS)
    from blobfile import RequestFailure

    stat, failures = context.stat, [0, 503, 429]  # 0: no server was reached

    def unreliable(path):
        if failures:
            raise RequestFailure("message", "request", failures.pop(), None, None)
        return stat(path)

    monkeypatch.setattr(context, "stat", unreliable)
    monkeypatch.setitem(storage._BACKENDS, "gs", Blob())
    monkeypatch.setattr(storage, "scheme", lambda path: "gs")
    assert storage.size_and_tag(str(tmp_path / "a"))[0] == 10 and not failures
    failures[:] = [403]
    with refused("permission denied"):
        storage.size_and_tag(str(tmp_path / "a"))
