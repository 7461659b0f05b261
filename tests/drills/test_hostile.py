"""Hostile files: the damage is the same every time, and every way to go wrong is seen."""

import json
import random
import signal
import time

import pytest

from diff_dalle.config import InputError
from diff_dalle.images.decode import BrokenSample
from drills import hostile
from drills.faults_long import growth
from drills.hostile_cases import CASES
from drills.mutations import as_json, damaged, distorted
from drills.parsers import PARSERS

SEEDS = [bytes(range(256)), b"a text of some length"]


def test_damage_is_a_function_of_the_seed():
    found = [damaged(SEEDS, random.Random(i)) for i in range(500)]
    assert found == [damaged(SEEDS, random.Random(i)) for i in range(500)]
    assert len(set(found)) > 450 and sum(data in SEEDS for data in found) < 25
    assert min(map(len, found)) < 10 and max(map(len, found)) > 1000
    assert damaged([b""], random.Random(0)) == b""


def test_one_part_is_distorted_and_the_rest_stays():
    value = {"a": 1, "b": [1, 2, {"c": "x"}], "d": {"e": None}}
    before = json.dumps(value)
    found = [distorted(value, random.Random(i)) for i in range(300)]
    assert json.dumps(value) == before
    assert {type(each) for each in found} > {dict, list, str}
    assert all(as_json(each) for each in found)
    assert any(isinstance(each, dict) and each.keys() == value.keys() and each["a"] == 1 for each in found)


def raises(error):
    def read(data):
        raise error

    return read


@pytest.fixture
def limits(monkeypatch):
    """The time limits of a case, short for waiting and none for computing."""
    monkeypatch.setattr(hostile, "LIMIT_SECONDS", 60)
    monkeypatch.setattr(hostile, "WAIT_SECONDS", 60)
    signals = (signal.SIGPROF, signal.SIGALRM)
    previous = [signal.signal(number, hostile._too_slow) for number in signals]
    yield monkeypatch
    for number, handler in zip(signals, previous, strict=True):
        signal.signal(number, handler)


def compute(data):
    while True:
        pass


@pytest.mark.parametrize(
    ("read", "verdict"),
    [
        (len, "read"),
        (raises(InputError("no")), "refused"),
        (raises(BrokenSample("no")), "refused"),
        (raises(KeyError("x")), "KeyError at test_hostile.py"),
        (raises(RecursionError()), "RecursionError"),
        (raises(MemoryError()), "more than 1024 MiB"),
    ],
)
def test_every_outcome_has_a_verdict(limits, read, verdict):
    assert hostile.verdict_on(read, b"x").startswith(verdict)


@pytest.mark.parametrize(
    ("limit", "read"), [("LIMIT_SECONDS", compute), ("WAIT_SECONDS", lambda data: time.sleep(600))]
)
def test_computing_and_waiting_are_limited(limits, limit, read):
    limits.setattr(hostile, limit, 0.1)
    assert hostile.verdict_on(read, b"x").startswith("no end within")


def test_the_report_counts_and_the_first_wrong_files_are_kept(monkeypatch, tmp_path):
    def read(data):
        if data == b"2":
            raise ValueError("two")
        if data == b"1":
            raise InputError("one")

    numbers = iter(b"0122")
    monkeypatch.setitem(PARSERS, "digits", lambda folder: (lambda chance: bytes([next(numbers)]), read))
    report = hostile.read_all("digits", 4, 0, tmp_path)
    ((what, count),) = report.pop("found").items()
    assert report == {"read": 1, "refused": 1, "wrong": 2} and count == 2 and what.startswith("ValueError")
    assert (tmp_path / "wrong_1").read_bytes() == b"2"


def test_the_long_form_reads_at_least_100_000_files():
    assert list(CASES) == list(PARSERS)
    assert sum(CASES.values()) >= 100_000


@pytest.mark.parametrize("name", [name for name in PARSERS if not name.startswith(("structures", "embeddings"))])
def test_every_parser_also_reads_some_of_its_files(name, tmp_path, limits):
    """A parser that refused everything would be drilled in vain."""
    make, read = PARSERS[name](tmp_path)
    verdicts = [hostile.verdict_on(read, make(random.Random(i))) for i in range(30)]
    assert "read" in verdicts


def test_growth_is_relative_to_the_first_third():
    assert growth([100] * 9) == 0 and growth([1, 1, 1, 1, 1, 1, 2, 2, 2]) == 1
