import json
import logging
import multiprocessing
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from file_server import serving
from refusing import refused
from shard_making import CAPTIONED, indexed, make_shards, make_tar, sample, tar_bytes

from diff_dalle import storage
from diff_dalle.data import index, shards
from diff_dalle.data.collection import Collection, collect
from diff_dalle.data.index import FOLDER, index_shards
from diff_dalle.data.shard_table import IMAGE, Table, split_name
from diff_dalle.data.shards import ShardFiles
from diff_dalle.data.sources import find_shards
from diff_dalle.data.spec import Required
from diff_dalle.data.tar import Member


def contents(found: Collection) -> dict[str, bytes]:
    """Caption by key of every usable sample, read through the index."""
    places = [(shard, member) for shard, count in enumerate(found.counts) for member in range(count)]
    return {found.key(*place): found.fetch(*place).members["txt"] for place in places}


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("a.jpg", ("a", "jpg")),
        ("./a.JPEG", ("a", "jpeg")),
        ("b/c/a.seg.png", ("b/c/a", "seg.png")),
        ("b.d/a.txt", ("b.d/a", "txt")),
        ("._a.jpg", None),
        ("b/.hidden", None),
        ("readme", None),
        ("../../etc/a.jpg", ("../../etc/a", "jpg")),
    ],
)
def test_names_are_split_as_webdataset_splits_them(name, parts):
    assert split_name(name) == parts
    if not name.startswith("./"):
        from webdataset.tariterators import base_plus_ext

        key, kind = base_plus_ext(name)
        assert parts is None or (key, kind.lower()) == parts


def test_members_are_joined_by_key_wherever_they_are():
    names = ["a.jpg", "b.jpg", "b.txt", "a.txt", "a.jpg", "c.txt", "empty.txt"]
    found = Table.of([Member(name, i * 10, 0 if "empty" in name else 5) for i, name in enumerate(names)])
    assert found.keys == ["a", "b", "a", "c"]
    assert found.signatures() == {"jpg/txt": 2, "jpg": 1, "txt": 1}
    usable = found.select(CAPTIONED.members)
    assert usable.rows.tolist() == [0, 1]
    assert usable.spans[IMAGE].tolist() == [[0, 5], [10, 5]] and usable.spans["txt"].tolist() == [[30, 5], [20, 5]]
    for kind, rows in ((IMAGE, [0, 1, 2]), ("txt", [0, 1, 3]), ("jpg", [0, 1, 2]), ("png", [])):
        only = found.select([kind])
        assert only.rows.tolist() == rows and list(only.spans) == [kind]
    assert found.select([]).rows.tolist() == [0, 1, 2, 3]


def test_the_file_format_of_the_index_stays_readable(tmp_path, monkeypatch):
    """Files as every version so far wrote them; the tar is not read again."""
    make_shards(tmp_path, [2])
    path = tmp_path / "00000.tar"
    start_of_jpeg = path.read_bytes().index(b"\xff\xd8")
    summary: dict = {"by_offset": True, "problem": "", "signatures": {"jpg": 1}}
    summary["size"], summary["tag"] = storage.size_and_tag(str(path))
    header = json.dumps({"format": 1, "about": summary, "kinds": ["jpg"]})
    (tmp_path / FOLDER).mkdir()
    np.savez(
        tmp_path / FOLDER / "00000.tar.npz",
        header=np.frombuffer(header.encode(), dtype=np.uint8),
        keys=np.frombuffer(b"x", dtype=np.uint8),
        key_ends=np.array([1]),
        sample=np.array([0], dtype=np.int32),
        kind=np.array([0], dtype=np.int32),
        offset=np.array([start_of_jpeg]),
        size=np.array([2]),
    )
    (tmp_path / FOLDER / "summary.json").write_text(json.dumps({"format": 1, "shards": {"00000.tar": summary}}))
    monkeypatch.setattr(ShardFiles, "examine", None)
    found = indexed(path, Required({IMAGE: "images"}))
    assert found.samples == 1 and found.key(0, 0) == "x"
    assert found.fetch(0, 0).members == {IMAGE: b"\xff\xd8"}


