import itertools
import logging

import pytest
from file_server import serving
from refusing import refused

from diff_dalle import storage
from diff_dalle.config import InputError
from diff_dalle.data.sources import ShardRange, divide


def made(folder, numbers, width=6, form="{}.tar") -> str:
    for number in numbers:
        (folder / form.replace("{}", f"{number:0{width}d}")).write_bytes(b"x")
    return str(folder / form)


def names(paths) -> list[str]:
    return [path.rpartition("/")[2] for path in paths]


def test_an_open_range_lists_what_there_is(tmp_path, caplog, monkeypatch):
    template = made(tmp_path, [0, 1, 2, 10, 11])
    (tmp_path / "0000003.tar").write_bytes(b"of another width")
    (tmp_path / "x000004.tar").write_bytes(b"of another name")
    asked = []
    monkeypatch.setattr(storage, "exists", lambda path, real=storage.exists: asked.append(path) or real(path))
    with caplog.at_level(logging.WARNING):
        found = ShardRange(template, 0, 9_999_999, 6).find()
    assert names(found) == ["000000.tar", "000001.tar", "000002.tar", "000010.tar", "000011.tar"] and len(asked) < 3
    assert "7 shards are missing: 000003–000009" in caplog.text


@pytest.mark.parametrize(
    ("start", "end", "expected", "missing"),
    [
        (0, 3, [0, 1, 3], "1 shard is missing: 0002"), (1, 1, [1], ""),
        (1, 9, [1, 3, 4], "6 shards are missing: 0002, 0005–0009"),
        (3, 4, [3, 4], ""), (0, 9999, [0, 1, 3, 4], "1 shard is missing: 0002"),
    ],
)  # fmt: skip
def test_missing_shards_of_a_range_are_named(tmp_path, caplog, start, end, expected, missing):
    template = made(tmp_path, [0, 1, 3, 4], 4, "part-{}.tar")
    with caplog.at_level(logging.WARNING):
        found = ShardRange(template, start, end, 4).find()
    assert names(found) == [f"part-{number:04d}.tar" for number in expected]
    assert missing in caplog.text and bool(missing) == bool(caplog.text)


def test_numbers_may_outgrow_their_width(tmp_path):
    template = made(tmp_path, [8, 9, 10, 11], 1)
    assert names(ShardRange(template, 9, 11, 1).find()) == ["9.tar", "10.tar", "11.tar"]


def test_the_number_may_be_in_the_folder(tmp_path):
    for number in (1, 2):
        (tmp_path / f"{number:02d}").mkdir()
        (tmp_path / f"{number:02d}" / "a.tar").write_bytes(b"x")
    template = str(tmp_path / "{}" / "a.tar")
    assert ShardRange(template, 0, 50, 2).find() == [str(tmp_path / "01/a.tar"), str(tmp_path / "02/a.tar")]
    with refused("cannot be listed: set end_shard"):
        ShardRange(template, 0, 9_999_999, 2).find()


@pytest.fixture
def server():
    with serving() as server:
        yield server


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 9])
def test_the_last_shard_on_a_web_server_is_searched_for(server, count):
    server.files = {f"/{number:04d}.tar": b"x" for number in range(3, 3 + count)}
    template = server.url("/{}.tar")
    found = ShardRange(template, 3, 9_999_999, 4).find()
    assert names(found) == [f"{number:04d}.tar" for number in range(3, 3 + count)] and len(server.requests) < 12
    assert len(ShardRange(template, 3, 4, 4).find()) == min(count, 2)
    with refused(r"0002\.tar does not exist"):
        ShardRange(template, 2, 9, 4).find()


def test_commands_have_all_shards_of_their_range():
    command = "pipe:s3cmd get s3://bucket/path/{}.tar -"
    assert ShardRange(command, 1, 2, 3).find() == [command.replace("{}", each) for each in ("001", "002")]
    with refused("end_shard is 9999999, but the shards pipe:echo .* cannot be listed"):
        ShardRange("pipe:echo {}", 0, 9_999_999, 6).find()


