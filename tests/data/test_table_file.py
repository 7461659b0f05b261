"""Index files that come with the data: whatever they hold, shards are read right, and nothing else is."""

import json
import os
import tracemalloc
import zipfile
from dataclasses import asdict, replace
from types import MappingProxyType

import numpy as np
import pytest
from refusing import refused
from shard_making import indexed, make_shards

from diff_dalle.data.index import FOLDER, _digest
from diff_dalle.data.shard_table import ShardSummary, Table, load_summary, load_table, save_table
from diff_dalle.data.tar import Member

MEMBERS = [Member("ü/a.jpg", 512, 5), Member("ü/a.txt", 1536, 6), Member("b.jpg", 2560, 7), Member("b.txt", 3584, 8)]
TABLE = Table.of(MEMBERS)
SUMMARY = ShardSummary(5120, "tag", True, "was cut", TABLE.signatures())


def arrays_of(path) -> dict[str, np.ndarray]:
    with np.load(path) as file:
        return dict(file)


def edited(path, save=np.savez, **changes) -> None:
    """Replace arrays of the file; a function changes the present one, None removes it."""
    arrays = arrays_of(path)
    for name, change in changes.items():
        arrays[name] = change(arrays[name].copy()) if callable(change) else change
    save(path, **{name: array for name, array in arrays.items() if array is not None})


@pytest.fixture
def path(tmp_path):
    save_table(str(tmp_path / "t.npz"), SUMMARY, TABLE)
    return tmp_path / "t.npz"


def with_header(about=MappingProxyType({}), **changes):
    """A change of the header: its own entries, and those of the summary under ``about``."""

    def change(header):
        record = json.loads(header.tobytes())
        record["about"] |= about
        return np.frombuffer(json.dumps(record | changes).encode(), dtype=np.uint8)

    return {"header": change}


def at(place, value):
    def change(array):
        array[place] = value
        return array

    return change


ABOUT = [
    {"size": None},
    {"path": "/etc/passwd"},
    {"size": -1},
    {"size": "5120"},
    {"size": True},
    {"size": 4 * 1024 - 513},  # too small for its members
    {"by_offset": 1},
    {"tag": 5},
    {"problem": "\x1b[2J"},
    {"signatures": ["jpg/txt"]},
    {"signatures": {"jpg/txt": "2"}},
    {"signatures": {"jpg/txt": 3, "jpg": -1}},
    {"signatures": {"jpg": 3}},  # more samples than there are
    {"signatures": {"jpg/txt": 10**30}},
    {"signatures": {"jpg/jpg": 2}},
]
COLUMNS = {
    "no column": {"offset": None},
    "no header": {"header": None},
    "a list for a header": {"header": np.frombuffer(b"[]", np.uint8)},
    "a deep header": {"header": np.frombuffer(b"[" * 200_000, np.uint8)},
    "a header of bad text": {"header": np.frombuffer(b'{"a": "\xff"}', np.uint8)},
    "keys cut": {"keys": lambda keys: keys[:-1]},
    "keys that are no text": {"keys": at(0, 0xFF)},
    "key ends out of order": {"key_ends": at(0, 6)},
    "negative key ends": {"key_ends": at(0, -1)},
    "key ends of another type": {"key_ends": lambda ends: ends.astype(np.float64)},
    "a sample beyond the last": {"sample": at(3, 2)},
    "a negative sample": {"sample": at(3, -1)},
    "a kind beyond the last": {"kind": at(0, 2)},
    "a negative kind": {"kind": at(0, -1)},
    "an offset in a header": {"offset": at(0, 511)},
    "a span beyond the end": {"offset": at(3, 5113)},
    "a span whose end overflows": {"offset": at(3, 2**63 - 2)},
    "a negative length": {"size": at(3, -8)},
    "an empty member": {"size": at(3, 0)},
    "an absurd length": {"size": at(3, 2**62)},
    "columns of other lengths": {"offset": lambda offset: offset[:-1]},
    "two dimensions": {"offset": lambda offset: offset[None]},
    "pickled objects": {"offset": np.array([print] * 4, dtype=object)},
}
KINDS = [["../jpg", "txt"], [1, 2], "jpgtxt", ["jpg", "jpg"], ["jpg"]]


def test_a_table_survives_its_file_and_an_impossible_one_counts_as_damaged(path):
    edited(path)
    summary, table = load_table(str(path))
    assert load_summary(str(path)) == summary == SUMMARY and (table.keys, table.kinds) == (TABLE.keys, TABLE.kinds)
    for name in ("sample", "kind", "offset", "size"):
        np.testing.assert_array_equal(getattr(table, name), getattr(TABLE, name))
    full = replace(SUMMARY, size=4 * 1024 - 512)  # the last member without its padding
    assert ShardSummary.parse(asdict(full)) == full
    whole = path.read_bytes()
    heads = [with_header(format=2), *map(with_header, ABOUT), *(with_header(kinds=kinds) for kinds in KINDS)]
    for name, changes in [*COLUMNS.items(), *enumerate(heads)]:
        path.write_bytes(whole)
        edited(path, **changes)
        assert load_table(str(path)) is None, name


