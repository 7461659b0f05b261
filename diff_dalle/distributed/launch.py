"""Starting and ending a job.

Started by ``mpiexec``, ``torchrun``, ``srun`` or plain ``python``, every script gets the same ``World``. All processes
end together; the exit status says why (see tasks/README.md).
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from ..config import Fault, InputError, as_flag, named, option, quantity, redact, settings
from ..config.bounds import MAX_PROCESSES, MAX_SECONDS
from .cores import cores_of, own_cores, threads_said, usable_cores
from .lifeline import MAX_SILENCE, Lifeline, News
from .rendezvous import ProcessInfo, detect, meeting_point, open_store

if TYPE_CHECKING:  # settings and --help need no torch
    import torch

    from .world import World

__all__ = ["DistributedConfig", "JobEnd", "ProcessInfo", "detect", "launch", "run_script"]


@settings
class DistributedConfig:
    """Processes and devices"""

    device: str = option(
        "auto", "compute device: cpu, cuda, mps, or cuda:N for one GPU; auto = CUDA, else MPS, else CPU", free=True
    )
    threads: int = option(
        0,
        "CPU threads per process; 0 = OMP_NUM_THREADS, MKL_NUM_THREADS or SLURM_CPUS_PER_TASK, else the job's cores "
        "on this machine divided among its processes there",
        free=True,
        least=0,
        most=MAX_PROCESSES,
    )
    allow_tf32: bool = option(
        False,
        "TF32 for fp32 matrix products and convolutions on NVIDIA GPUs: faster, with 10 of 23 mantissa bits",
    )
    start_timeout: float = option(
        300.0, "seconds to wait for all processes at the start", free=True, above=0, most=MAX_SECONDS
    )
    timeout: float = option(
        1800.0,
        "seconds that a collective may wait before the job is aborted; a silent process is named after half of "
        f"that, at most {MAX_SILENCE:g}",
        free=True,
        above=0,
        most=MAX_SECONDS,
    )

    def faults(self) -> Iterator[Fault]:
        if not re.fullmatch(r"auto|cpu|mps|cuda(:\d{1,4})?", self.device):
            yield Fault.of(self, "device", "must be one of auto, cpu, cuda, mps, or cuda:N, such as cuda:1")

    @property
    def silence(self) -> float:
        """Seconds after which a process that gives no sign of life is named."""
        return min(self.timeout / 2, MAX_SILENCE)


class JobEnd(SystemExit):
    """Raised on all ranks together: the job ends in order, with the status ``code``."""


def _say(message: str) -> None:
    sys.stdout.flush()
    print(redact(message), file=sys.stderr, flush=True)


def _enter(config: DistributedConfig, place: ProcessInfo) -> torch.device:
    """The device of this process, which becomes torch's current one."""
    import torch

    from .devices import use_device

    device = use_device(config.device, place, config.allow_tf32)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


@contextlib.contextmanager
def launch(config: DistributedConfig) -> Iterator[World]:
    """Join the job: choose the device, connect to the other processes, and make all of them end together.

    An exception inside the block, on any rank, ends every rank with a non-zero status; the first rank to fail reports
    the reason. A rank that vanishes is named by all others. ``JobEnd``, raised by all ranks, ends the job in order.
    Raises InputError for a missing device and for inconsistent launchers.
    """
    import torch

    from .devices import reuse_freed_memory
    from .world import World

    place = detect()
    reuse_freed_memory()
    threads = config.threads or threads_said(place)
    if place.size == 1:
        torch.set_num_threads(threads or usable_cores())
        world = World(place, _enter(config, place))
        spare = torch.cuda.device_count() - 1 if world.device.type == "cuda" else 0
        if spare > 0:
            more = f"mpiexec -n {spare + 1} (or torchrun --nproc_per_node {spare + 1})"
            print(f"Note: {quantity(spare, 'further GPU')} idle; start with {more} to use all.", flush=True)
        yield world
        return

    address, port, comm = meeting_point(place, config.start_timeout)
    lifeline = end = None
    try:
        store = open_store(place, address, port, config.start_timeout)
        lifeline = _connect(config, place, address, store)
        device = _enter(config, place)  # after connecting: a rank without its device can report it
        torch.distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=torch.distributed.PrefixStore("group", store),
            rank=place.rank,
            world_size=place.size,
            timeout=timedelta(seconds=config.timeout),
        )
        hosts, cores = zip(*World(place, device).gather((socket.gethostname(), own_cores())), strict=True)
        world = World(place, device, _nodes(hosts))
        torch.set_num_threads(threads or cores_of(place.rank, world.node_of, cores, usable_cores()))
        try:
            yield world
        except JobEnd as error:
            end = error
        world.barrier()
        lifeline.close()
        torch.distributed.destroy_process_group()
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            if lifeline:
                lifeline.close()
            raise
        _report_to_all(lifeline, place.rank, error)
        if comm is not None:
            time.sleep(0.2)  # flush the message before the whole job is killed
            comm.Abort(_status(error))  # an exception would wait for the other ranks in MPI_Finalize forever
        sys.stderr.flush()
        os._exit(_status(error))  # the process group's own clean-up may wait for the others too
    if end:
        raise end


