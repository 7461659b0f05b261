"""Rules for the code base, checked on the syntax trees: rooms, imports, settings, names, spelling."""

import ast
import collections
import dataclasses
import functools
import graphlib
import importlib
import re
import sys
from pathlib import Path

import pytest
from reading import Reading

import diff_dalle
from diff_dalle.commands.flag_names import ALIASES
from diff_dalle.config import leaves

PACKAGE = Path(diff_dalle.__file__).parent
ROOT = PACKAGE.parent
TESTS = ROOT / "tests"

OUTSIDE = ("scripts", "drills", "benchmarks")  # of the package
# The door for scripts of Guided-Diffusion: modules and functions have its names. One room, called by its first module.
DOOR = ("script_util", "dist_util", "gaussian_diffusion", "logger", "nn", "resample", "respace", "unet")
# An import may only go down this list.
ROOMS = (
    *OUTSIDE, "__main__", DOOR[0], "web", "commands", "evaluators", "sharing", "recipes", "worlds", "sampling",
    "tasks", "training", "embeddings", "evaluation", "checkpoints", "data", "diffusion", "models", "text", "tracking",
    "images", "distributed", "storage", "batch", "randomness", "config",
)  # fmt: skip


@functools.cache
def sources() -> dict[Path, ast.Module]:
    """The syntax trees of package, scripts, and of what these run of the tests."""
    folders = PACKAGE, *(ROOT / "scripts" if name == "scripts" else TESTS / name for name in OUTSIDE)
    paths = [path for folder in folders for path in sorted(folder.rglob("*.py")) if not path.match("test_*.py")]
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def module_name(path: Path) -> tuple[str, ...]:
    """("diff_dalle", room, …) or (room, name)."""
    parts = path.relative_to(TESTS if TESTS in path.parents else ROOT).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def room(module: tuple[str, ...]) -> str:
    name = module[0] if module[0] in OUTSIDE else (*module, "")[1]
    return DOOR[0] if name in DOOR else name


def is_module(name: tuple[str, ...]) -> bool:
    paths = ROOT.joinpath(*name), TESTS.joinpath(*name)
    return any(path.with_suffix(".py").exists() or (path / "__init__.py").exists() for path in paths)


def is_own(name: tuple[str, ...]) -> bool:
    return name[0] in OUTSIDE or (name[0] == "diff_dalle" and len(name) > 1)


