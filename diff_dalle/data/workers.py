"""Worker processes that prepare chunks of samples, and a wait for them that can be interrupted and always ends.

A worker that dies, as by the kernel's out-of-memory killer, is named within seconds of its chunk being needed; one that
delivers nothing for the stated time, because it is stopped or its disk does not answer, is named then.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.util import Finalize
from types import TracebackType
from typing import Any

import torch
from torch.utils.data import DataLoader

from ..config import InputError, named
from ..distributed.cores import usable_cores
from .samples import Chunk, Samples
from .settings import MAX_WORKERS

if sys.platform != "win32":
    import resource

    JOB_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1}
else:
    JOB_SIGNALS = set()

GRACE_SECONDS = 30  # between Slurm's SIGTERM and its SIGKILL
POLL_SECONDS = 0.2  # between two looks at workers and signals
LEAVE_SECONDS = 3.0  # that workers have to end by themselves
AHEAD = 2  # chunks received before they are asked for
FILES_PER_CHUNK = 8  # each tensor on its way from a worker is an open file
FILES_BESIDE = 128  # the program's own: shards, logs, connections, libraries


def worker_count(setting: int | None, device: torch.device, beside: int) -> int:
    """The workers of a process on a machine with ``beside`` such processes; None = as many as keep a GPU busy, and
    two where the network computes with the same cores."""
    if setting is not None:
        return setting
    return 2 if device.type == "cpu" else min(MAX_WORKERS, max(2, usable_cores() // beside - 1))


def prepared(
    samples: Samples,
    positions: Iterable[list[int]],
    workers: int,
    prefetch: int,
    pin: bool,
    should_stop: Callable[[], bool],
) -> Generator[Chunk, None, None]:
    """The chunk of samples at each list of positions, in order. The workers end when the iterator is closed.

    workers:     number of processes; 0 = chunks are prepared in this process.
    prefetch:    chunks prepared in advance by all workers together.
    pin:         whether tensors are copied to pinned memory, from which a GPU reads faster.
    should_stop: asked several times a second while waiting for workers; the iterator ends when it returns True.
    Raises InputError when a worker dies or none delivers within the time-out.
    """
    if not workers:
        for each in positions:
            if should_stop():
                return
            here = samples.__getitems__(each)
            yield here.pin_memory() if pin else here
        return
    feeder = _Feeder(samples, positions, workers, prefetch, pin)
    atexit.register(feeder.close)
    try:
        while (chunk := feeder.receive(should_stop)) is not None:
            yield chunk
    finally:
        feeder.close()
        atexit.unregister(feeder.close)


class _Feeder:
    """A DataLoader whose chunks a thread receives.

    The thread that trains could not be interrupted while it receives one: the connection to a stopped worker answers
    neither yes nor no.
    """

    def __init__(self, samples: Samples, positions: Iterable[list[int]], workers: int, prefetch: int, pin: bool):
        config = samples.recipe.config
        self.timeout = config.data_timeout
        _allow_open_files(FILES_BESIDE + FILES_PER_CHUNK * (max(prefetch, 2 * workers) + AHEAD))
        method = multiprocessing.get_start_method() if config.worker_start == "default" else config.worker_start
        if method != "fork":
            resource_tracker.ensure_running()  # started with the first worker, it would let signals through too early
        with _own_handler_for_dead_children(), _signals_delayed():
            self.source: Any = iter(  # whose own names are not part of torch's interface
                DataLoader(
                    samples,
                    batch_sampler=positions,
                    collate_fn=_collate,
                    pin_memory=pin,
                    timeout=POLL_SECONDS,
                    num_workers=workers,
                    prefetch_factor=max(2, -(-prefetch // workers)),
                    worker_init_fn=_start_worker,
                    multiprocessing_context=method,
                    generator=torch.Generator(),  # its draws have no effect, but must not come from the global one
                )
            )
        self.received: queue.SimpleQueue[Chunk | BaseException | None] = queue.SimpleQueue()
        self.room = threading.Semaphore(AHEAD)
        self.closed = False
        self.thread = threading.Thread(target=self._run, name="data", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while self.room.acquire() and not self.closed:
            try:
                self.received.put(self._next())
            except BaseException as error:  # passed on to the thread that waits
                self.received.put(error)
                return

    def _next(self) -> Chunk | None:
        while not self.closed:
            try:
                return next(self.source, None)
            except RuntimeError as error:
                if str(error) != f"DataLoader timed out after {POLL_SECONDS} seconds":
                    raise
        return None

    def receive(self, should_stop: Callable[[], bool]) -> Chunk | None:
        """The next chunk, or None after the last one and when the run is to stop."""
        deadline = time.monotonic() + self.timeout
        while True:
            try:
                chunk = self.received.get(timeout=POLL_SECONDS)
                break
            except queue.Empty:
                if should_stop():
                    return None
                if time.monotonic() > deadline:
                    raise self._late() from None
        self.room.release()
        if isinstance(chunk, BaseException):
            raise self._death() or _files_used_up(chunk) or chunk
        return chunk

    def _death(self) -> InputError | None:
        """What an error is due to, if a worker has died. A worker that only passes an error on is alive."""
        for worker in self.source._workers:
            worker.join(POLL_SECONDS)  # its connections close before it is gone
            if not worker.is_alive():
                return InputError(
                    f"a data worker died: process number {worker.pid} ended with exit code {worker.exitcode} (out of "
                    f"memory? lower {named('num_workers')} or {named('prefetch')})"
                )
        return None

    def _late(self) -> InputError:
        number = self.source._task_info[self.source._rcvd_idx][0]  # of the worker whose turn it is
        return InputError(
            f"the data worker with process number {self.source._workers[number].pid} has delivered nothing for "
            f"{self.timeout:g} s: it is stopped, or its storage does not answer ({named('data_timeout')} sets "
            "how long to wait)"
        )

    def close(self) -> None:
        """End thread and workers within seconds, by force if necessary."""
        self.closed = True
        self.room.release()
        self.thread.join(2 * POLL_SECONDS)
        ending = threading.Thread(target=self._shut_down, daemon=True)
        ending.start()
        ending.join(LEAVE_SECONDS)
        if ending.is_alive():
            for worker in self.source._workers:
                worker.kill()
            ending.join(LEAVE_SECONDS)

    def _shut_down(self) -> None:
        # Left to the garbage collector (the traceback of an error may hold ``source`` until then), DataLoader's queues
        # are closed first, and it then waits for workers that it can no longer tell to end.
        with contextlib.suppress(RuntimeError):  # a worker that dies now does no harm
            self.source._shutdown_workers()


def _allow_open_files(needed: int) -> None:
    """Raise this process's limit of open files if necessary. Raises InputError when it may not be raised so far."""
    if sys.platform == "win32":
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise InputError(
            f"at most {hard} open files are allowed (ulimit -n), but these data workers need {needed}: raise the limit "
            f"or set {named('num_workers')} 0"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _files_used_up(error: BaseException) -> InputError | None:
    """What an error is due to, if a chunk could not be received because too many files are open."""
    full = isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)
    said = str(error)  # by multiprocessing, when the kernel has left a file out, or by DataLoader
    if full or "items of ancdata" in said or "Too many open files" in said:
        return InputError("a data worker's samples cannot be received: too many open files (ulimit -n)")
    return None


