"""Starting and ending a job: launchers, rendezvous, failure.

Started by ``mpiexec``, ``torchrun``, ``srun`` or plain ``python``, every script gets the same ``World``. This is the
only module that imports mpi4py, and it does so only when ``mpiexec`` started more than one process.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from ..config import option
from ..errors import InputError, quantity, redact
from .devices import pick_device
from .world import SINGLE, ProcessInfo, World


@dataclass(frozen=True)
class DistributedConfig:
    """Processes and devices"""

    device: str = option(
        "auto", "compute device; auto = CUDA, else MPS, else CPU", free=True, choices=("auto", "cpu", "cuda", "mps")
    )
    threads: int = option(0, "CPU threads per process; 0 = the machine's cores divided by its processes", free=True)
    start_timeout: float = option(300.0, "seconds to wait for all processes at the start", free=True)
    timeout: float = option(1800.0, "seconds that a collective may wait before the job is aborted", free=True)

    def __post_init__(self):
        for name in ("threads", "start_timeout", "timeout"):
            if getattr(self, name) < 0:
                raise InputError(f"{name} is {getattr(self, name)}, but must not be negative")


def detect(env: Mapping[str, str] = os.environ) -> ProcessInfo:
    """Read the launcher's environment variables; nothing is started or imported."""

    def number(*names: str, default: int = 0) -> int:
        return next((int(env[name]) for name in names if env.get(name, "").isdigit()), default)

    if "RANK" in env and "WORLD_SIZE" in env:
        local_size = number("LOCAL_WORLD_SIZE", default=1)
        return ProcessInfo("torchrun", number("RANK"), number("WORLD_SIZE"), number("LOCAL_RANK"), local_size)
    if number("OMPI_COMM_WORLD_SIZE") > 1:  # Open MPI
        rank, size = number("OMPI_COMM_WORLD_RANK"), number("OMPI_COMM_WORLD_SIZE")
        local_size = number("OMPI_COMM_WORLD_LOCAL_SIZE", default=1)
        return ProcessInfo("mpi", rank, size, number("OMPI_COMM_WORLD_LOCAL_RANK"), local_size)
    tasks = number("SLURM_STEP_NUM_TASKS")  # set by srun, not by a batch script that runs python directly
    if number("PMI_SIZE") > 1 and number("PMI_SIZE") != tasks:  # MPICH, Intel MPI
        local_size = number("MPI_LOCALNRANKS", default=number("PMI_SIZE"))
        return ProcessInfo("mpi", number("PMI_RANK"), number("PMI_SIZE"), number("MPI_LOCALRANKID"), local_size)
    if tasks > 1:
        per_node = re.match(r"\d+", env.get("SLURM_STEP_TASKS_PER_NODE", "1"))
        local_size = int(per_node.group()) if per_node else 1
        return ProcessInfo("slurm", number("SLURM_PROCID"), tasks, number("SLURM_LOCALID"), local_size)
    return SINGLE


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _meeting_point(place: ProcessInfo) -> tuple[str, int, Any]:
    """Address and port of rank 0's store, and the MPI communicator where there is one."""
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
    port = None
    if place.rank == 0:
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
    address = "127.0.0.1" if len(set(hosts)) == 1 else hosts[0]
    return address, comm.bcast(port, root=0), comm


def _connect(place: ProcessInfo, address: str, port: int, seconds: float):
    """A store that all ranks have reached; after ``seconds`` rank 0 names the missing ranks."""
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = place.rank == 0 and not agent
    try:
        store: torch.distributed.Store = torch.distributed.TCPStore(
            address, port, None, is_master=serves, timeout=timedelta(seconds=seconds), wait_for_workers=False
        )
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"cannot {'open' if serves else 'reach'} rank 0's port {address}:{port}: {reason}") from error
    store = _prefixed(store)
    store.set(f"arrived/{place.rank}", "yes")
    if place.rank == 0:
        deadline = time.monotonic() + seconds
        missing = set(range(place.size))
        while missing := {rank for rank in missing if not store.check([f"arrived/{rank}"])}:
            if time.monotonic() > deadline:
                raise InputError(
                    f"after {seconds:.0f} s these processes are missing: ranks {sorted(missing)} of {place.size} "
                    "(--start_timeout sets how long to wait)"
                )
            time.sleep(0.05)
    return store


def _say(message: str) -> None:
    sys.stdout.flush()
    print(redact(message), file=sys.stderr, flush=True)


