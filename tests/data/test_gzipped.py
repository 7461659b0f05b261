"""Gzipped shards: read from unpacked copies, as if they were not."""

import gzip
import os
import shutil
from collections import namedtuple

import numpy as np
import pytest
from file_server import serving
from refusing import refused
from shard_making import indexed, make_shards, tar_bytes

from diff_dalle import storage
from diff_dalle.data import index
from diff_dalle.data.collection import Collection
from diff_dalle.data.shards import ShardFiles
from diff_dalle.data.sources import find_shards
from diff_dalle.storage import copies

COUNTS = [3, 4, 2]


@pytest.fixture
def folder(tmp_path):
    """Three shards: one that is not gzipped, one gzipped under its name, and one gzipped under another name."""
    make_shards(tmp_path, COUNTS)
    pack(tmp_path / "00001.tar", tmp_path / "00001.tar.gz")
    pack(tmp_path / "00002.tar", tmp_path / "00002.tar")
    return tmp_path


def pack(path, target):
    data = gzip.compress(path.read_bytes())
    path.unlink()
    target.write_bytes(data)


def captions(found: Collection) -> list[bytes]:
    return [found.fetch(*place).members["txt"] for place in found.in_order()]


EXPECTED = [f"caption of {number:04d}".encode() for number in range(sum(COUNTS))]


def test_gzipped_tars_are_read_beside_others(folder, caplog, monkeypatch):
    found = indexed(folder)
    assert captions(found) == EXPECTED
    assert "2 shards gzipped: read from unpacked copies of 0.00 GB in" in caplog.text and "again" not in caplog.text
    cache = found.files.cache_dir
    assert len([name for name in os.listdir(cache) if name.endswith(".copy")]) == 2

    with monkeypatch.context() as patch:  # a second start reads the index, from another folder too
        patch.setattr(index, "examine", None)
        patch.chdir(folder)
        again = indexed(".")
        shutil.rmtree(cache)
        assert captions(again) == EXPECTED and len(os.listdir(cache)) > 2  # unpacked again
    caplog.clear()
    indexed(folder, cache_bytes=1)
    assert "unpacked again and again" in caplog.text


def test_a_gzipped_shard_that_changes_is_noticed(folder):
    path = folder / "00001.tar.gz"
    found = indexed(path)
    whole = gzip.decompress(path.read_bytes())
    path.write_bytes(gzip.compress(whole.replace(b"caption of 0003", b"another 0000003")))  # unpacked, of the same size
    shutil.rmtree(found.files.cache_dir)
    with pytest.raises(storage.ChangedError, match="has changed since"):
        captions(found)
    assert captions(indexed(path))[0] == b"another 0000003"


def test_an_index_that_says_gzipped_shards_cannot_be_read_is_made_again(folder, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(storage, "GZIP", b"none")
        patch.setattr(index, "read_members", lambda read, size: ([], "is compressed: unpack it first"))
        with refused("holds no samples"):
            indexed(folder / "00001.tar.gz")
    assert len(captions(indexed(folder / "00001.tar.gz"))) == 4


@pytest.mark.parametrize(("ranges", "copy"), [(True, False), (True, True), (False, False)])
def test_remote_ones_and_outputs_of_commands(folder, tmp_path_factory, ranges, copy):
    with serving() as server:
        server.files = {f"/{path.name}": path.read_bytes() for path in folder.glob("*.tar*")}
        server.ranges = ranges
        names = [server.url("/00000.tar"), f"pipe:cat {folder}/00001.tar.gz", server.url("/00002.tar")]
        listed = folder / "all.yml"
        listed.write_text("".join(f"- '{name}'\n" for name in names))
        for _ in range(2):
            found = indexed(listed, copy_remote=copy)
            assert captions(found) == EXPECTED and not found.in_place(2)
        requests = len(server.requests)
        indexed(listed, copy_remote=copy)
        assert len(server.requests) - requests <= 4  # the states of two files


def test_damaged_ones_give_what_can_be_unpacked(tmp_path, caplog):
    image = np.random.default_rng(0).bytes(40_000)
    whole = tar_bytes([(f"{i}.{kind}", image) for i in range(40) for kind in ("jpg", "txt")])
    path, cut = tmp_path / "a.tgz", gzip.compress(whole)
    half = len(cut) // 2
    for data, said in ((cut[:half], "was cut"), (cut[:half] + bytes(500) + cut[half + 500 :], "is damaged")):
        path.write_bytes(data)
        caplog.clear()
        found = indexed(path)
        assert 3 < found.samples < 40 and f"a.tgz {said}: its gzip data" in caplog.text
        assert "20 samples before the damage" in caplog.text
    half = len(whole) // 2
    path.write_bytes(gzip.compress(whole[:half]) + gzip.compress(whole[half:]) + bytes(1000))
    caplog.clear()
    assert indexed(path).samples == 40 and "a.tgz is" not in caplog.text and "a.tgz was" not in caplog.text


def test_what_would_fill_the_disk_is_given_up(tmp_path, monkeypatch):
    path = tmp_path / "bomb.tar"
    path.write_bytes(gzip.compress(bytes(8 << 20), 1))
    monkeypatch.setattr(copies, "GROWTH", 2 << 20)
    usage = namedtuple("usage", "free")
    free = iter([usage(1 << 30), usage(100 << 20), usage(1 << 20)])
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: next(free))
    with refused(r"has only 1,048,576 free bytes left for the copy of .*bomb\.tar, of which"):
        indexed(path)
    cache = ShardFiles().cache_dir
    assert not [name for name in os.listdir(cache) if not name.endswith(".lock")]


def test_names_of_gzipped_shards(folder):
    assert [os.path.basename(path) for path in find_shards([str(folder)])] == [
        "00000.tar",
        "00001.tar.gz",
        "00002.tar",
    ]
