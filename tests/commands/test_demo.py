"""How the demo's chapters run commands."""

import time

import pytest

from diff_dalle.commands.demo.chapters import CHAPTERS, DemoConfig
from diff_dalle.commands.demo.contract import Demo
from diff_dalle.errors import InputError

SCRIPTS = {
    "greet.py": "import os, sys; print('threads', os.environ.get('OMP_NUM_THREADS'), *sys.argv[1:])",
    "meet.py": """
import pathlib, sys, time
own, other = map(pathlib.Path, sys.argv[1:])
own.touch()
while not other.exists():
    time.sleep(0.05)
print("met")
""",
    "fail.py": "import sys; print('no'); sys.exit(2)",
    "wait.py": "import time; time.sleep(600)",
}


@pytest.fixture
def demo(tmp_path):
    (tmp_path / "scripts").mkdir()
    for name, text in SCRIPTS.items():
        (tmp_path / "scripts" / name).write_text(text)
    return Demo(tmp_path / "home", False, tmp_path)


def test_a_command_is_printed_and_run(demo, capfd):
    demo.run("greet.py", "--name", 3)
    printed = capfd.readouterr().out
    assert "$ python scripts/greet.py --name 3" in printed and printed.rstrip().endswith("--name 3")


def test_two_commands_run_at_the_same_time(demo, capfd, tmp_path):
    """Each waits for the other; the second one's output is in the file."""
    a, b = tmp_path / "a", tmp_path / "b"
    demo.run_beside(["meet.py", a, b], ["meet.py", b, a], demo.home / "second.txt")
    assert capfd.readouterr().out.count("met\n") == 1 and (demo.home / "second.txt").read_text() == "met\n"


def test_two_commands_share_the_cores(demo, capfd, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(6)))
    demo.run_beside(["greet.py"], ["greet.py"], demo.home / "second.txt")
    assert "threads 3" in capfd.readouterr().out and "threads 3" in (demo.home / "second.txt").read_text()


@pytest.mark.parametrize("order", [1, -1])
def test_a_command_that_fails_ends_the_other(demo, order):
    started = time.monotonic()
    with pytest.raises(InputError, match=r"the demo stopped, because this command failed: python scripts/fail.py"):
        demo.run_beside(*[["fail.py"], ["wait.py"]][::order], demo.home / "second.txt")
    assert time.monotonic() - started < 300  # not the ten minutes of the other


def test_a_command_that_fails_stops_the_demo(demo):
    with pytest.raises(InputError, match="this command failed: python scripts/fail.py --x"):
        demo.run("fail.py", "--x")


def test_chapters_are_asked_for_by_name():
    assert {"generator", "decoder", "cascade"} == set(CHAPTERS)
    with pytest.raises(InputError, match="did you mean cascade"):
        DemoConfig(what=("cascades",))
