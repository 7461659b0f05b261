"""Where the processes of a job meet: what each launcher says, and rank 0's address.

This is the only module that imports mpi4py, and it does so only when ``mpiexec`` started more than one process.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ..config import InputError, as_flag

if TYPE_CHECKING:
    import torch

# Ends its parent with a sentence unless its standard input is closed in time: also while the parent's interpreter is
# inside a call of C code that lets no other thread run, as MPI's start is.
_WATCHDOG = """
import os, select, sys
if not select.select([0], [], [], float(sys.argv[1]))[0]:
    print(sys.argv[2], file=sys.stderr, flush=True)
    os.kill(int(sys.argv[3]), 15)
"""


@dataclass(frozen=True)
class ProcessInfo:
    """What a launcher says about this process. ``launcher`` is single, mpi, torchrun or slurm."""

    launcher: str
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


SINGLE = ProcessInfo("single")


#: Launchers, and their variables for rank, size, local rank and local size.
_LAUNCHERS = (
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("mpi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("mpi", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # MPICH, Intel MPI
    # Set by srun, not by a batch script that runs python directly; local sizes as 4(x2).
    ("slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
)


def detect(env: Mapping[str, str] = os.environ) -> ProcessInfo:
    """Read the launcher's environment variables; nothing is started or imported."""

    def number(name: str, default: int = 0) -> int:
        found = re.match(r"\d+", env.get(name, ""))
        return int(found.group()) if found else default

    for launcher, rank, size, local_rank, local_size in _LAUNCHERS:
        count, is_pmi = number(size), size == "PMI_SIZE"
        if launcher == "torchrun":
            is_there = rank in env and size in env
        else:  # srun sets PMI's too
            is_there = count > 1 and not (is_pmi and count == number("SLURM_STEP_NUM_TASKS"))
        if is_there:
            local = number(local_size, count if is_pmi else 1)
            return ProcessInfo(launcher, number(rank), count, number(local_rank), local)
    return SINGLE


def meeting_point(place: ProcessInfo, seconds: float) -> tuple[str, int, Any]:
    """Address and port for rank 0's store, and the MPI communicator where there is one.

    seconds: after which the process ends if MPI has not started. InputError when the launcher does not say enough.
    """
    if place.launcher == "torchrun":
        if not os.environ.get("MASTER_ADDR") or not os.environ.get("MASTER_PORT", "").isdigit():
            raise InputError(
                "RANK and WORLD_SIZE are set, but not MASTER_ADDR and MASTER_PORT: start with torchrun, or set all four"
            )
        return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None
    if place.launcher == "slurm":
        nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST", "127.0.0.1")
        first = re.sub(r"\[(\w+).*", r"\1", nodes.split(",")[0])  # node[003-007,9] -> node003
        unique = int(os.environ.get("SLURM_JOB_ID", 0)) * 31 + int(os.environ.get("SLURM_STEP_ID", 0))
        return os.environ.get("MASTER_ADDR", first), int(os.environ.get("MASTER_PORT", 20000 + unique % 20000)), None
    late = (
        f"error: rank {place.rank}: MPI has not started after {seconds:g} s: one of the {place.size} processes did not "
        f"come up ({as_flag('start_timeout')} sets how long to wait)"
    )
    with _in_time(seconds, late):
        return _meet_by_mpi(place)


def free_port() -> int:
    """A port of this machine that nothing uses at this moment."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def _meet_by_mpi(place: ProcessInfo) -> tuple[str, int, Any]:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py is there, but no MPI library
        raise InputError(f"mpiexec started {place.size} processes, but mpi4py cannot be used ({error})") from None
    comm = MPI.COMM_WORLD
    if comm.Get_size() != place.size:
        raise InputError(
            f"mpiexec started {place.size} processes, but mpi4py's MPI library sees {comm.Get_size()}: they belong to "
            "different MPI installations; use the mpiexec of the library that mpi4py loads"
        )
    hosts = comm.allgather(socket.gethostname())
    port = free_port() if place.rank == 0 else None
    address = "127.0.0.1" if len(set(hosts)) == 1 else hosts[0]
    return address, comm.bcast(port, root=0), comm


@contextlib.contextmanager
def _in_time(seconds: float, message: str) -> Iterator[None]:
    """End this process with ``message`` and SIGTERM if the block takes longer than ``seconds``."""
    command = [sys.executable, "-I", "-S", "-c", _WATCHDOG, str(seconds), message, str(os.getpid())]
    with subprocess.Popen(command, stdin=subprocess.PIPE):  # leaving the block closes its input
        yield


def open_store(place: ProcessInfo, address: str, port: int, seconds: float) -> torch.distributed.Store:
    """Rank 0's store of names and values. InputError when it cannot be opened or reached in ``seconds``."""
    import torch

    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = place.rank == 0 and not agent
    try:
        store: torch.distributed.Store = torch.distributed.TCPStore(
            address, port, None, is_master=serves, timeout=timedelta(seconds=seconds), wait_for_workers=False
        )
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"cannot {'open' if serves else 'reach'} rank 0's port {address}:{port}: {reason}") from error
    # Names of their own for each restart by torchrun.
    return torch.distributed.PrefixStore(f"diff_dalle/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