def test_img2dataset_and_odd_shards_work(tmp_path):
    odd = [("./deep/0001.JPEG", b"i"), ("./deep/0001.Txt", b"odd"), ("._0001.jpg", b"mac"), ("deep/", b"")]
    other = [("000000000.jpg", b"i"), ("000000000.json", b"{}"), ("000000000.txt", b"other")]
    make_tar(tmp_path / "a.tar", odd)
    make_tar(tmp_path / "b.TAR", [*other, ("000000001.jpg", b"i"), ("000000001.json", b"{}")])
    found = indexed(tmp_path)
    assert contents(found) == {"deep/0001": b"odd", "000000000": b"other"}
    assert found.left_out == 1


def test_the_index_is_used_while_it_is_current(tmp_path, monkeypatch):
    """Headers are read once; again only for a shard that changed, or whose table is missing."""
    make_shards(tmp_path, [2, 3])
    walked = []
    examine = ShardFiles.examine

    def spy(self, path):
        walked.append(os.path.basename(path))
        return examine(self, path)

    monkeypatch.setattr(ShardFiles, "examine", spy)

    def walks() -> list[str]:
        walked.clear()
        assert len(contents(indexed(tmp_path))) == sum(counts)
        return sorted(walked)

    counts = [2, 3]
    assert walks() == ["00000.tar", "00001.tar"]
    assert walks() == []
    (tmp_path / FOLDER / "summary.json").write_text("{")
    assert walks() == []
    make_tar(tmp_path / "00001.tar", sample("9", "new"))
    counts = [2, 1]
    assert walks() == ["00001.tar"]
    os.utime(tmp_path / "00000.tar", ns=(5, 5))
    assert walks() == ["00000.tar"]
    (tmp_path / FOLDER / "00000.tar.npz").unlink()
    assert "00000.tar" in walks()


def test_indexing_asks_for_a_state_once_and_leaves_no_file_open(tmp_path, monkeypatch):
    """Not for each header: on network disks every look takes a round trip."""
    make_shards(tmp_path, [9, 9, 9])
    looks, state, files = [], shards._Open.state, ShardFiles()
    monkeypatch.setattr(shards._Open, "state", lambda self: looks.append(self.path) or state(self))
    assert sum(entry.summary.samples for entry in index_shards(find_shards([str(tmp_path)]), files)) == 27
    assert not looks and not len(files._files)


def test_tables_of_many_shards_are_found_in_few_tasks(tmp_path, monkeypatch):
    make_shards(tmp_path, [1] * 5)
    tasks, in_parallel = [], storage.in_parallel
    monkeypatch.setattr(index, "ROUND", 2)
    monkeypatch.setattr(
        storage, "in_parallel", lambda call, items: tasks.append(len(items)) or in_parallel(call, items)
    )
    for expected in ([2, 2, 2, 1], [2]):  # five tables are looked for and built; then they are found
        tasks.clear()
        entries = index_shards(find_shards([str(tmp_path)]), ShardFiles())
        assert [os.path.basename(entry.path) for entry in entries] == [f"{i:05d}.tar" for i in range(5)]
        assert tasks == expected


def test_damaged_shards_give_their_whole_samples_and_are_named(tmp_path, caplog):
    data = tar_bytes([file for i in range(4) for file in sample(f"{i}", f"caption {i}", b"i" * 600)])
    (tmp_path / "cut.tar").write_bytes(data[: 2 * 2560 + 700])  # a sample takes 2560 bytes
    (tmp_path / "junk.tar").write_bytes(b"junk" * 300)
    with caplog.at_level(logging.WARNING):
        found = indexed(tmp_path)
    assert found.counts.tolist() == [2, 0]
    assert "cut.tar was cut" in caplog.text and "junk.tar is not a tar" in caplog.text


def test_a_shard_that_changes_while_in_use_is_noticed(tmp_path):
    make_shards(tmp_path, [2, 3])
    first = indexed(tmp_path)
    make_tar(tmp_path / "00001.tar", sample("9", "new"))
    indexed(tmp_path)  # another run, which brings the index up to date
    first.members(0)
    with refused(r"00001\.tar had .* since \(another modification time or tag\)"):
        first.members(1)