@pytest.mark.parametrize("count", [1, 2, 7, 8])
def test_the_last_shard_of_a_command_is_searched_for(tmp_path, caplog, count):
    made(tmp_path, range(3, 3 + count), 6)
    command = f"pipe:echo . >> {tmp_path}/starts; cat {tmp_path}/{{}}.tar 2>&-"
    for shown in (command, f"{command} | cat"):  # the second one has the status 0 always
        (tmp_path / "starts").write_text("")
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            found = ShardRange(shown, 3, 9_999_999, 6).find()
        assert found == [shown.replace("{}", f"{number:06d}") for number in range(3, 3 + count)]
        starts = len((tmp_path / "starts").read_text().split())
        asked = int(caplog.text.split("as ")[1].split()[0])
        assert asked <= 2 * count.bit_length() + 2 and asked <= starts <= 2 * asked
        assert f"is {2 + count:06d}, as {asked} start" in caplog.text
    with refused(r"000002\.tar 2>&- fails, or sends nothing"):
        ShardRange(command, 2, 9_999_999, 6).find()


def test_a_command_that_fails_once_is_no_end(tmp_path):
    made(tmp_path, range(4), 6)
    command = f"pipe:mkdir {tmp_path}/tried{{}} 2>&- && exit 1; cat {tmp_path}/{{}}.tar"
    with refused("must have {} once"):
        ShardRange(command, 0, 9_999_999, 6)
    command = f"pipe:n={{}}; mkdir {tmp_path}/tried$n 2>&- && exit 1; cat {tmp_path}/$n.tar"
    assert len(ShardRange(command, 0, 9_999_999, 6).find()) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("a.tar", 0, 1, 6), "must have {} once"), (("{}/{}.tar", 0, 1, 6), "must have {} once"),
        (("{}.tar", 2, 1, 6), "start_shard is 2, but must be at least 0 and at most end_shard (1)"),
        (("{}.tar", -1, 1, 6), "start_shard is -1"),
        (("{}.tar", 0, 1, 0), "shard_width is 0"),
    ],
)  # fmt: skip
def test_impossible_ranges_are_refused(arguments, message):
    with pytest.raises(InputError) as error:
        ShardRange(*arguments)
    assert message in str(error.value)


def test_an_empty_range_and_a_missing_folder_are_sentences(tmp_path):
    template = made(tmp_path, [5])
    with refused(r"none of its shards from .*000006\.tar on exists"):
        ShardRange(template, 6, 9, 6).find()
    with refused("there is no folder"):
        ShardRange(str(tmp_path / "no" / "{}.tar"), 0, 9, 6).find()


# ------------------------------------------------------------------------------------------------------------ division

DEFAULT = {"train": 0.75, "val": 0.15, "test": 0.1}


@pytest.mark.parametrize(
    ("count", "parts", "sizes"),
    [
        (100, DEFAULT, [75, 15, 10]), (10, DEFAULT, [8, 1, 1]), (3, DEFAULT, [1, 1, 1]), (4, DEFAULT, [2, 1, 1]),
        (10, {"train": 0.7, "val": 0.2, "test": 0.1}, [7, 2, 1]),
        (1, {"train": 1.0, "val": 0.0, "test": 0.0}, [1, 0, 0]),
        (5, {"train": 1 / 3, "val": 1 / 3, "test": 1 / 3}, [2, 2, 1]),
        (3, {"train": 0.98, "val": 0.01, "test": 0.01}, [1, 1, 1]),
        (1000, {"train": 0.998, "val": 0.001, "test": 0.001}, [998, 1, 1]),
    ],
)  # fmt: skip
def test_shards_are_divided_by_fractions(count, parts, sizes):
    shards = [f"{number}.tar" for number in range(count)]
    found = divide(shards, parts, 0)
    assert [len(found[name]) for name in parts] == sizes
    assert sorted(itertools.chain(*found.values())) == sorted(shards)
    assert all(part == sorted(part, key=shards.index) for part in found.values())


def test_the_seed_decides_the_division():
    shards = [f"{number}.tar" for number in range(40)]
    assert divide(shards, DEFAULT, 1) == divide(shards, DEFAULT, 1) != divide(shards, DEFAULT, 2)
    assert set(divide(shards, DEFAULT, 1)["val"]) != set(shards[30:36])


def test_more_parts_than_shards_are_refused():
    with refused("into train, val, test, but there is only 2 shards, the first a"):
        divide(["a", "b"], DEFAULT, 0)