def _connect(config: DistributedConfig, place: ProcessInfo, address: str, store: torch.distributed.Store) -> Lifeline:
    """The lifeline. Rank 0 waits for the others; InputError, which names them, when some are missing."""

    def end(news: News) -> None:
        if news.told:
            time.sleep(2.0)  # let the launcher, or this rank's own error, end the job in an orderly way
        _say(f"rank {place.rank} stops because {news.reason}")
        time.sleep(1.0)  # until all have said so: launchers kill the others at the first end
        os._exit(1)

    try:
        lifeline = Lifeline(place, address, store, config.start_timeout, config.silence, end)
    except (OSError, RuntimeError) as error:  # RuntimeError: from the store
        raise InputError(f"cannot reach rank 0 at {address}: {str(error).splitlines()[0]}") from error
    missing = lifeline.wait_for_all(config.start_timeout)
    if missing:
        raise InputError(
            f"after {config.start_timeout:g} s these processes are missing: ranks {missing} of {place.size} "
            f"({named('start_timeout')} sets how long to wait)"
        )
    return lifeline


def _nodes(hosts: Sequence[str]) -> list[int]:
    """The node of each rank, by its host's name."""
    numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    return [numbers[host] for host in hosts]


def _report_to_all(lifeline: Lifeline | None, rank: int, error: BaseException) -> None:
    """Tell the other ranks about our failure, and print it if it is the job's first."""
    expected = isinstance(error, (InputError, SystemExit, KeyboardInterrupt))
    news = None
    if lifeline:
        # A broken connection may be the consequence of a rank's end, of which the lifeline is about to hear.
        news = None if expected else lifeline.wait_for_news(1.0)
        reason = error.message(as_flag) if isinstance(error, InputError) else error
        news = news or lifeline.report(f"rank {rank} failed: {type(error).__name__}: {reason}")
    if news is None or news.rank == rank:
        _report(error, f"rank {rank}: ")
    elif not news.told:
        time.sleep(4.0)  # the lifeline's thread names the lost rank and ends this process


def _status(error: BaseException) -> int:
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    if isinstance(error, InputError):
        return getattr(error, "status", 2)
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def _report(error: BaseException, who: str = "") -> None:
    if isinstance(error, InputError):
        _say(f"error: {who}{error.message(as_flag)}")
    elif isinstance(error, KeyboardInterrupt):
        _say(f"{who}interrupted")
    elif isinstance(error, SystemExit):
        _say(f"{who}{error.code if isinstance(error.code, str) else 'left with status ' + str(error.code)}")
    else:
        _say(who + "".join(traceback.format_exception(error)))


def run_script(main: Callable[[], None]) -> None:
    """Run a script's ``main``: bad input becomes one line on stderr and status 2, from rank 0 only; a bug, its
    traceback with secrets removed, and status 1."""
    try:
        main()
    except (Exception, KeyboardInterrupt) as error:
        if detect().rank == 0 or not isinstance(error, (InputError, KeyboardInterrupt)):
            _report(error)
        sys.exit(_status(error))