def test_the_index_goes_elsewhere_by_request_or_of_necessity(tmp_path, monkeypatch):
    folder = tmp_path / "shards"
    folder.mkdir()
    make_shards(folder, [2])
    indexed(folder, index_cache=str(tmp_path / "mine"))
    assert not (folder / FOLDER).exists() and list((tmp_path / "mine").rglob("*.npz"))
    allowed = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).startswith(str(folder)) and allowed(path, mode))
    indexed(folder)
    assert not (folder / FOLDER).exists() and list(Path(os.environ["XDG_CACHE_HOME"]).rglob("*.npz"))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "holds no samples"),
        ([("a.txt", b"x")], r"holds no images \(jpg, .*\); found: \.txt \(1\)"),
        (
            [("a.jpg", b"x"), ("a.json", b"{}")],
            r"holds no captions \(no \.txt members; set caption_field\); found: \.jpg \(1\), \.json \(1\)",
        ),
        ([("a.jpg", b"x"), ("b.txt", b"x")], "holds no sample with an image and a .txt"),
    ],
)
def test_without_usable_samples_the_error_names_the_flag_and_the_contents(tmp_path, files, message):
    make_tar(tmp_path / "a.tar", files)
    with refused(f"--val_data_dir.*{message}"):
        collect(find_shards([str(tmp_path)]), CAPTIONED, ShardFiles(), flag="--val_data_dir")


def test_sources_of_all_kinds_mean_the_same_shards(tmp_path, monkeypatch):
    (tmp_path / "sub").mkdir()
    make_shards(tmp_path / "sub", [1, 1, 1])
    (tmp_path / "sub" / "notes.txt").write_text("no shard")
    names = [str(tmp_path / "sub" / f"{i:05d}.tar") for i in range(3)]
    monkeypatch.chdir(tmp_path)
    for source in (
        [str(tmp_path)],
        [f"file:{tmp_path}/sub"],
        [f"{tmp_path}/sub/*.tar"],
        f"{tmp_path}/sub/*.tar",
        [f"{tmp_path}/**/0000?.tar"],
        [f"{tmp_path}/sub/{{00000..00002}}.tar"],
        [f"{tmp_path}/sub/0000{{0,1}}.tar", names[2]],
        [f"{tmp_path}/sub/{{00000..00000}}.tar", f"{tmp_path}/sub/{{00001..00001}}.tar", names[2]],
    ):
        assert find_shards(source) == names
    assert find_shards(["expand:pipe:cat {0..1}.tar"]) == ["pipe:cat 0.tar", "pipe:cat 1.tar"]
    for command in ("pipe:cat {0..1}.tar", "pipe:awk '{print}' {a,b}.tar", "pipe:cat a}{"):
        assert find_shards([command]) == [command]
    for source, message in {
        "nowhere": "data_dir nowhere does not exist",
        f"{tmp_path}/sub/{{00000..00004}}.tar": "00003.tar does not exist",
        f"{tmp_path}/*.nothing": "matches no file",
        f"{tmp_path}/{{0..": "unbalanced braces|does not exist",
        "": "data_dir is not set",
    }.items():
        with refused(message):
            find_shards([source])
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "a.jpg").write_bytes(b"")
    with refused(r"holds no \.tar shards, but 1 other file; pack images with"):
        find_shards([str(tmp_path / "empty")])


def test_a_list_file_names_sources_of_all_kinds(tmp_path, monkeypatch):
    for folder in "abcd":
        (tmp_path / folder).mkdir()
        make_shards(tmp_path / folder, [1, 1])
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    names = {folder: [str(tmp_path / folder / f"{i:05d}.tar") for i in range(2)] for folder in "abcd"}
    lists, pipe = tmp_path / "list.yml", "pipe:cat {0,1}.tar, b"
    lines = [f"file:{tmp_path}/a/00000.tar", f"{tmp_path}/b/*.tar", f"{tmp_path}/c/0000{{0..1}}.tar", f"{tmp_path}/d"]
    lists.write_text("".join(f"- '{line}'\n" for line in [*lines, pipe]))
    expected = [names["a"][0], *names["b"], *names["c"], *names["d"], pipe]
    assert find_shards([str(lists)]) == find_shards([f"file:{lists}"]) == expected
    lists.rename(tmp_path / "list.YAML")
    assert find_shards([names["a"][1], str(tmp_path / "list.YAML")]) == [names["a"][1], *expected]
    assert not list(here.iterdir())
    (tmp_path / "list.YAML").write_text(f"[{names['a'][1]}]")  # nothing of the earlier list is kept
    assert find_shards([str(tmp_path / "list.YAML")]) == [names["a"][1]]
    with serving() as server:
        server.files |= {"/list.yml": f"- {names['a'][0]}\n".encode(), "/bad.yml": b"- pipe:cat a.tar\n"}
        assert find_shards([server.url("/list.yml")]) == [names["a"][0]]
        with refused(r"bad\.yml names a command, but only a local list can"):
            find_shards([server.url("/bad.yml")])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "is an empty list"),
        ("a: b", r"data_dir .*list\.yml must hold a list of texts"),
        ("- [a]", "must hold a list of texts"),
        ("- 3", "must hold a list of texts"),
        ("- a.tar\n- [", "is not valid YAML"),
        ("- other.yml", "names other.yml, but a list cannot name a list"),
        ("- nowhere.tar", "data_dir nowhere.tar does not exist"),
    ],
)
def test_list_files_that_name_no_sources_are_refused(tmp_path, text, message):
    (tmp_path / "list.yml").write_text(text)
    with refused(message):
        find_shards([str(tmp_path / "list.yml")])
    with refused("does not exist"):
        find_shards([str(tmp_path / "absent.yml")])


