"""Processes of the drill: limits in time, and what they leave behind."""

import os
import signal
import sys
import time

import pytest

from diff_dalle.config import InputError
from drills import processes
from drills.contract import Deviation
from drills.processes import Job, Outcome, environment, is_running, survivors

needs_proc = pytest.mark.skipif(not os.path.exists("/proc/self/environ"), reason="needs /proc")
SLEEP = "import time; time.sleep(60)"


def start(code, folder, **options):
    return Job([sys.executable, "-c", code], folder / "out.txt", environment(), **options)


def test_an_outcome_has_status_output_and_errors(tmp_path):
    code = "import sys; print('hello'); print('error: no', file=sys.stderr); sys.exit(3)"
    outcome = start(code, tmp_path).wait()
    assert outcome.status == 3 and "hello" in outcome.output and outcome.errors == ["error: no"]
    assert outcome.without_traceback() is outcome and start("", tmp_path).wait().succeeded().status == 0
    for check in (outcome.succeeded, start("1 / 0", tmp_path).wait().without_traceback):
        with pytest.raises(Deviation):
            check()


def test_messages_have_the_tail_in_one_line_and_are_no_input_errors():
    assert Outcome(1, "a\n\nb\n", 0.0).tail() == "a ⏎ b"
    assert not issubclass(Deviation, InputError)  # a run's own error must not pass for one


def test_launchers_variables_are_not_passed_on(monkeypatch):
    monkeypatch.setenv("SLURM_PROCID", "1")
    monkeypatch.setenv("RANK", "1")
    assert not {"SLURM_PROCID", "RANK"} & environment().keys()
    assert environment(RANK="2")["RANK"] == "2"


def test_a_hanging_run_is_a_deviation_and_is_ended(tmp_path):
    job = start(SLEEP, tmp_path)
    with pytest.raises(Deviation, match="hang"):
        job.wait(0.3)
    assert job.process.poll() == -signal.SIGKILL


@needs_proc
def test_processes_that_are_left_behind_are_a_deviation_and_are_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "LINGERING", 1.0)
    child = f"[sys.executable, '-c', {('print(flush=True);' + SLEEP)!r}]"
    code = f"import subprocess, sys; subprocess.Popen({child}, start_new_session=True, stdout=-1).stdout.readline()"
    job = start(code, tmp_path)
    with pytest.raises(Deviation, match="1 of its processes still ran"):
        job.wait()
    deadline = time.monotonic() + 60  # on a busy machine a killed process takes a moment to go
    while list(survivors(job.mark)):
        assert time.monotonic() < deadline


def test_waiting_ends_with_the_run_or_in_time(tmp_path):
    assert start("", tmp_path).wait_until(lambda: False, "never") is False
    with pytest.raises(Deviation, match="the moon was not reached"):
        start(SLEEP, tmp_path).wait_until(lambda: False, "the moon", 0.2)


def test_limits_hold_in_the_run(tmp_path):
    code = "import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE))"
    assert "(77, 77)" in start(code, tmp_path, limits={"RLIMIT_NOFILE": 77}).wait().output


@needs_proc
def test_running_stopped_and_ended_processes(tmp_path):
    job = start(SLEEP, tmp_path)
    job.signal(signal.SIGSTOP)
    assert is_running(job.process.pid)
    job.end()
    assert not is_running(job.process.pid)
