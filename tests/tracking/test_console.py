import re
import sys

import pytest

from diff_dalle.tracking.console import ConsoleTracker
from diff_dalle.tracking.tracker import Run, format_table


def test_table():
    """Sorted names, integers in full, other numbers shortened, and all lines of equal length."""
    table = format_table({"step": 1200000, "loss": 0.0123456, "x" * 60: float("nan"), "rate": 3e-5})
    lines = table.splitlines()
    assert {len(line) for line in lines} == {len(lines[0])} and len(lines[0]) < 70
    cells = [line.strip("| ").split() for line in lines[1:-1]]
    assert cells[:3] == [["loss", "|", "0.0123"], ["rate", "|", "3e-05"], ["step", "|", "1200000"]]
    assert cells[3][0].startswith("xxx") and cells[3][2] == "nan"
    assert format_table({}) == "-------\n-------"


@pytest.mark.parametrize(("total", "start"), [(1000, "step 200 of 1,000, "), (None, "step 200, ")])
def test_without_a_terminal(capsys, total, start):
    """No bar in a log file; a line with the progress precedes the table, and notes are printed."""
    console = ConsoleTracker(Run("", step=100, total_steps=total))
    for step in range(101, 201):
        console.progress(step)
    console.log(200, {"loss": 0.5})
    console.note("saved")
    console.finish()
    out, err = capsys.readouterr()
    first, second, out = out.split("\n", 2)
    assert re.fullmatch(r"The first step took \d+\.\d s\.", first) and second.startswith("The second step took ")
    assert second.endswith(" s: at this rate, 00:00 remain.") == (total is not None)
    assert out.startswith(start) and " elapsed" in out and (" remaining" in out) == (total is not None)
    assert out.endswith(format_table({"step": 200, "loss": 0.5}) + "\nsaved\n")
    assert err == ""


def test_with_a_terminal(capsys, monkeypatch):
    """The bar counts from the resumed step to the total, on stderr; the tables stay on stdout."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    console = ConsoleTracker(Run("", step=100, total_steps=400))
    console.progress(200)
    console.log(250, {"loss": 0.5})
    assert (console.bar.n, console.bar.initial, console.bar.total) == (250, 100, 400)
    console.finish()
    out, err = capsys.readouterr()
    assert out == format_table({"step": 250, "loss": 0.5}) + "\n"
    assert "100/400" in err and "250/400" in err


def test_tables_are_painted_on_a_terminal_alone(capsys, monkeypatch):
    """The characters are those of the plain table; NO_COLOR and dumb terminals get no colors."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    scalars = {"held_out/loss_q0": 0.1, "loss": 0.5, "lr": 1e-4}

    def printed() -> str:
        console = ConsoleTracker(Run("", step=100, total_steps=400))
        console.log(250, scalars)
        console.finish()
        return "\n".join(capsys.readouterr().out.splitlines()[1:]) + "\n"

    table, colored = format_table({"step": 250, **scalars}) + "\n", printed()
    assert re.sub(r"\033\[\d+m", "", colored) == table != colored
    bold = [line for line in colored.splitlines() if "\033[1m" in line]
    assert [re.search(r"[\w/]*loss\w*", line)[0] for line in bold] == ["loss"]
    assert all(line.endswith("\033[0m") for line in colored.splitlines())
    monkeypatch.setenv("NO_COLOR", "1")
    assert printed() == table
    monkeypatch.setenv("NO_COLOR", "")
    assert printed() == colored
    monkeypatch.setenv("TERM", "dumb")
    assert printed() == table


def test_cells_of_tables_are_not_printed():
    table = format_table({"step": 3, "held_out/loss": 0.5, "held_out/retrieval.at_1_t000": 0.25})
    assert "held_out/loss" in table and "retrieval" not in table


def test_the_second_step_tells_the_time_left(capsys, monkeypatch):
    """The first one has the start in it."""
    now = iter([0.0, 30.0, 32.0])
    monkeypatch.setattr("time.monotonic", lambda: next(now))
    console = ConsoleTracker(Run("", step=10, total_steps=112))
    console.progress(11)
    console.progress(12)
    console.progress(13)
    told = "The first step took 30.0 s.\nThe second step took 2.0 s: at this rate, 03:20 remain.\n"
    assert capsys.readouterr().out == told


def test_a_loop_that_reports_no_progress_has_no_first_steps(capsys):
    """Such as a script's own, which logs only."""
    console = ConsoleTracker(Run(""))
    console.log(1, {"loss": 0.5})
    assert "The first step" not in capsys.readouterr().out