def _collate(chunk):
    """DataLoader's collate function: a chunk is complete already."""
    return chunk


@contextlib.contextmanager
def _own_handler_for_dead_children() -> Iterator[None]:
    """Keep DataLoader from raising an error in whatever the training thread does when a worker dies, such as writing a
    checkpoint: the dead worker is noticed when its chunk is needed."""
    if not hasattr(signal, "SIGCHLD") or threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, handler)


@contextlib.contextmanager
def _signals_delayed() -> Iterator[None]:
    """Hold back the signals that end a job. A process started meanwhile inherits this, and :func:`_start_worker` lets
    them through: otherwise one that arrives before its handlers are set would end the worker."""
    if not JOB_SIGNALS:
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, JOB_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_worker(worker: int) -> None:
    """Let the training process decide when to stop: a signal sent to the whole job must not end its workers first, and
    an ended worker must not look like a failed one. So SIGTERM takes effect with a delay."""
    # At its end a spawned process would unload torch's libraries one by one, which may abort.
    Finalize(None, os._exit, args=(0,), exitpriority=-100)  # after its queue has been emptied
    sys.excepthook = _report_unless_cut_off
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "SIGUSR1"):
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # unlike SIGTERM, it precedes the end by minutes
    if hasattr(signal, "SIGALRM"):
        signal.signal(signal.SIGALRM, _leave)
        signal.signal(signal.SIGTERM, _leave_later)
    if JOB_SIGNALS:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, JOB_SIGNALS)


def _report_unless_cut_off(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an error of a worker's thread, unless the training process has stopped receiving: it says why itself."""
    if not isinstance(error, ConnectionError):
        sys.__excepthook__(kind, error, trace)


def _leave(*_) -> None:
    os._exit(0)


def _leave_later(*_) -> None:
    signal.alarm(signal.alarm(0) or GRACE_SECONDS)  # a second signal does not prolong it
