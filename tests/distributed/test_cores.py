"""The number of threads of a process."""

import subprocess
import sys

import pytest
import torch
from forking import run_ranks
from ranks import environment

from diff_dalle.distributed import cores
from diff_dalle.distributed.cores import cores_of, threads_said, usable_cores
from diff_dalle.distributed.launch import DistributedConfig, launch
from diff_dalle.distributed.rendezvous import ProcessInfo

SAYS = """
import torch
from diff_dalle.distributed.launch import *
with launch(DistributedConfig(device="cpu")):
    print(torch.get_num_threads())
"""


@pytest.fixture(autouse=True)
def _threads_as_before():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_the_flag_wins_over_the_environment_and_that_over_the_cores(monkeypatch):
    monkeypatch.setattr("diff_dalle.distributed.launch.usable_cores", lambda: 5)

    def threads(flag=0, **env):
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "SLURM_CPUS_PER_TASK"):
            monkeypatch.delenv(name, raising=False)
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        with launch(DistributedConfig(device="cpu", threads=flag)):
            return torch.get_num_threads()

    assert threads() == 5
    assert threads(OMP_NUM_THREADS="3", MKL_NUM_THREADS="2", SLURM_CPUS_PER_TASK="4") == 3
    assert threads(OMP_NUM_THREADS="nonsense", MKL_NUM_THREADS="2") == 2
    assert threads(SLURM_CPUS_PER_TASK="4") == 4
    assert threads(flag=1, OMP_NUM_THREADS="3") == 1


@pytest.mark.parametrize(
    ("launcher", "env", "said"),
    [
        ("slurm", {"SLURM_CPUS_PER_TASK": "8"}, 8),
        ("torchrun", {"SLURM_CPUS_PER_TASK": "8"}, 2),  # the task is torchrun, whose processes share it
        ("mpi", {"SLURM_CPUS_PER_TASK": "8"}, 0),  # unknown whether a task is a process: the cores tell
        ("mpi", {"OMP_NUM_THREADS": "3,1"}, 3),
        ("torchrun", {"OMP_NUM_THREADS": "2"}, 2),
    ],
)
def test_what_the_environment_of_a_process_says(launcher, env, said):
    assert threads_said(ProcessInfo(launcher, 0, 4, 0, 4), env) == said


def test_the_one_thread_that_torchrun_sets_by_itself_is_nobodys_wish(tmp_path):
    said = []
    asks = "from diff_dalle.distributed import cores, rendezvous as r; print(cores.threads_said(r.detect()))"
    child = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    starts = f"subprocess.run([sys.executable, '-c', {asks!r}])"
    parent = f"import os, subprocess, sys; os.environ['OMP_NUM_THREADS'] = '1'; {starts}"
    for own in ({}, {"OMP_NUM_THREADS": "1"}):
        env = {name: value for name, value in environment().items() if name != "OMP_NUM_THREADS"} | child | own
        result = subprocess.run([sys.executable, "-c", parent], env=env, capture_output=True, text=True, check=True)
        said.append(result.stdout.strip())
    assert said == ["0", "1"]


def test_processes_share_the_cores_that_they_have_in_common():
    both, low, high = frozenset(range(8)), frozenset(range(4)), frozenset(range(4, 8))
    assert [cores_of(0, [0] * n, [both] * n, 8) for n in (1, 2, 3, 20)] == [8, 4, 2, 1]
    assert cores_of(1, [0, 0], [low, high], 4) == 4  # bound to cores of their own
    assert cores_of(0, [0, 1], [both, both], 8) == 8  # on two machines
    assert cores_of(0, [0, 0], [both, both], 3) == 1  # a quota is of both together


def test_two_processes_have_half_of_the_cores_each(tmp_path):
    script = tmp_path / "job.py"
    script.write_text(SAYS)
    env = {name: value for name, value in environment().items() if name != "OMP_NUM_THREADS"}
    half = max(1, len(cores.own_cores()) // 2)
    assert run_ranks([str(script)], env, 2).stdout.split() == [str(half)] * 2


@pytest.mark.parametrize(
    ("groups", "files", "cores_worth"),
    [
        ("0::/job/step\n", {"job/cpu.max": "150000 100000", "job/step/cpu.max": "max 100000"}, 1),
        ("0::/outside\n", {"cpu.max": "300000 100000"}, 3),  # in a container, whose group is shown as the root
        (
            "5:memory:/m\n4:cpu,cpuacct:/job\n",
            {"cpu,cpuacct/job/cpu.cfs_quota_us": "250000", "cpu,cpuacct/job/cpu.cfs_period_us": "100000"},
            2,
        ),
        ("1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 9),
        ("0::/\n", {"cpu.max": "20000 100000"}, 1),  # a fifth of a core
        ("", {}, 9),
    ],
)
def test_the_quota_of_a_control_group(tmp_path, monkeypatch, groups, files, cores_worth):
    monkeypatch.setattr(cores, "own_cores", lambda: frozenset(range(9)))
    for name, text in {"proc/self/cgroup": groups, **{f"sys/fs/cgroup/{k}": v for k, v in files.items()}}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    assert usable_cores(str(tmp_path)) == cores_worth
