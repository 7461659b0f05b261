"""Scripts print their help, and some refuse wrong flags, without torch, whose import takes longer than all the rest."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from diff_dalle.commands.examples import examples_of, in_package

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
FIRST = "help_without_torch"
NAMES = sorted({path.stem for path in SCRIPTS.glob("*.py")} - {FIRST, "with_tests"})

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

    def run(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess:
        environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        command = [sys.executable, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=cwd)

    return run


def test_help_needs_no_torch(run):
    """And is the same with it, for all scripts; a flag that only begins so leaves torch as it is."""
    program = f"import sys; sys.path.insert(0, {str(SCRIPTS)!r}); import {FIRST}\n"
    without = run("-c", program + HELPS, "--help", *NAMES)
    assert without.returncode == 0, without.stderr
    program += f"import torch; assert torch.ones(1) == 1\n{HELPS}"
    command = [sys.executable, "-c", program, "--helpful", *NAMES]
    texts = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert json.loads(without.stdout) == texts
    assert all(text.startswith(f"usage: {name}") for name, text in texts.items())
    for name in set(NAMES) - {"readme_flags"}:  # which has no flags
        first = texts[name].splitlines()[2:6]
        assert first == ["examples:", *(f"  {example}" for example in examples_of(name)[:2]), ""], name


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


@pytest.mark.parametrize(
    ("script", "flags", "words"),
    [
        ("merge_lora", ["--lorra", "a"], "unknown flag or argument '--lorra'; did you mean --lora?"),
        ("import_cascade", ["--stage", "stage_d"], "must be one of stage_a, semantic, stage_b, stage_c"),
        ("consolidate", ["--outt", "a"], "did you mean --out?"),
        ("assemble_decoder", [], "model_paths is required: checkpoints of the U-Nets of a decoder"),
        ("convert", ["--to", "unet", "--model_path", "a", "--out", "b.pt"], "a U-Net is written as safetensors"),
        ("replay", ["--step", "last"], "--step is 'last', but must be an integer"),
    ],
)
def test_a_wrong_flag_or_value_is_told_without_torch(script, flags, words, run):
    done = run(SCRIPTS / f"{script}.py", *flags)
    assert done.returncode == 2 and words in done.stderr


def test_importing_the_package_needs_no_torch():
    command = "import sys, diff_dalle; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", command], check=False).returncode == 0


def test_the_import_of_torch_would_fail(run):
    done = run("-c", "import torch")
    assert "torch is imported" in done.stderr and done.returncode


def test_settings_need_no_torch(run):
    modules = (
        "data.buckets",
        "distributed.launch",
        "distributed.sharding_config",
        "worlds.shapes.scenes",
        "text.tokenizer",
        "training.settings",
    )
    done = run("-c", "".join(f"import diff_dalle.{module}\n" for module in modules))
    assert done.returncode == 0, done.stderr


def test_help_of_a_subcommand_begins_with_its_own_examples(run):
    done = run(SCRIPTS / "prepare_data.py", "inspect", "--help")
    assert done.stdout.startswith("usage: prepare_data.py inspect [flags]\n\nexamples:\n  "), done.stderr
    assert [line.split()[2] for line in done.stdout.splitlines()[3:5]] == ["inspect", "inspect"]


# ------------------------------------------------------------------------------------------------ python -m diff_dalle


def test_the_package_lists_its_commands_without_torch(run):
    done = run("-m", "diff_dalle")
    lines = [line.split(maxsplit=1) for line in done.stdout.splitlines() if line.startswith("  ")]
    assert sorted(name for name, _ in lines) == sorted({*NAMES} - {"readme_flags"}), done.stderr
    assert dict(lines)["sample"] == "Sample images from a generator's checkpoint"
    assert all(10 < len(text) < 130 for _, text in lines)
    assert run("-m", "diff_dalle", "--help").stdout == done.stdout


@pytest.mark.parametrize("flags", [["--help"], ["--lorra", "a"]])
def test_the_package_runs_a_command_as_its_script_does(flags, run):
    """Its help calls it as it was called."""
    done, script = run("-m", "diff_dalle", "watch", *flags), run(SCRIPTS / "watch.py", *flags)
    said = script.stdout.replace("python scripts/watch.py", "diff-dalle watch")
    said = said.replace("usage: watch.py", "usage: diff-dalle watch")
    assert (done.stdout, done.stderr, done.returncode) == (said, script.stderr, script.returncode)
    assert done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "words"), [("sampel", "did you mean sample?"), ("help_without_torch", "is no command"), ("-x", "'-x'")]
)
def test_a_command_that_does_not_exist_is_one_sentence(name, words, run):
    done = run("-m", "diff_dalle", name)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert words in done.stderr and "diff-dalle lists all commands" in done.stderr


def test_a_wheel_has_the_commands(run, tmp_path):
    """But those of the tests, which it has not; the demo says its commands as they can be repeated there."""
    build = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", tmp_path, "build_py", "--build-lib", tmp_path]
    subprocess.run(build, cwd=SCRIPTS.parent, check=True, capture_output=True)
    held = {path.stem for path in (tmp_path / "diff_dalle" / "scripts").iterdir()}
    assert held == {*NAMES, FIRST} - {"benchmark", "drill", "readme_flags"}
    done = run("-m", "diff_dalle", cwd=tmp_path)
    assert {line.split()[0] for line in done.stdout.splitlines() if line.startswith("  ")} == held - {FIRST}
    asked = run("-m", "diff_dalle", "info", "--preset", "shapes_32", cwd=tmp_path)
    assert "torch is imported" in asked.stderr and f"{tmp_path}/diff_dalle/scripts/info.py" in asked.stderr
    program = "from diff_dalle.commands.running import as_typed; print(as_typed(['info.py', 'a']))"
    assert run("-c", program, cwd=tmp_path).stdout == "diff-dalle info a\n"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("mpiexec -n 8 python scripts/train_lora.py --lr 1", "mpiexec -n 8 diff-dalle train_lora --lr 1"),
        ("bash scripts/demo.sh --quick True", "diff-dalle demo --quick True"),
        ("torchrun --nproc_per_node 2 scripts/evaluate.py -x", "torchrun --nproc_per_node 2 -m diff_dalle evaluate -x"),
    ],
)
def test_command_lines_of_a_checkout_as_those_of_a_package(line, said):
    assert in_package(line) == said


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("tra", {"train_generator", "train_lora", "train_tokenizer"}),
        ("sample --sampler d", {"ddim", "dpm++2m"}),
        ("prepare_data in", {"inspect"}),
        ("prepare_data shapes --train_s", {"--train_samples"}),
        ("info plan --gpu h", {"h100", "h200"}),
        ("train_generator --preset shapes_32", {"shapes_32"}),
        ("info --preset shapes_32", {"shapes_32"}),
        ("train_generator --random_flip ", {"True", "False"}),
        ("sampel --", set()),
    ],
)
def test_the_shell_completes_without_torch(line, found, run, tmp_path, monkeypatch):
    pytest.importorskip("argcomplete")
    typed = f"python -m diff_dalle {line}"
    asked = {"_ARGCOMPLETE": "3", "COMP_LINE": typed, "COMP_POINT": str(len(typed)), "_ARGCOMPLETE_IFS": "\n"}
    for name, value in {**asked, "_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "found")}.items():
        monkeypatch.setenv(name, value)
    done = run("-m", "diff_dalle")
    path = tmp_path / "found"
    words = path.read_text().split() if path.exists() else []
    assert found <= {word.strip() for word in words}, done.stderr
    assert found or not words
