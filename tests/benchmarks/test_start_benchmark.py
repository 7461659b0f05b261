"""Seconds until a command shows something."""

import pytest

from benchmarks import start
from diff_dalle.config import InputError

SLOW = "import time; print('early', flush=True); time.sleep(0.5); print('late', flush=True)"


def test_a_command_is_timed_until_its_line_or_its_end():
    early, end = start._until(["-c", SLOW], "early"), start._until(["-c", SLOW], "")
    assert end > early + 0.4  # what it sleeps


@pytest.mark.parametrize(("code", "reason"), [("raise SystemExit('broken')", "broken"), ("pass", "it printed nothing")])
def test_a_command_that_fails_or_says_something_else_is_named(code, reason):
    with pytest.raises(InputError, match=f"failed: {reason}"):
        start._until(["-c", code], "step 1 of")


def test_scripts_that_are_commands_have_help():
    names = {path.name for path in start.SCRIPTS.glob("*.py") if start._has_help(path)}
    assert {"sample.py", "train_generator.py", "benchmark.py"} <= names
    assert not {"help_without_torch.py", "with_tests.py"} & names


def test_the_table_compares_the_slowest_help_with_its_target(monkeypatch):
    def until(command, text):
        if "--help" in command:
            return 0.7 if command[0].endswith("serve.py") else 0.3
        return {"": 0.05, "import diff_dalle": 0.12}.get(command[-1], 3.0)

    monkeypatch.setattr(start, "_until", until)
    rows = [line.split(" | ") for line in start.start_table().splitlines()[2:]]
    assert [row[1:] for row in rows] == [
        ["0.07", "0.1", "met |"], ["0.70", "0.6", "missed |"], ["3.00", "6", "met |"], ["3.00", "4", "met |"],
    ]  # fmt: skip
    assert "serve.py" in rows[1][0]
