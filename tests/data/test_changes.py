"""Shards that change while they are in use, are lost, or are broken."""

import logging
import os
import shutil

import numpy as np
import pytest
from file_server import serving
from refusing import refused
from shard_making import Letters, captions_of, load, make_shards, sample, take, tar_bytes

from diff_dalle import storage
from diff_dalle.data import shards as shards_module
from diff_dalle.data.loader import FEW, BrokenSamples, Loader
from diff_dalle.data.samples import Broken
from diff_dalle.data.shards import ShardFiles
from diff_dalle.data.spec import CaptionSpec, SampleSpec

SPEC = SampleSpec(captions=(CaptionSpec(Letters(), 20),))


def loader(folder, **options) -> Loader:
    return load(folder, SPEC, 1, **{"max_broken": 1.0, **options})


def rewritten_in_place(path: str):
    """The same size, at other offsets."""
    with open(path, "r+b") as file:
        data = file.read()
        file.seek(0)
        file.write(data[1024:] + data[:1024])


def replaced(path: str):
    shutil.copyfile(path, f"{path}.new")
    os.utime(f"{path}.new", ns=(5, 5))
    os.replace(f"{path}.new", path)


CHANGES = {
    "rewritten": (rewritten_in_place, r"another modification time"),
    "cut": (lambda path: os.truncate(path, 3000), r"3,000 bytes now"),
    "replaced": (replaced, r"another modification time"),
    "removed": (os.remove, r"was removed while in use: put it back"),
}


@pytest.mark.parametrize(
    ("change", "message", "workers"), [*((*each, 0) for each in CHANGES.values()), (*CHANGES["cut"], 1)]
)
def test_a_shard_that_changes_while_training_ends_the_run(tmp_path, monkeypatch, change, message, workers):
    """Though it is open, its table is in memory, and no sample of it is broken."""
    monkeypatch.setattr(shards_module, "LOOK_SECONDS", 0.0)
    data = loader(make_shards(tmp_path, [8]), num_workers=workers, prefetch=1)
    batches = data.batches(0)
    next(batches)
    change(str(tmp_path / "00000.tar"))
    with pytest.raises(storage.ChangedError, match=rf"00000\.tar .*{message}"):
        for _ in range(100):
            next(batches)
    assert data.broken == 0


def test_the_name_of_an_open_shard_is_looked_at_now_and_then(tmp_path, monkeypatch):
    """A look takes as long as a read of a small sample, so it is not taken for each; the open file is always whole."""
    data, looks, stat = loader(make_shards(tmp_path, [8])), [], os.stat
    data.batch_at([0])
    monkeypatch.setattr(os, "stat", lambda path, **options: looks.append(path) or stat(path, **options))
    data.batch_at(range(100))
    assert len(looks) < 10


def test_a_shard_that_changes_during_a_read_is_noticed(tmp_path, monkeypatch):
    data, read = loader(make_shards(tmp_path, [8])), shards_module._Open.read

    def slow(self, offset, size):
        found = read(self, offset, size)
        rewritten_in_place(str(tmp_path / "00000.tar"))
        return found

    monkeypatch.setattr(shards_module._Open, "read", slow)
    with pytest.raises(storage.ChangedError):
        data.batch_at([0])


# ------------------------------------------------------------------------------------------------- lost samples


def test_a_sample_whose_server_is_away_is_replaced_like_a_broken_one(tmp_path, caplog, monkeypatch):
    make_shards(tmp_path, [8])
    with serving() as server:
        server.files["/a.tar"] = (tmp_path / "00000.tar").read_bytes()
        data = loader(server.url("/a.tar"), streams=1, index_cache=str(tmp_path))
        order = captions_of(data.batch_at(range(8)))
        read = ShardFiles.read
        shard, member = data.order.sample_at(2)
        lost = data.collection.members(shard).spans["txt"][member, 0]

        def away(self, shard, offset, size):
            if offset == lost:
                raise storage.UnavailableError("the server is away")
            return read(self, shard, offset, size)

        monkeypatch.setattr(ShardFiles, "read", away)
        for _ in range(2):
            assert captions_of(data.batch_at(range(8))) == [*order[:2], order[3], *order[3:]]
    assert data.broken == 1 and caplog.text.count("the server is away") == 1


def test_a_server_that_stays_away_ends_the_run_with_the_reason(tmp_path):
    """After few samples: each has waited for as long as reads are repeated."""
    make_shards(tmp_path, [40])
    with serving() as server:
        server.files["/a.tar"] = (tmp_path / "00000.tar").read_bytes()
        data = loader(server.url("/a.tar"), index_cache=str(tmp_path))
        data.batch_at([0])
        server.busy = 10**9
        before = len(server.requests)
        with refused(r"3 consecutive samples cannot be used, the last .*a\.tar : \d+: .*503"):
            data.batch_at([1])
        assert len(server.requests) - before < 100


# ------------------------------------------------------------------------------------------------- counting


def counter(counts=(30, 70), **options) -> BrokenSamples:
    return BrokenSamples(np.array(counts), 0.02, lambda shard, member: f"{shard}:{member}", **options)


@pytest.mark.parametrize("workers", [0, 2])
def test_evaluations_and_epochs_count_no_sample_again(tmp_path, workers, caplog):
    files = [file for i in range(40) for file in sample(f"{i:04d}", " " if i == 7 else f"caption {i}")]
    (tmp_path / "a.tar").write_bytes(tar_bytes(files))
    data = loader(tmp_path, num_workers=workers, max_broken=0.03, shuffle=False)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            for _ in data.batches_at([range(40)] * 3):
                pass
    assert data.broken == 1 and data.seen == 360 and caplog.text.count("0007: its caption is empty") == 1
    assert len(take(data, 0, 30)) == 30


def test_each_sample_is_counted_once(caplog):
    found = counter()
    for _ in range(3):
        for shard, member in ((0, 0), (0, 29), (1, 0), (1, 69), (1, 7), (1, 8)):
            found.add(Broken(shard, member, "cut"))
    assert found.count == 6 and caplog.text.count("replaced") == 6 and "replaced 1:69: cut" in caplog.text


def test_many_broken_samples_are_counted_but_not_named(caplog):
    found = counter(named=5)
    for member in range(20):
        found.add(Broken(1, member, "cut"))
    assert found.count == 20 and caplog.text.count("replaced 1:") == 5 and "but not named" in caplog.text


def test_the_limit_is_of_different_samples():
    found = counter(counts=(1000, 1000))
    for member in range(FEW):
        found.add(Broken(0, member, "cut"))
    found.check(40)  # too few to tell
    found.check(2000)
    found.check(10**6)  # 1 % of the data set, however often it is read
    for member in range(FEW, 41):
        found.add(Broken(0, member, "cut"))
    for seen in (1000, 2000, 10**9):
        with refused(r"41 of [12],000 samples are broken, more than max_broken 0\.02"):
            found.check(seen)
    one = counter(counts=(10,))
    one.add(Broken(0, 3, "cut"))
    one.check(10)
    one.add(Broken(0, 4, "cut"))
    one.check(9)
    with refused("2 of 10 samples are broken, .*: 0:3: cut; 0:4: cut"):
        one.check(10)
