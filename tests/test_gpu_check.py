"""scripts/gpu_check.sh: with a stand-in for Python, that parts which hang or fail leave the others; without a GPU."""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import GPU

TESTS = Path(__file__).parent
SCRIPT = TESTS.parent / "scripts" / "gpu_check.sh"
IMPORT = "from waiting import"
PYTHON = """#!/bin/sh
case "$*" in
    -) echo "a device"; cat > ../environment.py;;
    *benchmark.py*) echo "| a row |"; echo "a warning" >&2; [ ! -e ../slow ] || sleep 600;;
    *"import pytest"*) [ ! -e ../no_pytest ];;
    *"-m pytest"*)
        for file; do :; done
        echo "tests of $file"
        case "$(cat "$file")" in *hangs*) sleep 600;; *fails*) exit 1;; esac;;
esac
"""


@pytest.fixture
def checkout(tmp_path):
    checkout = tmp_path / "checkout"
    for folder in (checkout / "scripts", checkout / "tests" / "room", tmp_path / "bin"):
        folder.mkdir(parents=True)
    shutil.copy(SCRIPT, checkout / "scripts")
    (tmp_path / "bin" / "python3").write_text(PYTHON)
    (tmp_path / "bin" / "python3").chmod(0o755)
    for name, text in {"a": "on_gpu", "room/b": "GPU, needs_cuda", "c": "GPU"}.items():
        folder, _, name = name.rpartition("/")
        (checkout / "tests" / folder / f"test_{name}.py").write_text(f"{IMPORT} {text}\n")
    return checkout


def check(checkout, *arguments, path=None):
    """The process, its lines without their times, and what it has written by name."""
    command = ["bash", str(checkout / "scripts" / "gpu_check.sh"), *arguments]
    env = {"PATH": f"{path or checkout.parent / 'bin'}:/usr/bin:/bin"}
    done = subprocess.run(command, cwd=checkout.parent, env=env, capture_output=True, text=True, timeout=200)
    folder = checkout.parent / arguments[0] if arguments else checkout / "runs" / "gpu_check"
    return done, {path.name: path.read_text() for path in folder.iterdir()}


def test_all_parts_are_shown_and_kept(checkout):
    for _ in range(2):  # a second run replaces the first one's files
        done, files = check(checkout)
    assert done.returncode == 0 and "All is well" in done.stdout
    assert files == {
        "environment.txt": "a device\n",
        "table.md": "| a row |\n",
        "tests.txt": "tests of tests/test_a.py\ntests of tests/room/test_b.py\n",
        "errors.txt": "a warning\n",
    }
    for text in files.values():
        assert text in done.stderr + "".join(line for line in done.stdout.splitlines(True) if not line.startswith("["))


@pytest.mark.parametrize(("text", "said"), [("hangs", "time is up"), ("fails", "status 1")])
def test_a_file_that_hangs_or_fails_leaves_the_others(checkout, text, said):
    (checkout / "tests" / "test_a.py").write_text(f"{IMPORT} on_gpu  # {text}\n")
    done, files = check(checkout, "out", "10")
    assert done.returncode == 1 and "Not all is well" in done.stdout
    assert files["tests.txt"] == (f"tests of tests/test_a.py\ntests/test_a.py: {said}\ntests of tests/room/test_b.py\n")


def test_all_ends_in_time(checkout):
    (checkout.parent / "slow").touch()
    done, files = check(checkout, "out", "2")
    assert done.returncode == 1 and files["table.md"] == "| a row |\ntable: time is up\n"
    assert files["tests.txt"] == "tests/test_a.py: time is up\ntests/room/test_b.py: time is up\n"


def test_without_pytest_the_table_is_made(checkout):
    (checkout.parent / "no_pytest").touch()
    done, files = check(checkout)
    assert done.returncode == 1 and files["table.md"] == "| a row |\n"
    assert files["tests.txt"] == "The tests were not run: pytest is missing\n"


def pattern():
    """Of the line that imports a mark, by which the script finds tests."""
    (found,) = re.findall(r'grep -lrE "(.*?)"', SCRIPT.read_text())
    return re.compile(found, re.MULTILINE)


def test_every_file_with_marked_tests_is_run():
    for path in TESTS.glob("**/test_*.py"):
        text = path.read_text(encoding="utf-8")
        marked = re.search(r"(?m)^(@|pytestmark = \W*)(on_gpu|needs_cuda)\b", text)
        assert bool(marked) == bool(pattern().search(text)), path


@pytest.mark.slow
def test_table_and_tests_need_no_other_package():
    """Beside what the script names: what else this package requires cannot be imported."""
    (needed,) = re.findall(r"NEEDED = (\(.*\))", SCRIPT.read_text())
    required = re.findall(r'"([a-z0-9]+)[<>=;"]', (TESTS.parent / "setup.py").read_text().split("extras_require")[0])
    missing = set(required) - {"torch", *ast.literal_eval(needed)}
    assert {"mpi4py", "webdataset", "blobfile", "ftfy"} <= missing
    files = [str(path) for path in TESTS.glob("**/test_*.py") if pattern().search(path.read_text(encoding="utf-8"))]
    code = f"""
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name in {missing}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
sys.path.insert(0, {str(TESTS)!r})
import pytest, benchmarks.gpu
sys.exit(pytest.main(["-q", "--collect-only", "-p", "no:cacheprovider", *{files}]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(GPU, reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path):
    """The real one, from another folder, with this Python."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (tmp_path / "bin" / "python3").chmod(0o755)
    done = subprocess.run(
        ["bash", str(SCRIPT), "out"],
        cwd=tmp_path,
        env={"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "VIRTUAL_ENV": "none"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: there is nothing to check, because torch ")
    assert done.stderr.endswith(" finds no CUDA device on this machine\n")
    assert not (tmp_path / "out" / "table.md").exists()
    assert "\ntorch " in (tmp_path / "out" / "environment.txt").read_text()
