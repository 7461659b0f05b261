"""Scripts print their help, and some refuse wrong flags, without torch, whose import takes longer than all the rest."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
FIRST = "help_without_torch"
NAMES = sorted(path.stem for path in SCRIPTS.glob("*.py") if path.stem != FIRST)

# Prints what each script prints when it is asked for help.
HELPS = """
import contextlib, io, json, pathlib, runpy, sys
found = {}
for name in sys.argv[2:]:
    sys.argv = [name, "--help"]
    with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.suppress(SystemExit):
        runpy.run_path(f"{sys.path[0]}/{name}.py", run_name="__main__")
    found[name] = text.getvalue()
print(json.dumps(found))
"""


@pytest.fixture
def run(tmp_path):
    """Runs Python, in a process in which an import of torch fails."""
    (tmp_path / "torch.py").write_text("raise AssertionError('torch is imported')")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}

    def run(*arguments: object) -> subprocess.CompletedProcess:
        command = [sys.executable, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)

    return run


def test_help_needs_no_torch(run):
    """And is the same with it, for all scripts."""
    program = f"import sys; sys.path.insert(0, {str(SCRIPTS)!r}); import {FIRST}\n{HELPS}"
    without = run("-c", program, "--help", *NAMES)
    assert without.returncode == 0, without.stderr
    command = [sys.executable, "-c", program, "with torch", *NAMES]
    complete = subprocess.run(command, capture_output=True, text=True, check=True)
    texts = json.loads(complete.stdout)
    assert json.loads(without.stdout) == texts
    assert all(text.startswith(f"usage: {name}") for name, text in texts.items())


@pytest.mark.parametrize("name", ["info", "readme_flags"])
def test_a_script_by_itself(name, run):
    done = run(SCRIPTS / f"{name}.py", "--help")
    assert done.returncode == 0 and "usage: " in done.stdout, done.stderr


def test_every_script_begins_with_it():
    """Before anything that imports torch."""
    for name in NAMES:
        tree = ast.parse((SCRIPTS / f"{name}.py").read_text())
        modules = [
            node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
            for node in tree.body
            if isinstance(node, (ast.Import, ast.ImportFrom))
        ]
        others = [each for each in modules if each.split(".")[0] not in sys.stdlib_module_names and each not in NAMES]
        assert others[0] == FIRST, name


def test_without_the_flag_torch_is_torch():
    command = f"import sys; sys.argv = ['x', '--helpful']; import {FIRST}, torch; assert torch.ones(1) == 1"
    assert subprocess.run([sys.executable, "-c", command], check=False, cwd=SCRIPTS).returncode == 0


def test_an_unknown_flag_is_told_without_torch(run):
    done = run(SCRIPTS / "merge_lora.py", "--lorra", "a")
    assert done.returncode == 2 and "unknown flag or argument '--lorra'; did you mean --lora?" in done.stderr


def test_a_wrong_value_is_told_without_torch(run):
    done = run(SCRIPTS / "import_cascade.py", "--stage", "stage_d")
    assert done.returncode == 2 and "stage_d" in done.stderr and "stage_c" in done.stderr


def test_importing_the_package_needs_no_torch():
    command = "import sys, diff_dalle; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", command], check=False).returncode == 0


def test_the_import_of_torch_would_fail(run):
    done = run("-c", "import torch")
    assert "torch is imported" in done.stderr and done.returncode


def test_settings_need_no_torch(run):
    modules = (
        "data.aspect_buckets",
        "distributed.launch",
        "distributed.sharding_config",
        "shapes.scenes",
        "text.tokenizer",
        "training.optim_config",
        "training.settings",
    )
    done = run("-c", "".join(f"import diff_dalle.{module}\n" for module in modules))
    assert done.returncode == 0, done.stderr
