"""scripts/environment.sh with a stand-in for Python, which records what it is asked to do."""

import shutil
import signal
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "environment.sh"
PYTHON = """#!/bin/sh
case "$*" in
    *"-m venv"*)
        mkdir -p .venv/bin && cp "$0" .venv/bin/python && touch .venv/part
        if [ -e ../killed ]; then rm ../killed; kill -9 $PPID; fi
        if [ -e ../broken ]; then rm ../broken; exit 1; fi
        echo 'VIRTUAL_ENV=$PWD/.venv; PATH=$PWD/.venv/bin:$PATH' > .venv/bin/activate;;
    *"-m pip"*) echo "$*" >> ../pip;;
    *--version*) echo "Python 3.12";;
esac
"""


@pytest.fixture
def checkout(tmp_path) -> Path:
    checkout = tmp_path / "checkout"
    (checkout / "scripts").mkdir(parents=True)
    shutil.copy(SCRIPT, checkout / "scripts")
    for name in ("setup.py", "scripts/constraints.txt"):
        (checkout / name).touch()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").write_text(PYTHON)
    (tmp_path / "bin" / "python3").chmod(0o755)
    return checkout


def source(checkout: Path) -> subprocess.CompletedProcess:
    command = ["bash", "-euc", f". {checkout}/scripts/environment.sh '[test]'"]
    path = {"PATH": f"{checkout.parent}/bin:/usr/bin:/bin"}
    return subprocess.run(command, env=path, capture_output=True, text=True, timeout=60)


def test_the_environment_is_made_and_filled_once(checkout):
    for _ in range(2):
        assert source(checkout).returncode == 0
    (line,) = (checkout.parent / "pip").read_text().splitlines()
    assert line.endswith("--editable .[test]")


@pytest.mark.parametrize(("fault", "status"), [("killed", -signal.SIGKILL), ("broken", 1)])
def test_a_half_made_environment_is_made_again(checkout, fault, status):
    (checkout.parent / fault).touch()
    result = source(checkout)
    assert result.returncode == status and not (checkout.parent / "pip").exists()
    assert (fault == "broken") == ("error: python's venv module is missing" in result.stderr)
    (checkout / ".venv" / "left").touch() if fault == "killed" else None
    result = source(checkout)
    assert result.returncode == 0, result.stderr
    assert ("creation was interrupted" in result.stdout) == (fault == "killed")
    assert not (checkout / ".venv" / "left").exists() and (checkout.parent / "pip").exists()


def test_an_environment_of_the_user_is_kept(checkout):
    source(checkout)
    (checkout / ".venv" / "own").touch()
    assert source(checkout).returncode == 0 and (checkout / ".venv" / "own").exists()
