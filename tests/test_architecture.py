"""The rooms and the order in which they may import each other, read from the syntax trees."""

import ast
import dataclasses
import importlib
import pkgutil
import sys
from pathlib import Path

import pytest

import diff_dalle
from diff_dalle.commands.command_line import ALIASES
from diff_dalle.config import leaves

PACKAGE = Path(diff_dalle.__file__).parent
ROOT = PACKAGE.parent

# An import may only go down this list.
ROOMS = (
    "scripts", "benchmarks", "commands", "shapes", "sampling", "tasks", "training", "evaluation", "checkpoints", "data",
    "diffusion", "models", "images", "text", "tracking", "distributed", "storage",
    "batch", "config", "randomness", "errors",
)  # fmt: skip


def sources():
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path, path.relative_to(PACKAGE).with_suffix("").parts
    for path in sorted((ROOT / "scripts").glob("*.py")):
        yield path, ("scripts", path.stem)


def imported(path, parts):
    """(room or outside package, whether at module level) of every import in a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    top = {id(node) for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))} - {
        id(node) for outer in ast.walk(tree) if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef))
        for node in ast.walk(outer)
    }  # fmt: skip
    package = ["diff_dalle", *parts[:-1]] if parts[0] != "scripts" else []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{stem}.{alias.name}" for alias in node.names] if stem == "diff_dalle" else [stem]
        else:
            continue
        for name in names:
            yield name.split("."), id(node) in top


def test_every_room_is_in_the_list_and_the_root_holds_the_ground_only():
    rooms = {parts[0] for _, parts in sources()} - {"__init__", "presets"}
    assert rooms == set(ROOMS)
    assert {path.stem for path in PACKAGE.glob("*.py")} == {"__init__", "batch", "config", "errors", "randomness"}


def test_imports_only_go_down():
    for path, parts in sources():
        if parts == ("__init__",):
            continue  # the package's front door re-exports from everywhere
        for name, _ in imported(path, parts):
            if name[0] == "diff_dalle" and len(name) > 1:
                here, there = ROOMS.index(parts[0]), ROOMS.index(name[1])
                assert here <= there, f"{path.relative_to(ROOT)} imports diff_dalle.{name[1]}, which is above it"


@pytest.mark.parametrize(("module", "room"), [("mpi4py", "distributed"), ("blobfile", "storage")])
def test_some_packages_are_imported_in_one_file_only(module, room):
    users = {parts[0] for path, parts in sources() for name, _ in imported(path, parts) if name[0] == module}
    assert users == {room}


def test_extras_are_imported_where_they_are_used():
    """Nothing optional at module level: a missing extra must not break what does not need it."""
    core = {"torch", "numpy", "webdataset", "ftfy", "regex", "tqdm", "PIL", "yaml", "diff_dalle", "braceexpand"}
    for path, parts in sources():
        for name, at_top in imported(path, parts):
            if at_top and name[0] not in sys.stdlib_module_names:
                assert name[0] in core, f"{path.relative_to(ROOT)} imports {name[0]} at module level"


def test_the_text_tower_of_rooms_knows_no_diffusion():
    for path, parts in sources():
        if parts[0] == "training":
            assert "diffusion" not in path.read_text(encoding="utf-8").lower().replace("diff_dalle", ""), path


def config_classes():
    for info in pkgutil.walk_packages([str(PACKAGE)], "diff_dalle."):
        module = importlib.import_module(info.name)
        for value in vars(module).values():
            if isinstance(value, type) and dataclasses.is_dataclass(value) and value.__name__.endswith("Config"):
                yield value


def test_every_setting_is_read_somewhere():
    """A flag that nothing reads is a lie: its name must occur as an attribute outside its own declaration."""
    used = set()
    for path, _ in sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                used.add(node.attr)
            elif isinstance(node, ast.JoinedStr):  # getattr(config, f"say_{what}")
                used |= {part.value for part in node.values if isinstance(part, ast.Constant)}
    for config in config_classes():
        for leaf in leaves(config):
            stems = {leaf.name, leaf.name.split("_")[0] + "_"}
            assert stems & used, f"{config.__name__}.{leaf.name} is never read"
            assert leaf.help, f"{config.__name__}.{leaf.name} has no help text"


def test_aliases_point_at_settings_and_hide_none():
    names = {leaf.name for config in config_classes() for leaf in leaves(config)}
    for old, alias in ALIASES.items():
        assert old not in names and alias.field in names


def test_files_stay_readable():
    for path, parts in sources():
        lines = len(path.read_text(encoding="utf-8").splitlines())
        assert lines <= (80 if parts[0] == "scripts" else 400), f"{path.relative_to(ROOT)} has {lines} lines"


def test_top_level_is_the_owners_frame():
    names = {p.name for p in ROOT.iterdir() if not p.name.startswith(".") and not p.name.endswith(".egg-info")}
    assert names - {"build", "runs"} == {"setup.py", "diff_dalle", "scripts", "tests", "README.md", "LICENSE"}
