"""Scripts parse their command lines without torch, whose import takes longer than all the rest of --help."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"

# Runs a script in which an import of torch fails.
BLOCKED = """
import runpy, sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise AssertionError("torch is imported")
sys.meta_path.insert(0, Blocker())
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
WITHOUT_TORCH = (
    "assemble_decoder",
    "consolidate",
    "demo",
    "drill",
    "import_cascade",
    "merge_lora",
    "replay",
    "train_tokenizer",
)


def start(name: str, *flags: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", BLOCKED, str(SCRIPTS / f"{name}.py"), *flags]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_help_needs_no_torch(name):
    done = start(name, "--help")
    assert done.returncode == 0, done.stderr
    assert "--dry_run" in done.stdout and "default" in done.stdout


def test_an_unknown_flag_is_told_without_torch():
    done = start("merge_lora", "--lorra", "a")
    assert done.returncode == 2 and "unknown flag or argument '--lorra'; did you mean --lora?" in done.stderr


def test_a_wrong_value_is_told_without_torch():
    done = start("import_cascade", "--stage", "stage_d")
    assert done.returncode == 2 and "stage_d" in done.stderr and "stage_c" in done.stderr


def test_importing_the_package_needs_no_torch():
    command = "import sys, diff_dalle; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", command], check=False).returncode == 0


def test_the_import_of_torch_would_fail(tmp_path):
    (tmp_path / "script.py").write_text("import torch")
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, str(tmp_path / "script.py")], capture_output=True, check=False
    )
    assert b"torch is imported" in done.stderr and done.returncode


def test_settings_need_no_torch(tmp_path):
    modules = (
        "data.aspect_buckets",
        "distributed.launch",
        "distributed.sharding_config",
        "shapes.scenes",
        "text.tokenizer",
        "training.optim_config",
        "training.settings",
    )
    (tmp_path / "script.py").write_text("".join(f"import diff_dalle.{module}\n" for module in modules))
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, str(tmp_path / "script.py")], capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
