"""The launchers for Slurm, with stand-ins for its commands that start processes as it does, with its variables."""

import os
import random
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from marks import slow
from script_running import ROOT, environment

from diff_dalle.distributed import rendezvous

SLURM = ROOT / "scripts" / "slurm"
LAUNCHERS = sorted(path.name for path in SLURM.iterdir())
# Of the manuals of sbatch and srun.
SBATCH = {
    "job-name", "nodes", "ntasks-per-node", "gpus-per-node", "exclusive", "time", "signal", "requeue", "open-mode",
    "output", "partition", "account",
}  # fmt: skip
OF_A_STEP = {
    "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST", "SLURM_STEP_ID", "SLURM_PROCID",
    "SLURM_LOCALID",
}  # fmt: skip
OF_A_JOB = {"SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_JOB_NUM_NODES", "SLURM_GPUS_ON_NODE", "SLURM_SUBMIT_DIR"}
SRUN = r"""#!/usr/bin/env bash
while [[ "$1" == --* ]]; do
    case "$1" in
        --ntasks=*) TASKS=${1#*=} ;;
        --ntasks-per-node=*) [ "${1#*=}" == "$SLURM_GPUS_ON_NODE" ] ;;
        --cpu-bind=none | --kill-on-bad-exit=0) ;;
        *) echo "srun: unknown $1" >&2; exit 9 ;;
    esac
    shift
done
TASKS=${TASKS:-1}
[ -z "${END_WITH:-}" ] || exit "$END_WITH"
export SLURM_STEP_NUM_TASKS=$TASKS SLURM_STEP_TASKS_PER_NODE=$TASKS SLURM_STEP_NODELIST=$SLURM_JOB_NODELIST
export SLURM_STEP_ID=0
for ((rank = 0; rank < TASKS; rank++)); do SLURM_PROCID=$rank SLURM_LOCALID=$rank "$@" & done
status=0
for ((rank = 0; rank < TASKS; rank++)); do wait -n || status=$?; done
exit $status
"""
SCONTROL = r"""#!/usr/bin/env bash
[ "$1 $2" == "show hostnames" ] && echo "${3//,/$'\n'}" || echo "scontrol $*"
"""

JOB = """
import os
import sys
from diff_dalle.distributed.launch import DistributedConfig, detect, launch, run_script

def main():
    place = detect()
    with launch(DistributedConfig(device="cpu", start_timeout=120)) as world:
        world.print(world.gather((place.rank, place.local_rank, place.local_size)), os.listdir("diff_dalle") != [])
        world.print(sys.argv[1:])

run_script(main)
"""


@pytest.fixture
def commands(tmp_path) -> Path:
    """A folder with stand-ins for srun and scontrol."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


def free_job() -> int:
    """A job's number whose port is free."""
    while True:
        job = random.randrange(1, 20000)
        with socket.socket() as probe:
            # Both the port that srun's processes meet at, and torchrun's.
            if all(probe.connect_ex(("127.0.0.1", 20000 + number % 20000)) for number in (job, job * 31)):
                return job


def submit(launcher: str, commands: Path, *arguments: object, **variables: object) -> subprocess.CompletedProcess:
    """What the job prints, and its status."""
    path = os.pathsep.join([str(commands), os.path.dirname(sys.executable), os.environ["PATH"]])
    job = {"SLURM_JOB_ID": free_job(), "SLURM_JOB_NODELIST": "127.0.0.1,elsewhere", "SLURM_JOB_NUM_NODES": 1}
    job |= {"SLURM_GPUS_ON_NODE": 2, "SLURM_SUBMIT_DIR": ROOT, "PATH": path, "PYTHONPATH": ROOT}
    job |= {"VIRTUAL_ENV": "active", **variables}
    env = {**environment(), **{name: str(value) for name, value in job.items()}}
    command = ["bash", str(SLURM / launcher), *map(str, arguments)]
    return subprocess.run(command, env=env, cwd=commands, capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_they_are_valid_and_say_what_sbatch_knows(launcher):
    text = (SLURM / launcher).read_text()
    subprocess.run(["bash", "-n", SLURM / launcher], check=True)
    options = re.findall(r"^#+SBATCH --([\w-]+)", text, re.MULTILINE)
    assert len(options) == len({*options}) > 7 and {*options} <= SBATCH
    assert {*re.findall(r"SLURM_\w+", text)} <= OF_A_JOB
    for script in re.findall(r"scripts/\S+\.\w+", text):
        assert (ROOT / script).is_file(), script


def test_what_processes_read_is_what_srun_sets():
    read = {*re.findall(r"SLURM_\w+", Path(rendezvous.__file__).read_text())}
    assert OF_A_STEP <= read <= OF_A_STEP | OF_A_JOB


@pytest.mark.parametrize("launcher", ["train.sh", slow("torchrun.sh")])
def test_two_processes_meet(tmp_path, commands, launcher):
    """As many as the node has GPUs."""
    (tmp_path / "job.py").write_text(JOB)
    result = submit(launcher, commands, tmp_path / "job.py", "two words")
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout == "[(0, 0, 2), (1, 1, 2)] True\n['two words']\n"


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_job_without_gpus_says_how_to_ask_for_them(commands, launcher):
    result = submit(launcher, commands, "x.py", SLURM_GPUS_ON_NODE="")
    assert result.returncode and "error: the job has no GPUs: sbatch --gpus-per-node N" in result.stderr


def test_a_job_that_saved_before_its_time_limit_goes_back_into_the_queue(commands):
    ended = {status: submit("train.sh", commands, "x.py", END_WITH=status, SLURM_JOB_ID=77) for status in (0, 1, 138)}
    assert {status: result.returncode for status, result in ended.items()} == {0: 0, 1: 1, 138: 138}
    assert [ended[status].stdout for status in (0, 1, 138)] == ["", "", "scontrol requeue 77\n"]


def test_the_environment_of_the_checkout_is_used_unless_one_is_active(tmp_path, commands):
    activate = tmp_path / ".venv" / "bin" / "activate"
    activate.parent.mkdir(parents=True)
    activate.write_text("echo activated in $PWD\n")
    for active, expected in (("", f"activated in {tmp_path}\n"), ("active", "")):
        said = submit("train.sh", commands, "x.py", END_WITH=0, SLURM_SUBMIT_DIR=tmp_path, VIRTUAL_ENV=active)
        assert (said.returncode, said.stdout) == (0, expected)
