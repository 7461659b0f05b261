import os
import shlex
import subprocess
import sys
import threading
import time

import pytest
from refusing import refused

from diff_dalle import storage
from diff_dalle.data.shards import ShardFiles
from diff_dalle.storage import copies
from diff_dalle.storage.local import temporary_path
from diff_dalle.storage.remote import RemoteStream


def taken(folder) -> int:
    """Bytes of the files in a folder, and of the removed ones that this process keeps open."""
    size = sum(entry.stat().st_size for entry in os.scandir(folder) if not entry.name.endswith(".lock"))
    for name in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{name}")
            if path.startswith(str(folder)) and path.endswith("(deleted)"):
                size += os.stat(f"/proc/self/fd/{name}").st_size
        except FileNotFoundError:
            pass
    return size


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
    with pytest.raises(storage.ChangedError):
        storage.fetch_to_cache(url, str(tmp_path), 10**6, tag='"another"')


def test_an_interrupted_download_is_retried_and_never_kept(server, tmp_path, monkeypatch):
    server.files["/a.tar"] = bytes(100_000)
    server.cut = 2
    copy = storage.fetch_to_cache(server.url("/a.tar"), str(tmp_path), 10**6)
    assert storage.read_bytes(copy) == bytes(100_000)
    server.files["/b.tar"] = bytes(50_000)
    monkeypatch.setattr(RemoteStream, "readinto", lambda *_: 0)  # ends at once
    with refused(r"/b\.tar ended after 0 of 50,000 bytes"):
        storage.fetch_to_cache(server.url("/b.tar"), str(tmp_path), 10**6)
    with pytest.raises(storage.UnavailableError, match="after [2-4] attempts: .* failed with status 3"):
        storage.fetch_to_cache("pipe:echo half; exit 3", str(tmp_path), 10**6)
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
    server.files["/e"] = server.files["/f"] = bytes(100)
    big = storage.fetch_to_cache(server.url("/e"), str(tmp_path), 250)
    only = storage.fetch_to_cache(server.url("/f"), str(tmp_path), 1)
    assert os.path.exists(only) and not os.path.exists(big)


def test_the_copy_of_a_commands_output_is_exact(tmp_path):
    """Its size is not known before its end."""
    copy = storage.fetch_to_cache("pipe:head -c 3000000 /dev/zero | tr '\\0' x", str(tmp_path), 10**8)
    assert storage.read_bytes(copy) == b"x" * 3_000_000


def test_a_copy_that_is_read_counts_as_used(server, tmp_path):
    for name in "abc":
        server.files[f"/{name}"] = bytes(100)
    files = ShardFiles(str(tmp_path), 250, copy_remote=True)
    a, b = (files.examine(server.url(f"/{name}")) for name in "ab")
    for i, copy in enumerate(files._copies.values()):  # b's is the newer one
        os.utime(copy, (i, i))
    files.read(a, 0, 5)
    files.examine(server.url("/c"))
    requests = len(server.requests)
    files.read(a, 0, 5)
    assert len(server.requests) == requests  # b's copy was removed
    files.read(b, 0, 5)
    assert len(server.requests) > requests


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
@pytest.mark.parametrize("kind", ["http", "pipe"])
def test_the_folder_never_takes_more_than_its_limit(server, tmp_path, monkeypatch, kind, caplog):
    """Not while something is downloaded, and not through removed copies that are kept open."""
    limit, cache, most = 350_000, tmp_path / "cache", []
    monkeypatch.setattr(copies, "CHUNK", 30_000)
    chunks = copies.chunks

    def watched(*call):
        for chunk in chunks(*call):
            most.append(taken(cache))
            yield chunk

    monkeypatch.setattr(copies, "chunks", watched)
    files = ShardFiles(str(cache), limit, copy_remote=True)
    shards = []
    for i in range(8):
        server.files[f"/{i}"] = bytes([i]) * 100_000
        (tmp_path / str(i)).write_bytes(server.files[f"/{i}"])
        path = server.url(f"/{i}") if kind == "http" else f"pipe:cat {shlex.quote(str(tmp_path / str(i)))}"
        shards.append(files.examine(path))
    for _ in range(3):
        for i, shard in enumerate(shards):
            assert files.read(shard, 5, 10) == bytes([i]) * 10
            most.append(taken(cache))
    assert max(most) <= limit and taken(cache) >= 200_000
    assert caplog.text.count("shard_cache_gb is too small") == 1


def test_a_copy_is_on_the_disk_before_it_has_its_name(server, tmp_path, monkeypatch):
    server.files["/a"], calls = bytes(1000), []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: calls.append("fsync") or fsync(file))
    monkeypatch.setattr(os, "replace", lambda *paths: calls.append("rename") or replace(*paths))
    storage.fetch_to_cache(server.url("/a"), str(tmp_path), 10**6)
    assert calls == ["fsync", "rename", "fsync"]  # the file, and then its folder


def test_temporaries_of_dead_processes_are_removed(server, tmp_path, monkeypatch):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    own = temporary_path(str(tmp_path), "model.pt")
    old, elsewhere = (temporary_path(str(tmp_path), name) for name in ("old", "elsewhere"))
    monkeypatch.setattr(os, "getpid", lambda: dead.pid)
    left = temporary_path(str(tmp_path), "left")
    monkeypatch.undo()
    place = os.path.basename(elsewhere).rpartition("-")[0].rpartition("-")[0].rpartition(".")[2]
    elsewhere = left.replace(place, "0" * 8)  # of another machine
    others = [str(tmp_path / name) for name in (".bashrc.tmp", "a.tmp", ".model.pt.1.tmp")]
    for path in (own, old, left, elsewhere, *others):
        with open(path, "wb") as file:
            file.write(b"x")
    for path in (old, *others):
        os.utime(path, (1, 1))
    storage.write_bytes(str(tmp_path / "model.pt"), b"new")
    names = {os.path.basename(path) for path in (own, elsewhere, *others)} | {"model.pt"}
    assert set(os.listdir(tmp_path)) == names
    os.utime(elsewhere, (time.time() - 90_000,) * 2)
    server.files["/a"] = b"x"
    storage.fetch_to_cache(server.url("/a"), str(tmp_path), 10**6)
    assert not os.path.exists(elsewhere) and os.path.exists(own)


def test_a_long_name_can_be_written(tmp_path):
    path = tmp_path / ("ü" * 120 + ".tar")  # 244 bytes of 255
    storage.write_bytes(str(path), b"x")
    assert path.read_bytes() == b"x"
