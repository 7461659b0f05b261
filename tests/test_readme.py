"""What the README says can be done, can be done."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from diff_dalle.checkpoints.checkpoint import save_file
from diff_dalle.commands.command_line import parse, preset_names
from diff_dalle.commands.info import parse_info
from diff_dalle.commands.train_generator import GeneratorRun

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BASH = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)

# Every script resolves its settings and stops; launchers pass on to it; what installs or runs for long is left out.
STAND_INS = """
set -euo pipefail
python() { echo "+ $*"; "$PYTHON" "$@" --dry_run True > /dev/null; }
mpiexec() { shift 2; "$@"; }
srun() { shift 2; "$@"; }
torchrun() { shift 2; python "$@"; }
pip() { :; }
bash() { test -f "$1"; }
"""


@pytest.mark.parametrize("number", range(len(BASH)))
def test_commands_parse(number):
    """Variables carry over from block to block, as they do for a reader."""
    script = STAND_INS + "\n".join(BASH[:number]).replace("python scripts", ": scripts") + "\n" + BASH[number]
    env = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(["bash", "-c", script], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr


def test_python_runs(tmp_path, monkeypatch):
    tiny = ["--image_size", "16", "--num_channels", "16", "--channel_mult", "1,2", "--num_res_blocks", "1",
            "--enc_attn_dim", "16", "--enc_depth", "1", "--enc_heads", "2", "--diffusion_steps", "40"]  # fmt: skip
    run = parse(GeneratorRun, tiny)
    tokenizer = run.build_tokenizer()
    generator = run.build_model(tokenizer)
    save_file(str(tmp_path / "ema.pt"), "ema", run.identity(tokenizer), 1, 1, generator.state_dict())
    monkeypatch.chdir(tmp_path)
    for block in PYTHON:
        names = {}
        exec(block, names)
        assert names["images"].shape == (2, 16, 16, 3)


@pytest.fixture(scope="module")
def readme_flags():
    """scripts/readme_flags.py as a module."""
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import readme_flags
    finally:
        sys.path.remove(str(ROOT / "scripts"))
    return readme_flags


def test_generated_documentation_is_up_to_date(readme_flags):
    for path, text in readme_flags.pages().items():
        assert path.read_text(encoding="utf-8") == text, f"{path}: run python scripts/readme_flags.py"


def test_every_script_is_documented_with_examples_that_parse(readme_flags):
    scripts = {path.name for path in (ROOT / "scripts").glob("*.py")} - {"readme_flags.py"}
    assert readme_flags.CONFIGS.keys() == scripts
    for script in scripts:
        command = readme_flags.command(script)
        assert command.description and len(command.examples) >= 2
        for example in command.examples:
            words = shlex.split(example)
            argv = words[1 + next(i for i, word in enumerate(words) if word.startswith("scripts/")) :]
            argv = [word for word in argv if word not in ("--config", "runs/clip.yaml")]  # which no test has
            if script == "info.py":
                parse_info(argv)
            else:
                name = argv.pop(0) if "" not in command.configs else ""
                parse(command.configs[name], argv)


def test_every_preset_is_in_the_table():
    table = (ROOT / "diff_dalle/presets/README.md").read_text(encoding="utf-8")
    assert all(f"| `{name}` |" in table for name in preset_names())


def test_files_that_are_named_exist():
    named = re.findall(r"`((?:diff_dalle|scripts|tests)/[\w./]+)`", README)
    for name in named + re.findall(r"\]\(([\w./]+)\)", README):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"--preset (\w+)", README):
        assert (ROOT / "diff_dalle/presets" / f"{name}.yaml").exists()


def test_every_flag_in_the_text_exists():
    """Also those in running text, which no command shows."""
    commands = (
        ["sample.py"],
        ["train_generator.py"],
        ["train_classifier.py"],
        ["evaluate.py"],
        ["demo.py"],
        ["prepare_data.py", "folder"],
    )
    helps = [subprocess.run([sys.executable, ROOT / "scripts" / name, *rest, "--help"], capture_output=True, text=True)
             for name, *rest in commands]  # fmt: skip
    known = {flag for each in helps for flag in re.findall(r"--(\w+)", each.stdout)} | {"nproc_per_node", "ntasks"}
    assert not set(re.findall(r"--([a-z]\w+)", README)) - known
