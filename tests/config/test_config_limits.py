"""Large and hostile settings cost little: what is looked at is counted."""

import difflib

import pytest

from diff_dalle.commands import settings as given_settings
from diff_dalle.commands.command_line import parse
from diff_dalle.config import MAX_FAULTS, Fault, InputError, from_dict, load_mapping, names, option, reading, settings
from diff_dalle.config.declaration import Leaf
from diff_dalle.config.errors import MAX_QUOTED, quoted
from diff_dalle.config.values import FlagText, checked
from diff_dalle.config.yaml_text import MAX_KEYS, MAX_NODES, _StrictLoader
from diff_dalle.recipes.generator import GeneratorRun


@settings
class Small:
    """Small"""

    lr: float = option(0.1, "learning rate")
    names: tuple[str, ...] = option((), "names", choices=("a", "b"))


def counting(monkeypatch, owner, name) -> list:
    """The arguments of the calls of a function from now on."""
    calls, original = [], getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *given: calls.append(given) or original(*given))
    return calls


KEYS = [f"k{i}" for i in range(60_000)]
TEXTS = {
    "yaml": "".join(f"{key}: 1\n" for key in KEYS),
    "json": "{" + ", ".join(f'"{key}": 1' for key in KEYS) + "}",
    "nested": "a:\n" + "".join(f"  {key}: 1\n" for key in KEYS),
    "items": "a: [" + "{b: 1, c: 2}, " * 30_000 + "]",
}


@pytest.mark.parametrize("form", TEXTS)
def test_of_many_keys_the_first_are_looked_at(monkeypatch, form):
    nodes = counting(monkeypatch, _StrictLoader, "_check_depth")
    with pytest.raises(InputError, match="F: it holds more than 2,000 keys"):
        load_mapping(TEXTS[form], "F")
    assert len(nodes) <= 3 * MAX_KEYS


def test_of_many_values_the_first_are_looked_at(monkeypatch):
    nodes = counting(monkeypatch, _StrictLoader, "_check_depth")
    with pytest.raises(InputError, match="F: it holds more than 20,000 values"):
        load_mapping("a: [" + "1, " * 100_000 + "]", "F")
    assert len(nodes) <= MAX_NODES
    assert len(load_mapping("a: [" + "1, " * (MAX_NODES - 3) + "]", "F")["a"]) == MAX_NODES - 3
    assert len(load_mapping("".join(f"k{i}: 1\n" for i in range(MAX_KEYS)), "F")) == MAX_KEYS


def test_of_many_unknown_keys_the_first_are_told(monkeypatch, tmp_path):
    mapping = dict.fromkeys(KEYS, 1)
    searches = counting(monkeypatch, reading, "nearest")
    with pytest.raises(InputError) as error:
        from_dict(Small, mapping)
    assert [fault.setting for fault in error.value.faults] == KEYS[:MAX_FAULTS] and len(searches) == MAX_FAULTS
    searches = counting(monkeypatch, given_settings, "nearest")
    (tmp_path / "c.yaml").write_text("".join(f"{key}: 1\n" for key in KEYS[:MAX_KEYS]))
    with pytest.raises(InputError, match=r"10 settings are wrong") as error:
        parse(GeneratorRun, ["--config", str(tmp_path / "c.yaml")])
    assert "k9 " in str(error.value) and "k10 " not in str(error.value) and len(searches) == MAX_FAULTS


def test_wrong_values_of_a_list_are_told_by_the_first(monkeypatch):
    calls = []
    faults = Leaf.faults
    monkeypatch.setattr(
        Leaf, "faults", lambda self, value: (calls.append(each) or each for each in faults(self, value))
    )
    with pytest.raises(InputError, match="names is 'c', but must be one of a, b"):
        from_dict(Small, {"names": ["a", "c", *["d"] * 10_000]})
    assert len(calls) == 1


def test_long_names_are_not_searched_for(monkeypatch):
    monkeypatch.setattr(difflib, "get_close_matches", lambda *_, **__: pytest.fail("searched"))
    assert names.nearest("lrr" * 10**6, ["lr"]) == ""
    with pytest.raises(InputError, match="x… is an unknown setting"):
        from_dict(Small, {"x" * 10**6: 1})


class Looked(list):
    """Counts the items that are looked at."""

    count = 0

    def __iter__(self):
        for item in super().__iter__():
            Looked.count += 1
            yield item


def nested(depth: int):
    value = Looked([0])
    for _ in range(depth):
        value = Looked([value] * 100)
    return value


@pytest.mark.parametrize(
    "value",
    [Looked(range(10**6)), nested(50), {"a": nested(50)}, (nested(3),) * 9, Looked([{i: i} for i in range(999)])],
)
def test_of_a_large_value_the_beginning_is_shown(value):
    Looked.count = 0
    shown = quoted(value)
    assert (
        shown.endswith("…")
        and len(shown) == MAX_QUOTED + 1
        and Looked.count <= MAX_QUOTED * (9 if isinstance(value, tuple) else 1)
    )
    if not isinstance(value, dict) and len(value) > 900:
        assert repr(value).startswith(shown[:-1])


@pytest.mark.parametrize(
    "value", ["x", "x'y", b"z", [], (), {}, (1,), [1, "a"], {"a": [1, {}]}, "\ud800", 3, True, [None]]
)
def test_small_values_are_shown_as_they_are(value):
    assert quoted(value) == (str(value[0]) if value == (1,) else repr(value))


def test_numbers_of_many_digits_can_be_shown():
    assert quoted(10**4000).startswith("a number above 2^10000") and quoted([-(10**9999)]).startswith(
        "[a number below -2"
    )
    assert "is a number above" in Fault("a", "must be small", 10**9999).sentence()
    with pytest.raises(InputError, match="lr is a number above"):
        from_dict(Small, {"lr": 10**9999})


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a,b", ["a", "b"]),
        (",a,,b,", ["a", "b"]),
        ("{1,2}.tar,b", ["{1,2}.tar", "b"]),
        ("a{1..3}b{x,y}c,{0,1}", ["a{1..3}b{x,y}c", "{0,1}"]),
        ("a{b,c", ["a{b", "c"]),
        ("a,pipe:cat b,c,pipe:d", ["a", "pipe:cat b,c", "pipe:d"]),
        ("a," * 200_000, ["a"] * 200_000),
        ("{a," * 200_000, ["{a"] * 200_000),
    ],
)
def test_lists_are_split_at_commas_outside_of_braces(text, parts):
    leaf = Leaf(("names",), tuple[str, ...], (), "names")
    assert checked(leaf, FlagText(text), "names") == tuple(parts)
