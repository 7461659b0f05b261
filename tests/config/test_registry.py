"""Tables of parts that modules and packages add to."""

import sys
from importlib.metadata import EntryPoint
from types import ModuleType

import pytest

from diff_dalle.config import Fault, InputError, Registry, from_dict, option, registry, settings


def built_in():
    """A part."""


@pytest.fixture
def table():
    return Registry("diff_dalle.shapes", {"round": built_in})


@pytest.fixture
def package(monkeypatch):
    """An installed one with two parts, one of them broken."""
    values = {"mine": f"{__name__}:built_in", "broken": "missing_package:part"}
    points = [EntryPoint(name, value, "diff_dalle.shapes") for name, value in values.items()]
    monkeypatch.setattr(registry, "entry_points", lambda group: points if group == "diff_dalle.shapes" else [])


def of_module(module: str, name: str = "square"):
    def part():
        return 4

    part.__module__, part.__name__ = module, name
    return part


def test_the_name_of_a_part_says_its_module(table):
    part = of_module("my.parts")
    assert table.register(part) is part
    assert list(table) == ["round", "my.parts.square"] and table["my.parts.square"] is part


def test_a_name_is_taken_once(table):
    table.register(of_module("my_parts"))
    with pytest.raises(InputError, match=r"^my_parts.square is in diff_dalle.shapes already: give yours another name$"):
        table.register(of_module("my_parts"))
    with pytest.raises(InputError, match=r"square cannot be put into diff_dalle.shapes: write @….register above its"):
        table["square"] = built_in
    assert list(table) == ["round", "my_parts.square"]


def test_a_script_gives_the_name_of_its_file_and_a_notebook_none(table, monkeypatch):
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    first, second = (of_module("__main__") for _ in range(2))
    table.register(first)
    table.register(second)  # a cell that runs again
    assert table["square"] is second
    with pytest.raises(InputError, match="round is in diff_dalle.shapes already"):
        table.register(of_module("__main__", "round"))
    main.__file__ = "/home/me/experiment.py"
    table.register(of_module("__main__"))
    assert list(table) == ["round", "square", "experiment.square"]


@pytest.mark.usefixtures("package")
def test_parts_of_installed_packages_are_imported_when_they_are_asked_for(table):
    assert "mine" in table and list(table) == ["round"] and table.names() == ["round", "mine", "broken"]
    assert table["mine"] is built_in and "other" not in table
    with pytest.raises(InputError, match="^missing_package:part cannot be imported: ModuleNotFoundError: No module"):
        table["broken"]
    with pytest.raises(KeyError):
        table["other"]


SHAPES = Registry("diff_dalle.shapes", {"round": built_in})
EMPTY = Registry("diff_dalle.nothing")


@settings
class Shape:
    """Shape"""

    kind: str = option("round", "kind", choices=SHAPES)
    own: str | None = option(None, "one of your own", choices=EMPTY)


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"kind": "rond"},
            "kind is 'rond', but must be one of round, mine, broken, or MODULE.NAME of yo",
        ),
        (
            {"kind": "my_parts.square"},
            "kind is 'my_parts.square', but my_parts is not imported: start with --import my_parts",
        ),
        ({"kind": "a.b.c"}, "kind is 'a.b.c', but a.b is not imported: start with --import a.b, or import it in"),
        ({"own": "square"}, "own is 'square', but must be MODULE.NAME of your own"),
        ({"kind": "rm -rf .x"}, "kind is 'rm -rf .x', but must be one of round"),
    ],
)
def test_what_is_not_there_is_refused_with_what_to_import(given, message):
    with pytest.raises(InputError) as error:
        from_dict(Shape, given)
    assert message in str(error.value) and isinstance(error.value.faults[0], Fault)


@pytest.mark.usefixtures("package")
def test_settings_see_what_is_registered_later(monkeypatch):
    monkeypatch.delitem(SHAPES, "late.square", raising=False)
    SHAPES.register(of_module("late"))
    assert from_dict(Shape, {"kind": "late.square"}).kind == "late.square" and Shape(kind="mine").kind == "mine"
    with pytest.raises(InputError, match=r"'late.squar', but must be one of round, late.square, .*did you mean late"):
        from_dict(Shape, {"kind": "late.squar"})
    dict.pop(SHAPES, "late.square")