def _watch(store, rank: int, done: threading.Event) -> None:
    """Exit when another rank has failed, even if this one waits inside a collective."""
    while not done.wait(1.0):
        try:
            failed = store.check(["failure"])
        except RuntimeError:  # rank 0 held the store and is gone
            failed = None
        if done.is_set() or failed is False:
            continue
        time.sleep(2.0)  # let the launcher, or this rank's own error, end the job in an orderly way
        if done.is_set():
            return
        reason = store.get("failure").decode() if failed else "rank 0 is gone"
        _say(f"rank {rank} stops because {reason}")
        os._exit(1)


def _stop_watching(watcher: threading.Thread | None, done: threading.Event) -> None:
    """End the watching thread: inside a call of the store, it would abort the process when the interpreter exits."""
    done.set()
    if watcher is not None:
        watcher.join(10.0)  # bounded, in case the store no longer answers


def _enter(config: DistributedConfig, place: ProcessInfo) -> World:
    """The world of this process; its device becomes torch's current one."""
    device = pick_device(config.device, place)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return World(place, device)


@contextlib.contextmanager
def launch(config: DistributedConfig) -> Iterator[World]:
    """Join the job: choose the device, connect to the other processes, and make all of them end together.

    An exception inside the block, on any rank, ends every rank with a non-zero status; the first rank to fail reports
    the reason. Raises InputError for a missing device and for inconsistent launchers.
    """
    place = detect()
    torch.set_num_threads(config.threads or max(1, _cores() // place.local_size))
    if place.size == 1:
        world = _enter(config, place)
        spare = torch.cuda.device_count() - 1 if world.device.type == "cuda" else 0
        if spare > 0:
            more = f"mpiexec -n {spare + 1} (or torchrun --nproc_per_node {spare + 1})"
            print(f"Note: {quantity(spare, 'further GPU')} idle; start with {more} to use all.", flush=True)
        yield world
        return

    address, port, comm = _meeting_point(place)
    done = threading.Event()
    store = watcher = None
    try:
        store = _connect(place, address, port, config.start_timeout)
        watched = _connect_again(address, port)
        watcher = threading.Thread(target=_watch, args=(watched, place.rank, done), daemon=True)
        watcher.start()
        world = _enter(config, place)  # after connecting: a rank without its device can report it
        torch.distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if world.device.type == "cuda" else "gloo",
            store=torch.distributed.PrefixStore("group", store),
            rank=place.rank,
            world_size=place.size,
            timeout=timedelta(seconds=config.timeout),
        )
        yield world
        world.barrier()
        _stop_watching(watcher, done)
        torch.distributed.destroy_process_group()
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            _stop_watching(watcher, done)
            raise
        first = _first_to_fail(store, place.rank, error)
        if first:
            _report(error, f"rank {place.rank}: ")
        done.set()
        if comm is not None:
            time.sleep(0.2)  # flush the message before the whole job is killed
            comm.Abort(_status(error))  # an exception would wait for the other ranks in MPI_Finalize forever
        sys.stderr.flush()
        os._exit(_status(error))  # the process group's own clean-up may wait for the others too


def _connect_again(address: str, port: int):
    """A second connection, for the watching thread: a store connection serves one blocking call at a time."""
    return _prefixed(torch.distributed.TCPStore(address, port, None, is_master=False, wait_for_workers=False))


def _prefixed(store: torch.distributed.Store) -> torch.distributed.Store:
    """The store, with names of its own for each restart by torchrun."""
    return torch.distributed.PrefixStore(f"diff_dalle/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def _first_to_fail(store, rank: int, error: BaseException) -> bool:
    """Whether no other rank has reported a failure before; publishes ours."""
    if store is None:
        return True
    try:
        reason = f"rank {rank} failed: {type(error).__name__}: {error}"
        return store.compare_set("failure", "", reason).decode() == reason
    except RuntimeError:  # the store went down with rank 0, which has reported
        return False


def _status(error: BaseException) -> int:
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    return 2 if isinstance(error, InputError) else 130 if isinstance(error, KeyboardInterrupt) else 1


def _report(error: BaseException, who: str = "") -> None:
    if isinstance(error, InputError):
        _say(f"error: {who}{error}")
    elif isinstance(error, KeyboardInterrupt):
        _say(f"{who}interrupted")
    elif isinstance(error, SystemExit):
        _say(f"{who}{error.code if isinstance(error.code, str) else 'left with status ' + str(error.code)}")
    else:
        _say(who + "".join(traceback.format_exception(error)))


def run_script(main: Callable[[], None]) -> None:
    """Run a script's ``main``: bad input becomes one line on stderr and status 2, from rank 0 only."""
    try:
        main()
    except (InputError, KeyboardInterrupt) as error:
        if detect().rank == 0:
            _report(error)
        sys.exit(_status(error))
