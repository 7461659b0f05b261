"""The documents: their commands parse, their code runs, and the files, presets and flags that they name exist."""

import re
import subprocess
import sys

import pytest
from document_reading import write_modules
from drills.table import GROUPS
from module_making import importable
from script_running import ROOT, run

from diff_dalle.checkpoints.checkpoint import save_file
from diff_dalle.commands.command_line import parse
from diff_dalle.commands.examples import description_of, examples_of, scripts_in_order
from diff_dalle.commands.info import whole_presets
from diff_dalle.commands.sources import preset_names
from diff_dalle.commands.training_kinds import parse_cascade
from diff_dalle.distributed.world import ALONE
from diff_dalle.recipes.generator import GeneratorRun

DOCUMENTS = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in [ROOT / "README.md", *sorted([*ROOT.glob("diff_dalle/**/README.md"), *ROOT.glob("tests/**/README.md")])]
}
COMMANDS = (ROOT / "scripts/README.md").read_text(encoding="utf-8").replace("--config runs/clip.yaml", "")  # no file
WITH_COMMANDS = {name: text for name, text in DOCUMENTS.items() if "```bash" in text} | {"scripts/README.md": COMMANDS}
IMPORTED = "help_without_torch", "with_tests"  # by scripts
CASCADE = [name for name in preset_names() if name.startswith("cascade_")]


def blocks(language: str, text: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


# Print the arguments of every script, separated by NUL. Launchers, installation and long runs are skipped.
STAND_INS = r"""
set -euo pipefail
python() { printf '%s\0' "$@"; printf '\n'; }
mpiexec() { shift 2; "$@"; }
srun() { shift 2; "$@"; }
sbatch() { while [[ "$1" == --* ]]; do shift; done; test -f "$1"; shift; python "$@"; }
torchrun() { shift 2; python "$@"; }
apptainer() { while [ "$1" != mpiexec ] && [ "$1" != diff-dalle ]; do shift; done; "$@"; }
diff-dalle() { [ $# -gt 0 ] || return 0; local name=$1; shift; python "scripts/$name.py" "$@"; }
pip() { :; }
bash() { test -f "$1"; }
"""


@pytest.mark.parametrize("name", WITH_COMMANDS)
def test_commands_parse(name, tmp_path):
    """Every script resolves its settings and stops. Variables carry over from block to block."""
    write_modules(WITH_COMMANDS[name], tmp_path)
    script = STAND_INS + "\n".join(blocks("bash", WITH_COMMANDS[name]))
    result = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    commands = [line.removesuffix("\0").split("\0") for line in result.stdout.splitlines()]
    assert len(commands) >= WITH_COMMANDS[name].count("\npython scripts/")
    with importable(tmp_path):
        for path, *flags in commands:
            run(path.removeprefix("scripts/"), *flags, "--dry_run", "True")


def test_python_runs(tmp_path, monkeypatch):
    tiny = "--image_size 16 --num_channels 16 --channel_mult 1,2 --num_res_blocks 1 --enc_attn_dim 16 --enc_depth 1"
    settings = parse(GeneratorRun, [*tiny.split(), "--enc_heads", "2", "--diffusion_steps", "40"])
    session = settings.recipe().open(ALONE)
    save_file(str(tmp_path / "ema.pt"), "ema", session.identity(), 1, 1, session.network().state_dict())
    monkeypatch.chdir(tmp_path)
    for block in blocks("python", DOCUMENTS["README.md"]):
        names = {}
        exec(block, names)
        assert names["images"].shape == ((1, 64, 64, 3) if '"emoji"' in block else (2, 16, 16, 3))


def table_of_presets() -> str:
    """As it stands in the documents."""
    text = (ROOT / "diff_dalle/presets/README.md").read_text(encoding="utf-8")
    return text.partition("<!-- presets -->\n\n")[2].partition("\n<!-- /presets -->")[0]


@pytest.fixture(scope="module")
def readme_flags():
    """scripts/readme_flags.py as a module."""
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import readme_flags
    finally:
        sys.path.remove(str(ROOT / "scripts"))
    return readme_flags


def test_generated_documentation_is_up_to_date(readme_flags, monkeypatch):
    """The numbers of the table of presets: tests/commands/test_info.py."""
    monkeypatch.setattr(readme_flags, "preset_table", table_of_presets)
    for path, text in readme_flags.pages().items():
        assert path.read_text(encoding="utf-8") == text, f"{path}: run python scripts/readme_flags.py"


def test_every_script_is_documented_with_examples():
    scripts = {path.stem for path in (ROOT / "scripts").glob("*.py")} - {"readme_flags", *IMPORTED}
    assert {*scripts_in_order()} == scripts and all(description_of(script) for script in scripts)
    assert all(len(examples_of(script)) >= 2 for script in scripts)


def test_every_preset_of_a_whole_network_is_in_the_table():
    assert all(f"| `{name}` |" in table_of_presets() for name in whole_presets())


def test_checkpoints_that_are_named_are_those_at_the_end_of_their_presets():
    runs = {run.experiment_id: run for run in (parse_cascade(["--preset", each]) for each in CASCADE)}
    for text in DOCUMENTS.values():
        for folder, role, rate, step in re.findall(r"runs/(\w+)/(model|ema)(?:_([\d.]+)_)?(\d{6})\.pt", text):
            if run := runs.get(folder):
                assert int(step) == run.updates
                assert role == "model" or float(rate) == run.ema_beta


def anchors(text: str) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", [*DOCUMENTS, "scripts/README.md", ".github/CONTRIBUTING.md"])
def test_files_and_presets_that_are_named_exist(name):
    path = ROOT / name
    text = path.read_text(encoding="utf-8")
    for file in re.findall(r"`((?:diff_dalle|scripts|tests)/[\w./]+)`", text):
        assert (ROOT / file).exists(), file
    for link, anchor in re.findall(r"\]\(([\w./]*)(?:#([\w-]+))?\)", text):
        target = path.parent / link if link else path
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text(encoding="utf-8")), f"{link}#{anchor}"
    assert set(re.findall(r"--preset ([a-z]\w+)", text)) <= {*preset_names()}


def test_every_flag_in_the_documents_exists(monkeypatch):
    """Also in running text, which ``test_commands_parse`` does not run. The help of all commands: ``record``."""
    monkeypatch.delitem(sys.modules, "help_without_torch", raising=False)  # as if no script had run yet
    finders = [*sys.meta_path]
    texts = [run("sample.py", "--help_all").stdout]
    assert sys.meta_path == finders  # no stand-in for torch is left for the tests that follow
    texts += [path.read_text() for path in (ROOT / "tests" / "record" / "found" / "help").iterdir()]
    known = {flag for text in texts for flag in re.findall(r"--(\w+)", text)}
    known |= {"nproc_per_node", "nodes", "ntasks", "signal"}
    known |= {"no", "constraint", "nv", "bind", "cleanenv"}  # of cp, apt-get, pip and Apptainer
    for name, text in DOCUMENTS.items():
        assert not set(re.findall(r"--([a-z]\w+)", text)) - known, name


def test_every_promise_names_tests_and_faults_that_exist():
    text = DOCUMENTS["diff_dalle/training/README.md"].partition("\n## Continuing")[0]
    rows = re.findall(r"^\| .* \|$", text, re.MULTILINE)[1:]
    promised = [re.findall(r"`([^`]+)`", row.split("|")[2]) for row in rows]
    assert all(promised)
    tests = {
        name for path in (ROOT / "tests").rglob("test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    known = tests | {fault.name for group in GROUPS.values() for fault in group.faults}
    assert not {name for names in promised for name in names} - known