@functools.cache
def imports(path: Path) -> list[tuple[tuple[str, ...], bool]]:
    """(module, whether at module level) of every import in a file."""
    tree, package = sources()[path], module_name(path.with_name("__init__.py"))
    nested = {
        id(node)
        for outer in ast.walk(tree)
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef))
        for node in ast.walk(outer)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [tuple(alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            stem = (*base, *(node.module.split(".") if node.module else ()))
            names = [(*stem, alias.name) if is_module((*stem, alias.name)) else stem for alias in node.names]
        else:
            continue
        found += [(name, id(node) not in nested) for name in names]
    return found


def test_rooms_are_listed_and_the_root_is_small():
    rooms = {room(module_name(path)) for path in sources() if module_name(path) != ("diff_dalle",)}
    assert rooms - {"presets", "trained"} == set(ROOMS)  # these hold data
    assert {path.stem for path in PACKAGE.glob("*.py")} <= {
        "__init__",
        "__main__",
        "batch",
        "config",
        "randomness",
        *DOOR,
    }


def test_nothing_of_the_library_imports_what_is_named_as_in_guided_diffusion():
    for path in sources():
        here = room(module_name(path))
        if here not in (*OUTSIDE, DOOR[0]):
            assert not [name for name, _ in imports(path) if is_own(name) and room(name) == DOOR[0]], path


def test_the_code_map_lists_the_rooms_in_order():
    rows = re.findall(
        r"^\| (?:\[)?`(\w+(?:/|\.py))`", (PACKAGE / "README.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    rooms = ROOMS[len(OUTSIDE) :]
    rows = rows[: len(rooms)]
    assert tuple(row.removesuffix("/").removesuffix(".py") for row in rows) == rooms
    assert all((PACKAGE / row).exists() for row in rows)


def test_imports_only_go_down():
    for path in sources():
        here = module_name(path)
        if here == ("diff_dalle",):
            continue  # re-exports from everywhere
        for name, _ in imports(path):
            if is_own(name):
                message = f"{path.relative_to(ROOT)} imports {'.'.join(name)}, which is above it"
                assert ROOMS.index(room(here)) <= ROOMS.index(room(name)), message


@pytest.mark.parametrize("unit", ["room", "module"])
def test_there_is_no_import_cycle(unit):
    """Rooms: with imports inside functions; modules: at module level."""
    graph = collections.defaultdict(set)
    for path in sources():
        here = module_name(path)
        if here == ("diff_dalle",):
            continue
        for name, at_top in imports(path):
            if is_own(name) and (at_top or unit == "room"):
                edge = (room(here), room(name)) if unit == "room" else (here, name)
                if edge[0] != edge[1]:
                    graph[edge[0]].add(edge[1])
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which shows the cycle


@pytest.mark.parametrize(("package", "only_room"), [("mpi4py", "distributed"), ("blobfile", "storage")])
def test_some_packages_are_imported_in_one_room_only(package, only_room):
    users = {room(module_name(path)) for path in sources() for name, _ in imports(path) if name[0] == package}
    assert users == {only_room}


def test_extras_are_imported_where_they_are_used():
    """No optional package at module level: a missing extra must not affect what does not use it."""
    core = {
        "torch",
        "numpy",
        "webdataset",
        "ftfy",
        "regex",
        "tqdm",
        "PIL",
        "yaml",
        "diff_dalle",
        "braceexpand",
        "typing_extensions",
        "urllib3",
        "safetensors",
    }
    with_torch = {PACKAGE / "models/kernels": "triton"}  # imported on GPUs only
    tests = {path.stem for path in TESTS.glob("*.py")}
    for path in sources():
        here = room(module_name(path))
        own = {*OUTSIDE, *tests, *(other.stem for other in path.parent.glob("*.py"))} if here in OUTSIDE else set()
        for name, at_top in imports(path):
            if at_top and name[0] not in sys.stdlib_module_names:
                assert name[0] in core | own | {with_torch.get(path.parent)}, (
                    f"{path.relative_to(ROOT)} imports {name[0]} at module level"
                )
            assert name[0] not in tests or here in OUTSIDE, f"{path.relative_to(ROOT)} imports {name[0]} of the tests"


def test_training_does_not_depend_on_diffusion():
    for path in (PACKAGE / "training").glob("*.py"):
        assert "diffusion" not in path.read_text(encoding="utf-8").lower(), path


def test_public_functions_are_defined_once():
    """The same name in two rooms would have two meanings. Modules of one room may implement the same contract; the
    door's names are Guided-Diffusion's."""
    rooms = collections.defaultdict(set)
    for path, tree in sources().items():
        for node in tree.body:
            if (
                isinstance(node, ast.FunctionDef)
                and not node.name.startswith("_")
                and room(module_name(path)) not in (*OUTSIDE, DOOR[0])
            ):
                rooms[node.name].add(room(module_name(path)))
    assert len(rooms) > 200
    assert not {name: sorted(found) for name, found in rooms.items() if len(found) > 1}


# ------------------------------------------------------------------------------------------------------------- settings


@functools.cache
def config_classes() -> set[type]:
    """All dataclasses that declare settings."""
    found = set()
    for path in sources():
        if (name := ".".join(module_name(path))).startswith("scripts"):
            continue
        module = importlib.import_module(name)
        for value in vars(module).values():
            if isinstance(value, type) and dataclasses.is_dataclass(value) and value.__module__ == module.__name__:
                found |= {value} if settings(value) else set()
    return found


def settings(config: type) -> list[dataclasses.Field]:
    """The settings that a class itself declares."""
    return [field for field in dataclasses.fields(config) if "help" in field.metadata]


# Read by computed names, or before there is a config. tests/{models/test_noised_clip,worlds/shapes/test_shapes}.py,
# tests/commands/{cascade/test_cascade_files,test_guided_flags,test_sample,test_sample_latents}.py and
# tests/web/test_api.py test the effect of each.
READ_BY_NAME = {
    "NoisedClipConfig": "",
    "ExpectedModel": "",
    "ExpectedClassifier": "",
    "ShapesConfig": "say_",
    "CascadeRun": "model_version",
    "NetworkLora": "model_path",
    "LatentCascadeConfig": "",
    "UpsamplersConfig": "",
    "Wish": "",
    "StageBSampling": "semantic_scale",
}  # class → how the names begin


def test_every_setting_is_read_and_has_a_help_text():
    """A flag without effect is a bug. Reads of an attribute of the same name of another class do not count, nor does
    validation."""
    reading, classes = Reading(sources().values()), config_classes()
    assert len(classes) > 20
    for config in classes:
        family = {base.__name__ for base in config.__mro__} | {c.__name__ for c in classes if config in c.__mro__}
        exempt = [start for name, start in READ_BY_NAME.items() if name in family]
        for field in settings(config):
            read = any((name, field.name) in reading.found for name in family)
            assert read or field.name.startswith(tuple(exempt)), f"{config.__name__}.{field.name} is never read"
            assert field.metadata["help"], f"{config.__name__}.{field.name} has no help text"


def test_reads_are_told_apart_by_the_class_they_are_from():
    code = """
class First:
    size: int
    used: int
    checked: int
    def __post_init__(self):
        print(self.checked)
    def own(self):
        return self.used

class Second(First):
    size: int

class Holder:
    second: Second
    def __init__(self, parts: list[First]):
        self.parts = parts
    @property
    def best(self) -> Second:
        return self.second

class Third:
    size: int
    deep: int
    late: int

def outer(third: Third, holder: Holder):
    print(holder.best.size, unknown.used, [part.inner for part in holder.parts])
    for kept in zip(parse(Third), [1]):
        kept.deep = kept.late
"""
    found = Reading([ast.parse(code)]).found
    assert ("Second", "size") in found and ("First", "size") in found and ("Third", "size") not in found
    assert ("First", "used") in found and ("First", "checked") not in found and ("First", "inner") in found
    assert ("Third", "late") in found and ("Third", "deep") not in found


def test_aliases_point_at_settings_and_hide_none():
    names = {leaf.name for config in config_classes() for leaf in leaves(config)}
    for old, alias in ALIASES.items():
        assert old not in names and alias.field in names


# ---------------------------------------------------------------------------------------------------------------- style


@functools.cache
def texts() -> dict[Path, str]:
    """All sources and documents that people write; this file, which holds the patterns, is left out."""
    folders = ("diff_dalle", "scripts", "tests", ".github", ".ci")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*")] + [
        ROOT / "README.md",
        ROOT / "setup.py",
    ]
    endings = (".py", ".md", ".sh", ".yaml", ".yml", "")
    paths = [path for path in paths if path.is_file() and path.suffix in endings and path != Path(__file__).resolve()]
    return {path.relative_to(ROOT): path.read_text(encoding="utf-8") for path in sorted(paths)}


# Words that captions use, from which the vocabulary is trained.
ANY_SPELLING = {Path("diff_dalle/text/bpe_training.py")}
BRITISH = re.compile(
    r"colour|grey|behaviour|\bcentre|neighbour|favour|licence|catalogue|learnt|judgement|artefact|whilst|labell|modell"
    r"|cancell(ed|ing)|analys(ed|ing)"
    r"|(parametr|normal|optim|minim|maxim|initial|synchron|discret|quant|summar|general|token|serial|random|util|visual"
    r"|recogn|organ|vector|regular|special|emphas|local|final)is(e|ed|es|ing|er|ation)\b",
    re.IGNORECASE,
)


def test_the_spelling_is_american():
    """Except in earlier names of settings."""
    earlier = {name for config in config_classes() for field in settings(config) for name in field.metadata["was"]}
    exempt = re.compile("|".join(rf"\b{name}\b" for name in earlier))
    found = [
        f"{path}:{number}: {line.strip()}"
        for path, text in texts().items()
        if path not in ANY_SPELLING
        for number, line in enumerate(text.splitlines(), 1)
        if BRITISH.search(exempt.sub("", line))
    ]
    assert not found, "\n".join(found)


def test_only_tables_are_exempt_from_formatting():
    counts = {path: text.count("# fmt: skip") + text.count("# fmt: off") for path, text in texts().items()}
    most = sorted(counts, key=counts.__getitem__, reverse=True)
    assert sum(counts.values()) <= 60, "\n".join(f"{counts[path]} {path}" for path in most if counts[path])


def test_files_are_short():
    for path in sources():
        lines = len(path.read_text(encoding="utf-8").splitlines())
        most = 80 if module_name(path)[0] == "scripts" else 400
        assert lines <= most, f"{path.relative_to(ROOT)} has {lines} lines"


def test_what_the_tests_install_is_pinned():
    setup = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
    given = {
        each.arg: ast.literal_eval(each.value)
        for each in ast.walk(setup)
        if isinstance(each, ast.keyword) and each.arg in ("install_requires", "extras_require")
    }
    needed = [*given["install_requires"], *given["extras_require"]["test"], "pluggy", "iniconfig", "execnet"]
    pinned = (ROOT / "scripts" / "constraints.txt").read_text(encoding="utf-8").splitlines()
    names = {line.partition("==")[0].lower() for line in pinned if "==" in line}
    assert {re.split(r"[^\w-]", requirement)[0].lower() for requirement in needed} <= names


def test_nothing_else_is_at_the_top_level():
    names = {p.name for p in ROOT.iterdir() if not p.name.startswith(".") and not p.name.endswith(".egg-info")}
    assert names - {"build", "runs"} == {"setup.py", "diff_dalle", "scripts", "tests", "README.md", "LICENSE"}