def test_remote_shards_are_read_by_range_or_from_a_copy(tmp_path):
    make_shards(tmp_path, [3, 4])
    expected = contents(indexed(tmp_path))
    echo = "import sys; sys.stdout.buffer.write(open(sys.argv[1], 'rb').read())"
    pipe = f'pipe:{sys.executable} -c "{echo}" {tmp_path}/{{00000..00001}}.tar'
    with serving() as server:
        for name in ("00000.tar", "00001.tar"):
            server.files[f"/{name}"] = (tmp_path / name).read_bytes()
        url = server.url("/{00000..00001}.tar")
        cases = [(url, True, False), (url, True, True), (url, False, False), (f"expand:{pipe}", True, False)]
        for number, (source, ranges, copy) in enumerate(cases):
            server.ranges = ranges
            cache = tmp_path / f"cache {number}"
            options = {"cache_dir": str(cache), "copy_remote": copy, "index_cache": str(cache / "index")}
            found = indexed(source, cache_bytes=1 << 20, **options)
            assert contents(found) == expected
            assert found.in_place(0) == (number == 0) and len(list(cache.glob("*.copy"))) == (0 if number == 0 else 2)


def test_a_pipe_whose_output_changed_is_refused(tmp_path):
    make_shards(tmp_path, [2])
    source = f"pipe:cat {tmp_path}/00000.tar"
    indexed(source, cache_dir=str(tmp_path / "one"))
    make_shards(tmp_path, [9])
    found = indexed(source, cache_dir=str(tmp_path / "two"))
    with refused("when it was indexed"):
        contents(found)


def index_together(start, paths, results):
    """What each of several processes does: wait for the others, index, and send what it found."""
    start.wait(60)
    entries = index_shards(paths, ShardFiles())
    results.put((os.getpid(), entries))


def test_processes_that_index_at_once_agree(tmp_path):
    """Separate jobs, which know nothing of each other."""
    make_shards(tmp_path, [1] * 40)
    paths = find_shards([str(tmp_path)])
    context = multiprocessing.get_context("fork" if sys.platform != "win32" else "spawn")
    start, results = context.Barrier(3), context.Queue()
    processes = [context.Process(target=index_together, args=(start, paths, results)) for _ in range(3)]
    for process in processes:
        process.start()
    found = dict(results.get(timeout=60) for _ in processes)
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 3 and os.getpid() not in found and len(found) == 3
    assert all(entries == index_shards(paths, ShardFiles()) for entries in found.values())
    assert len(contents(indexed(tmp_path))) == 40
    assert not [name for name in os.listdir(tmp_path / FOLDER) if name.endswith(".tmp")]
    assert len(json.loads((tmp_path / FOLDER / "summary.json").read_text())["shards"]) == 40


def test_the_log_and_descriptions_of_shards_hold_no_secrets(tmp_path, caplog):
    with serving() as server, caplog.at_level(logging.WARNING):
        server.files["/cut.tar"] = tar_bytes(sample("0", "a", b"i") + sample("1", "b", b"i"))[:2500]
        url = server.url("/cut.tar?sig=abc")
        found = indexed(url, cache_dir=str(tmp_path), index_cache=str(tmp_path))
    assert "/cut.tar?*** was cut" in caplog.text and "abc" not in caplog.text
    assert found.describe(0, 0).partition(" : ")[0].endswith("/cut.tar?***")
