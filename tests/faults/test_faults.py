"""The drill's part in the tests: each fault is injected into a real run, with one kind of network."""

import contextlib
import secrets
import sys
import time
from pathlib import Path

import pytest
from drills import faults_data, faults_ends, faults_files, place, processes
from drills.contract import Deviation
from drills.place import Bench
from drills.processes import MARK, Job, survivors
from drills.table import GROUPS, drill
from forking import start
from marks import slow

FAULTS = {fault.name: fault for group in GROUPS.values() for fault in group.faults}
CHOSEN = {
    "hostile index summaries": "generator",
    "hostile run.json": "generator",
    "hostile images": "generator",
    "hostile captions": "generator",
    "hostile vocabularies": "generator",
    "hostile masks": "generator",
}
SLOW = {
    "disk full in a save": "generator",
    "inf in loss": "classifier",
    "power failure during a save": "generator",
    "SIGKILL at random moments": "generator",
    "log directory becomes read-only": "generator",
    "srun: rank 1 of 2 killed": "upsampler",
    "shards rewritten in place in mid-run": "generator",
    "max_bad_steps reached": "generator",
    "a data worker killed, as by the OOM killer": "generator",
    "HTTP: bodies cut off, six in a row": "generator",
    "hostile checkpoints": "generator",
    "hostile configurations": "generator",
    "hostile tars": "generator",
    "hostile embeddings": "generator",
    "hostile index tables": "generator",
    "hostile structures (hypothesis)": "generator",
}


@pytest.fixture(scope="session")
def bench(tmp_path_factory):
    return Bench(tmp_path_factory.mktemp("drill"), seed=0, quick=True)


SESSIONS: dict[str, int] = {}  # by the mark of a run


class Copied(Job):
    """A run without the seconds in which its process starts; its processes are known by their session instead of their
    environment, which is that of the process that was copied."""

    def __init__(self, command, output, env, limits=None):
        if limits or command[0] != sys.executable:
            super().__init__(command, output, env, limits)
            return
        self.mark, self.output, self.started = secrets.token_hex(8), output, time.monotonic()
        self.process = start(command[1:], {**env, MARK: self.mark}, start_new_session=True, output=output)
        SESSIONS[self.mark] = self.process.pid


def survivors_of_copies(mark):
    yield from survivors(mark)
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it may end at any moment
            state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            if session == str(SESSIONS.get(mark)) and state != "Z":
                yield int(entry.name)


@pytest.fixture(autouse=True)
def _found_by_session(monkeypatch):
    monkeypatch.setattr(processes, "survivors", survivors_of_copies)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_processes_that_a_copy_leaves_behind_are_found_and_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "LINGERING", 0.5)
    code = "import os, time; child = os.fork(); print(child) if child else time.sleep(60)"  # as data workers start
    job = Copied([sys.executable, "-c", code], tmp_path / "out.txt", processes.environment())
    with pytest.raises(Deviation, match="1 of its processes still ran"):
        job.wait()
    deadline = time.monotonic() + 60
    while processes.is_running(int(job.text())):
        assert time.monotonic() < deadline


@pytest.mark.parametrize(("name", "kind"), [*CHOSEN.items(), *(slow(*each) for each in SLOW.items())])
def test_fault(bench, name, kind, monkeypatch):
    for module, limit, value in (
        (faults_ends, "QUICK_KILLS", 3),
        (faults_ends, "QUICK_CUTS", 1),
        (faults_data, "MANY_STEPS", 24),
        (faults_files, "QUICK_PART", 160),
    ):
        monkeypatch.setattr(module, limit, value)
    for module in (place, faults_files):
        monkeypatch.setattr(module, "Job", Copied)
    row = drill(FAULTS[name], kind, bench)
    if row.result == "SKIP":
        pytest.skip(row.seen)
    assert row.result == "PASS", row.seen