def test_a_compressed_table_is_not_unpacked(path):
    """A megabyte may stand for a gigabyte."""
    edited(path, np.savez_compressed, keys=np.zeros(1 << 24, np.uint8))
    assert os.path.getsize(path) < 1 << 18
    tracemalloc.start()
    assert load_table(str(path)) is None
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 23


def test_a_zip_of_very_many_entries_is_not_listed(tmp_path, monkeypatch):
    path = tmp_path / "t.npz"
    with zipfile.ZipFile(path, "w") as file:
        for number in range(1000):
            file.writestr(f"{number}.npy", b"")
    monkeypatch.setattr(zipfile, "ZipFile", None)
    assert load_table(str(path)) is None
    data = path.read_bytes()
    locator = b"PK\6\7" + bytes(16)  # of a 64-bit list of entries, in front of a short one
    path.write_bytes(data[:-22] + locator + data[-22:-14] + b"\1\0\1\0" + bytes(8) + b"\0\0")
    assert load_table(str(path)) is None


def test_a_damaged_file_is_noticed(path):
    """A zip that was cut or is of a later format; and, by the zip's checksums, a flipped bit: an offset within the
    shard looks possible, but is another member's."""
    whole = path.read_bytes()
    later, flipped = bytearray(whole), bytearray(whole)
    later[whole.index(b"PK\1\2") + 6] = 200  # the version needed to extract
    flipped[whole.index(np.array([512, 1536, 2560]).tobytes()) + 1] ^= 4
    for data in (*(whole[:size] for size in (0, 5, 21, 22, 200, -1, -30)), later):
        path.write_bytes(data)
        assert load_table(str(path)) is None and load_summary(str(path)) is None
    path.write_bytes(flipped)
    assert load_table(str(path)) is None


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs POSIX")
def test_a_fifo_in_place_of_an_index_is_not_waited_for(tmp_path):
    make_shards(tmp_path, [2])
    (tmp_path / FOLDER).mkdir()
    for name in ("summary.json", "00000.tar.npz"):
        os.mkfifo(tmp_path / FOLDER / name)
    assert load_table(str(tmp_path / FOLDER / "00000.tar.npz")) is None
    assert indexed(tmp_path).samples == 2


def lies(summary: dict) -> dict[str, object]:
    """Contents of summary.json by what is wrong with them; ``summary`` is the true one of 00000.tar."""

    def record(shards):
        return {"format": 1, "digest": _digest(json.dumps(shards)), "shards": shards}

    def shards(**changes):
        return record({"00000.tar": summary | changes})

    return {
        "text": "x",
        "a number": 3,
        "a list": [1],
        "no shards": {"format": 1},
        "shards that are a list": record(["00000.tar"]),
        "a shard that is text": record({"00000.tar": "x"}),
        "a digit that was damaged": shards() | {"shards": shards(signatures={"jpg/txt": 2})["shards"]},
        "an unknown entry": shards(path="/etc/passwd"),
        "a count that is text": shards(signatures={"jpg/txt": "3"}),
        "an absurd count": shards(signatures={"jpg/txt": 10**18}),
        "too many samples": shards(signatures={"jpg/txt": 4}),
        "too few samples": shards(signatures={"jpg/txt": 2}),
        "a path for a name": record({"../../../../etc/passwd": summary}),
    }


@pytest.mark.parametrize("case", [*lies({}), "deep", "no text"])
def test_a_wrong_summary_does_not_change_what_is_read(tmp_path, case):
    """A wrong but possible count is believed until the table contradicts it; then the next start is right."""
    make_shards(tmp_path, [3])
    first = indexed(tmp_path)
    file = tmp_path / FOLDER / "summary.json"
    contents = {
        name: json.dumps(record).encode()
        for name, record in lies(json.loads(file.read_bytes())["shards"]["00000.tar"]).items()
    }
    contents |= {"deep": b"[" * 200_000, "no text": b"\xff\xfe"}
    file.write_bytes(contents[case])
    again = indexed(tmp_path)
    if case in ("too few samples", "too many samples"):
        with refused(r"index counts [24] usable samples in .*00000\.tar, which has 3"):
            again.members(0)
        again = indexed(tmp_path)
    assert again.counts.tolist() == [3]
    assert [again.fetch(0, i) for i in range(3)] == [first.fetch(0, i) for i in range(3)]


def test_a_foreign_index_is_replaced_by_the_shards_own(tmp_path):
    """A table of the right size and tag whose columns are impossible is built again, and stored."""
    make_shards(tmp_path, [3])
    first = indexed(tmp_path)
    file = tmp_path / FOLDER / "00000.tar.npz"
    (tmp_path / FOLDER / "summary.json").unlink()
    edited(file, offset=at(0, 10**9))
    again = indexed(tmp_path)
    assert again.fetch(0, 0) == first.fetch(0, 0) != again.fetch(0, 1)
    assert arrays_of(file)["offset"].max() < 10**9
