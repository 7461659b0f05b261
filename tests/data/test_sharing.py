"""One process lists the shards for all, and all index them together."""

import threading
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

from file_server import serving
from refusing import refused
from shard_making import CAPTIONED, indexed, make_shards, make_tar, sample, tar_bytes

from diff_dalle import storage
from diff_dalle.data import index
from diff_dalle.data import survey as survey_module
from diff_dalle.data.filters import Filter


class Threads:
    """The worlds of several processes that are threads."""

    def __init__(self, size: int):
        self.size, self.box, self.barrier = size, [None] * size, threading.Barrier(size, timeout=30)

    def world(self, rank: int) -> SimpleNamespace:
        def gather(value):
            self.box[rank] = value
            self.barrier.wait()
            values = list(self.box)
            self.barrier.wait()
            return values

        return SimpleNamespace(
            rank=rank, size=self.size, is_main=rank == 0, gather=gather, broadcast=lambda value=None: gather(value)[0]
        )

    def run(self, work) -> list:
        results = [None] * self.size

        def each(rank):
            results[rank] = work(self.world(rank))

        threads = [threading.Thread(target=each, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return results


def test_of_128_processes_one_looks_at_2_000_shards(tmp_path, monkeypatch):
    """By the summary alone: neither the other processes' disks nor the shards and their tables are touched."""
    count, folder = 2_000, str(tmp_path)
    paths = [f"{folder}/{number:06d}.tar" for number in range(count)]
    about = index.ShardSummary(10_240, "tag", True, "", {"jpg/txt": 3})
    (tmp_path / index.FOLDER).mkdir()
    index.save_summaries(f"{folder}/{index.FOLDER}", {f"{number:06d}.tar": about for number in range(count)})
    calls: list[str] = []

    def counted(name, function):
        def call(*args, **options):
            calls.append(name)
            return function(*args, **options)

        return call

    monkeypatch.setattr(storage, "exists", counted("exists", lambda path: path == folder))
    monkeypatch.setattr(storage, "list_files", counted("list", lambda path, recursive: paths))
    monkeypatch.setattr(storage, "size_and_tag", counted("size", lambda path, listed=False: (about.size, about.tag)))
    monkeypatch.setattr(index, "read_bounded", counted("summary", index.read_bounded))
    for name in ("read_bytes", "open_read", "write_bytes"):
        monkeypatch.setattr(storage, name, counted("content", getattr(storage, name)))
    monkeypatch.setattr(index, "load_summary", counted("table", index.load_summary))
    monkeypatch.setattr(index, "examine", counted("shard", index.examine))

    first, *others = Threads(128).run(lambda world: indexed(folder, world=world))
    assert first.samples == 3 * count and len(first.shards) == count and all(each is first for each in others)
    assert set(calls) <= {"size", "exists", "list", "summary"}
    assert (calls.count("size"), calls.count("list")) == (count, 1)
    assert calls.count("summary") <= 2  # beside the shards, and in the user's cache


def test_processes_index_different_shards_and_know_all(tmp_path, monkeypatch):
    monkeypatch.setattr(index, "ROUND", 3)
    folder = make_shards(tmp_path, [1] * 20)
    examined: list[str] = []
    examine = index.examine
    monkeypatch.setattr(index, "examine", lambda path, files: examined.append(path) or examine(path, files))
    found = Threads(3).run(lambda world: indexed(folder, world=world))
    assert len(examined) == len(set(examined)) == 20
    assert [each.samples for each in found] == [20] * 3
    assert all([shard.path for shard in each.shards] == [shard.path for shard in found[0].shards] for each in found)
    assert found[2].fetch(7, 0).members["txt"] == b"caption of 0007"


def test_remote_shards_are_sized_by_one_process(tmp_path):
    make_shards(tmp_path, [2])
    with serving() as server:
        for number in range(4):
            server.files[f"/{number}.tar"] = (tmp_path / "00000.tar").read_bytes()

        def requests(processes: int) -> Counter[str]:
            server.requests.clear()
            url, cache = server.url("/{0..3}.tar"), str(tmp_path / "index")
            found = Threads(processes).run(lambda world: indexed(url, index_cache=cache, world=world))
            assert [each.samples for each in found] == [8] * processes
            return Counter(server.requests)

        requests(1)  # and indexed
        assert requests(1) == requests(3) and len(server.requests) == 4


def test_a_table_that_is_elsewhere_is_made_again_once(tmp_path, monkeypatch):
    """Each node has a cache of its own, but the table's path is that of the process that listed the shards."""
    folder = make_shards(tmp_path, [2, 2])
    found = indexed(folder, index_cache=str(tmp_path / "cache"))
    for table in (tmp_path / "cache").rglob("*.npz"):
        table.unlink()
    examined = []

    examine = index.examine
    monkeypatch.setattr(index, "examine", lambda path, files: examined.append(path) or examine(path, files))
    for _ in range(2):
        assert found.key(0, 1) == "0001"
    assert len(examined) == 1


def test_what_rank_0_cannot_find_is_an_error(tmp_path):
    """Before it waits for another process."""
    with refused("data_dir .*nowhere does not exist"):
        indexed(tmp_path / "nowhere", world=Threads(2).world(0))


def test_processes_share_what_filters_and_buckets_ask(tmp_path, monkeypatch):
    """Each shard is asked by one process, and all get the same answers."""
    number = 0
    for shard, count in enumerate((3, 1, 2, 4, 2, 3, 1)):
        files = []
        for i in range(number, number + count):
            files += [*sample(f"{i:04d}", "a"), (f"{i:04d}.json", f'{{"score": {i}}}'.encode())]
        make_tar(tmp_path / f"{shard}.tar", files)
        number += count
    filters = Filter.parse("score >= 2"), Filter.parse("score != 5")
    required = replace(CAPTIONED, filters=filters, sizes=True)
    asked, survey = [], survey_module._Surveyor.survey
    monkeypatch.setattr(survey_module._Surveyor, "survey", lambda *call: asked.append(call[1].path) or survey(*call))
    monkeypatch.setattr(index, "ROUND", 2)
    one = indexed(tmp_path, required)
    assert one.counts.tolist() == [1, 1, 1, 4, 2, 3, 1] and len(asked) == 7
    assert [len(sizes) for sizes in one.sizes] == one.counts.tolist() and one.sizes[0].tolist() == [[20, 24]]
    for again in (False, True):
        if not again:
            for column in (tmp_path / index.FOLDER).glob("*.tar.*.npz"):
                if column.name.count(".") > 2:
                    column.unlink()
        asked.clear()
        found = Threads(3).run(lambda world: indexed(tmp_path, required, world=world))
        assert sorted(asked) == [f"{tmp_path}/{shard}.tar" for shard in range(7)]
        for each in found:
            assert each.counts.tolist() == one.counts.tolist()
            assert [each.key(3, i) for i in range(4)] == ["0006", "0007", "0008", "0009"]
        for mine, theirs in zip(found[0].sizes, one.sizes, strict=True):
            assert mine.tolist() == theirs.tolist()


def test_of_remote_shards_large_blocks_are_asked_for_and_only_once(tmp_path, caplog):
    """40 samples of which json and header are wanted: a request for each would be 80."""
    files = []
    for i in range(40):
        files += [*sample(f"{i:04d}", "a"), (f"{i:04d}.json", f'{{"score": {i}}}'.encode())]
    required = replace(CAPTIONED, filters=(Filter.parse("score >= 20"),), sizes=True)
    with serving() as server:
        server.files["/a.tar"] = tar_bytes(files)
        url, cache = server.url("/a.tar"), str(tmp_path)
        indexed(url, index_cache=cache)
        before = len(server.requests)
        with caplog.at_level("WARNING"):
            found = indexed(url, required, index_cache=cache)
        assert found.samples == 20 and len(found.sizes[0]) == 20
        assert len(server.requests) - before <= 6
        assert "a.tar and other remote shards are read nearly whole, once" in caplog.text
        caplog.clear()
        before = len(server.requests)
        indexed(url, required, index_cache=cache)
        assert len(server.requests) - before <= 2 and "nearly whole" not in caplog.text
        other = replace(CAPTIONED, filters=(Filter.parse("score >= 30"),))
        server.files["/a.tar"] = tar_bytes([*files, ("x.jpg", b"another")])
        assert indexed(url, other, index_cache=cache).samples == 10
