import math

import pytest

from diff_dalle.config import InputError, load_mapping, yaml_text
from diff_dalle.config.yaml_text import to_yaml

BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
CHAIN = "".join(
    f"a{i}: &a{i} {'[' * 20}{'*a' + str(i - 1) if i else 'x'}{']' * 20}\n" for i in range(3)
)  # none of them is deep alone


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr: 1\nlr: 2", "F: setting lr is given twice (line 2)"),
        ('{"a": {"lr": 1, "lr": 2}}', "F: setting lr is given twice (line 1)"),
        ("lr: 1\n'lr': 2", "given twice"),
        ("a: " + "[" * 100_000, "F: values are nested more than 32 levels deep (line 1)"),
        ("\n".join(" " * i + "a:" for i in range(40)), "more than 32 levels deep (line 32)"),
        (CHAIN, "more than 32 levels deep (line 2)"),
        (BOMB, "F: it holds more than 20,000 values, repeated ones included (line 5)"),
        ("a: &a [*a]", "F: an alias stands inside the value that it repeats (line 1)"),
        ("&a {model: *a}", "an alias stands inside the value that it repeats"),
        ("a: *b", "F is not valid YAML or JSON: found undefined alias 'b' (line 1)"),
        ("lr: {{rate}: 1}", "not valid YAML"),
        ("{a: [1", "not valid YAML"),
        ("lr: !!python/object/apply:os.getcwd []", "not valid YAML"),
        ("lr: !!bool maybe", "not valid YAML"),
        ("lr: !!int ''", "not valid YAML"),
        ("lr: !!timestamp x", "not valid YAML"),
        ("lr: !!int 1:30", "not valid YAML"),
        ("#" * 2**20 + "\nlr: 1", "F has more than 1,048,576 characters"),
        (f"lr: {'1' * 5000}", "not valid YAML"),
        ("a: \x00", "not valid YAML"),
        ("a: 1\n---\nb: 2", "not valid YAML"),
        ("- 3", "F must hold settings as `name: value` lines"),
        ("", "F must hold settings"),
    ],
)
def test_bad_texts_are_one_sentence(text, message):
    with pytest.raises(InputError) as error:
        load_mapping(text, "F")
    assert message in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) < 250


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1:30", "1:30"), ("1:30.5", "1:30.5"), ("yes", "yes"), ("No", "No"), ("on", "on"), ("OFF", "OFF"), ("y", "y"),
        ("true", True), ("False", False), ("TRUE", True), ("010", 10), ("-010", -10), ("0o17", 15), ("0x1F", 31),
        ("0b11", "0b11"), ("1_000", "1_000"), ("2020-01-02", "2020-01-02"), ("2020-13-45", "2020-13-45"),
        ("1e3", 1000.0), ("1.", 1.0), (".5", 0.5), ("+.5e-1", 0.05), ("-.inf", -math.inf), (".INF", math.inf),
        ("~", None), ("null", None), ("", None), ("'yes'", "yes"), ("!!str 1", "1"), ("=", "="), ("0o8", "0o8"),
        ("inf", "inf"), ("nan", "nan"),
    ],
)  # fmt: skip
def test_scalars_are_those_of_yaml_1_2(text, value):
    found = load_mapping(f"a: {text}", "F")["a"]
    assert found == value and type(found) is type(value)
    assert load_mapping(to_yaml({"a": value}), "F") == {"a": value}


@pytest.mark.parametrize(
    "text", ["yes", "1:30", "010", "1e-4", "0o17", "0x1f", "~", "null", "", ".nan", "<<", "1_0", "a: b"]
)
def test_texts_stay_texts_when_written(text):
    assert load_mapping(to_yaml({"a": text, "b": [text]}), "F") == {"a": text, "b": [text]}


def test_values():
    assert load_mapping("a: 1e-4\nb: 3.0E+2\nc: x\nd: [1, 2]", "F") == {"a": 1e-4, "b": 300.0, "c": "x", "d": [1, 2]}
    assert load_mapping('{\n\t"lr": 1e-4,\n\t"model": {"size": 3}\n}', "F") == {"lr": 1e-4, "model": {"size": 3}}


def test_aliases_and_merges_within_the_limits():
    """A merged mapping may override keys, also when it is merged again before it is built itself."""
    text = "A: &A {x: 0, y: 1}\np: {q: &B {<<: *A, x: 1}}\nc: {<<: *B, z: 2}\nd: [*A, *A]"
    found = load_mapping(text, "F")
    assert found["c"] == {"x": 1, "y": 1, "z": 2} and found["d"] == [found["A"], found["A"]]
    found = load_mapping("A: &A {x: 0, y: 1}\nB: &B {x: 1}\nc: {<<: [*B, *A]}\nd: {y: 2, <<: *A}", "F")
    assert found["c"] == {"x": 1, "y": 1} and found["d"] == {"x": 0, "y": 2}
    with pytest.raises(InputError, match=r"<< merges something that is no mapping \(line 1\)"):
        load_mapping("a: {<<: 3}", "F")


def test_limits_are_exact(monkeypatch):
    monkeypatch.setattr(yaml_text, "MAX_NODES", 7)
    assert load_mapping("a: [1, 2, 3, 4]", "F") == {"a": [1, 2, 3, 4]}  # 2 collections, 1 key, 4 items
    with pytest.raises(InputError, match="more than 7 values"):
        load_mapping("a: [1, 2, 3, 4, 5]", "F")
    monkeypatch.setattr(yaml_text, "MAX_DEPTH", 3)
    assert load_mapping("a: [1]", "F") == {"a": [1]}
    with pytest.raises(InputError, match="more than 3 levels"):
        load_mapping("a: [[1]]", "F")
