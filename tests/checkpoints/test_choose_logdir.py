"""Where runs and samples go when nothing says it."""

import re
from datetime import date
from types import SimpleNamespace

import pytest

from diff_dalle.checkpoints.run_folder import choose_logdir


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENAI_LOGDIR", raising=False)
    return tmp_path


def test_a_folder_here_named_by_the_time(here):
    """It is not created yet, and is another one once it is there."""
    found = choose_logdir("")
    assert re.fullmatch(r"runs/\d{8}-\d{6}", found) and not (here / "runs").exists()
    assert choose_logdir("", "samples").startswith("samples/")


def test_a_folder_that_is_there_is_not_taken(here, monkeypatch):
    monkeypatch.setattr("diff_dalle.checkpoints.run_folder.datetime", SimpleNamespace(now=lambda: date(2026, 11, 28)))
    names = []
    for _ in range(3):
        names.append(choose_logdir(""))
        (here / names[-1]).mkdir(parents=True)
    assert names == [f"runs/20261128-000000{end}" for end in ("", "-2", "-3")]


def test_what_is_said_comes_first(monkeypatch):
    monkeypatch.setenv("OPENAI_LOGDIR", "elsewhere")
    assert (choose_logdir("given"), choose_logdir("")) == ("given", "elsewhere")
