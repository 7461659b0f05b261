"""The drill's part for every change: each fault is injected into a real run, with one kind of network."""

import pytest
from forking import start

from diff_dalle.drill import faults_ends, faults_files
from diff_dalle.drill.place import Bench
from diff_dalle.drill.processes import Outcome
from diff_dalle.drill.table import GROUPS, drill

FAULTS = {fault.name: fault for group in GROUPS.values() for fault in group.faults}
CHOSEN = {
    "SIGKILL at random moments": "generator",
    "power failure, no checkpoint left whole": "generator",
    "disk full in a save": "generator",
    "log directory becomes read-only": "generator",
    "srun: rank 1 of 2 killed": "upsampler",
    "shards rewritten in place in mid-run": "generator",
    "nan in loss of rank 1 of 2": "classifier",
    "max_bad_steps reached": "generator",
    "a data worker killed, as by the OOM killer": "generator",
    "power failure during a save": "generator",
    "HTTP: bodies cut off, six in a row": "generator",
    "S3: bodies cut off, six in a row": "generator",
    "hostile index tables": "generator",
    "hostile index summaries": "generator",
    "hostile checkpoints": "generator",
    "hostile run.json": "generator",
    "hostile configurations": "generator",
    "hostile structures (hypothesis)": "generator",
    "hostile tars": "generator",
    "hostile images": "generator",
    "hostile captions": "generator",
    "hostile embeddings": "generator",
    "hostile vocabularies": "generator",
    "hostile masks": "generator",
}


@pytest.fixture(scope="session")
def bench(tmp_path_factory):
    return Bench(tmp_path_factory.mktemp("drill"), seed=0, quick=True)


class Reading:
    """A process that reads hostile files, without the seconds in which it starts."""

    def __init__(self, command, output, env):
        self.process = start(command[1:], env, merged=True)

    def wait(self, seconds):
        output, _ = self.process.communicate(seconds)
        return Outcome(self.process.returncode, output, seconds)


@pytest.mark.parametrize("name", CHOSEN)
def test_fault(bench, name, monkeypatch):
    monkeypatch.setattr(faults_ends, "QUICK_KILLS", 3)
    monkeypatch.setattr(faults_files, "Job", Reading)
    row = drill(FAULTS[name], CHOSEN[name], bench)
    if row.result == "SKIP":
        pytest.skip(row.seen)
    assert row.result == "PASS", row.seen
