import errno
import os
import sys
import threading

import pytest
import torch
from file_server import serving

from diff_dalle import storage
from diff_dalle.errors import InputError
from diff_dalle.storage import failures
from diff_dalle.storage.blob import Blob


@pytest.fixture(autouse=True)
def fast_retries(monkeypatch):
    monkeypatch.setattr(failures, "RETRY_SECONDS", 0.001)


@pytest.fixture
def server():
    with serving() as server:
        yield server


def command(text: str) -> str:
    return f'pipe:{sys.executable} -c "{text}"'


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


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(InputError, match="nowhere does not exist"):
        storage.write_bytes(str(tmp_path / "nowhere" / "a.txt"), b"")


def test_an_error_of_the_writer_is_passed_on_unchanged(tmp_path):
    with pytest.raises(FileNotFoundError, match="other"), storage.atomic_writer(str(tmp_path / "a")):
        os.stat("/nowhere/other")
    assert not os.listdir(tmp_path)


def test_writing_replaces_the_target_of_a_link(tmp_path):
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    storage.write_bytes(str(tmp_path / "link"), b"new")
    assert (tmp_path / "real").read_bytes() == b"new" and (tmp_path / "link").is_symlink()


def test_http_is_read_whole_and_by_byte_range(server):
    server.files["/a.bin"] = bytes(range(200))
    url = server.url("/a.bin")
    assert storage.exists(url) and not storage.exists(server.url("/b.bin"))
    assert storage.reads_by_offset(url) and storage.size_and_tag(url)[0] == 200
    assert storage.read_bytes(url) == bytes(range(200))
    assert storage.read_bytes(url, 10, 5) == bytes(range(10, 15))
    assert storage.read_bytes(url, 190, 50) == bytes(range(190, 200))
    assert storage.read_bytes(url, 500, 5) == b""
    server.busy = 2  # temporarily
    assert storage.read_bytes(url, 1, 1) == b"\1"
    server.ranges = False
    assert not storage.reads_by_offset(url)
    with pytest.raises(InputError, match="does not support byte ranges"):
        storage.read_bytes(url, 10, 5)


def test_failures_name_the_path_and_the_reason(tmp_path, server):
    cases = {
        str(tmp_path / "none"): "none does not exist",
        str(tmp_path): "is a folder, not a file",
        server.url("/none"): "none does not exist",
        server.url("/secret"): "secret cannot be read or written: permission denied",
        "ftp://host/a": "ftp:// is not supported",
    }
    for path, reason in cases.items():
        with pytest.raises(InputError, match=reason):
            storage.read_bytes(path)
    with pytest.raises(InputError, match="is read-only"):
        storage.write_bytes(server.url("/a"), b"")
    with pytest.raises(InputError, match="cannot be listed"):
        storage.list_files(server.url("/"))
    with pytest.raises(InputError, match="nowhere"):
        storage.write_bytes(str(tmp_path / "nowhere/a"), b"")


def test_a_missing_boto3_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(InputError, match=r"diff_dalle\[s3\]"):
        storage.read_bytes("s3://bucket/key")


def test_blobfile_is_called_correctly(tmp_path):
    """With blobfile's local paths in place of gs:// and az://, which need a server."""
    blob, folder = Blob(), str(tmp_path / "made")
    blob.make_dirs(folder + "/below")
    (tmp_path / "upload").write_bytes(b"0123456789")
    for name in ("a", "below/b"):
        blob.put(str(tmp_path / "upload"), f"{folder}/{name}")
    assert list(blob.list_files(folder, False)) == [f"{folder}/a"]
    assert sorted(blob.list_files(folder, True)) == [f"{folder}/a", f"{folder}/below/b"]
    assert blob.read(f"{folder}/a", 3, 4) == b"3456" and blob.read(f"{folder}/a", 0, None) == b"0123456789"
    assert blob.size_and_tag(f"{folder}/a")[0] == 10
    blob.remove(f"{folder}/a")
    assert not blob.exists(f"{folder}/a")


def test_a_pipe_is_read_and_its_failure_detected():
    assert storage.read_bytes(command("print('x' * 5)")).strip() == b"xxxxx"
    assert storage.read_bytes(command("print('abcdef')"), 2, 3) == b"cde"
    with pytest.raises(InputError, match="failed with status 3"):
        storage.read_bytes(command("print('half'); raise SystemExit(3)"))


def test_concurrent_requests_download_once(server, tmp_path):
    server.files["/a.tar"] = b"x" * 1000
    url, found = server.url("/a.tar"), []

    def fetch():
        found.append(storage.fetch_to_cache(url, str(tmp_path), 10**6))

    threads = [threading.Thread(target=fetch) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1 and storage.read_bytes(found[0]) == b"x" * 1000
    assert len(server.requests) == 2  # its size, and the file


def test_an_interrupted_download_is_retried_and_never_kept(server, tmp_path):
    server.files["/a.tar"] = bytes(100_000)
    server.cut = 2
    copy = storage.fetch_to_cache(server.url("/a.tar"), str(tmp_path), 10**6)
    assert storage.read_bytes(copy) == bytes(100_000)
    server.files["/b.tar"], server.cut = bytes(50_000), 100
    with pytest.raises(InputError, match=r"cannot download http.*/b\.tar after 4 attempts: .*25,000 of 50,000 bytes"):
        storage.fetch_to_cache(server.url("/b.tar"), str(tmp_path), 10**6)
    with pytest.raises(InputError, match="after 4 attempts"):
        storage.fetch_to_cache(command("print('half'); raise SystemExit(3)"), str(tmp_path), 10**6)
    assert [name for name in os.listdir(tmp_path) if not name.endswith(".lock")] == [os.path.basename(copy)]


def test_least_recently_used_copies_are_removed_first(server, tmp_path):
    copies = {}
    for i, name in enumerate("abc"):
        server.files[f"/{name}"] = bytes(100)
        copies[name] = storage.fetch_to_cache(server.url(f"/{name}"), str(tmp_path), 10**6)
        os.utime(copies[name], ns=(i, i))
    storage.fetch_to_cache(server.url("/a"), str(tmp_path), 10**6)  # used again
    server.files["/d"] = bytes(100)
    storage.fetch_to_cache(server.url("/d"), str(tmp_path), 250)
    assert [os.path.exists(copies[name]) for name in "abc"] == [True, False, False]
    big = storage.fetch_to_cache(server.url("/d"), str(tmp_path), 250, tag="other")
    only = storage.fetch_to_cache(server.url("/d"), str(tmp_path), 1, tag="third")
    assert os.path.exists(only) and not os.path.exists(big)
