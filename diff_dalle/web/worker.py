"""One thread that samples, and a bounded queue before it."""

from __future__ import annotations

import collections
import contextlib
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ..config import InputError
from ..sampling.stage import Progress, Watch
from .refusal import Refusal

Work = Callable[[Watch], Any]


class _Ended(Exception):
    """Raised in the middle of sampling, to end it."""


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A job at one moment.

    ahead:    jobs before it, with the running one; 0 = it runs, or is over.
    progress: its latest step; None before the first.
    refusal:  why it ended without a result.
    seconds:  of sampling until now, or in all.
    """

    over: bool
    ahead: int
    progress: Progress | None
    result: Any
    refusal: InputError | None
    seconds: float


class Job:
    """One piece of work, from ``Worker.submit``, or a place in the queue for one, from ``Worker.place``."""

    def __init__(self, worker: Worker):
        self._worker = worker
        self.work: Work | None = None  # until it is known, and when it is over
        self._over = threading.Event()
        self._end: Refusal | None = None  # why the sampling is to end
        self._progress: Progress | None = None
        self._result: Any = None
        self._refusal: InputError | None = None
        self._start = self._stop = 0.0

    def cancel(self) -> None:
        """End it before its next step, or take it from the queue; nothing if it is over."""
        self._end = Refusal(409, "canceled")
        if self._worker.withdraw(self):
            self._finish(None, self._end)

    @property
    def over(self) -> bool:
        return self._over.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Whether it is over, after at most ``timeout`` seconds."""
        return self._over.wait(timeout)

    def snapshot(self) -> Snapshot:
        over = self.over
        seconds = (self._stop if over else time.monotonic()) - self._start if self._start else 0.0
        ahead = 0 if over else self._worker.ahead(self)
        return Snapshot(over, ahead, self._progress, self._result, self._refusal, seconds)

    def run(self, max_seconds: float) -> None:
        """Do the work, in this thread. Nothing is raised: ``snapshot`` tells how it ended."""
        self._start = time.monotonic()

        def watch(progress: Progress) -> None:
            self._progress = progress
            if time.monotonic() - self._start > max_seconds:
                self._end = Refusal(
                    408, f"this took longer than {max_seconds:g} s, the limit: ask for fewer steps or images"
                )
            if self._end is not None:
                raise _Ended

        try:
            if self._end is not None:
                raise _Ended
            assert self.work is not None
            self._finish(self.work(watch), None)
        except _Ended:
            self._finish(None, self._end)
        except InputError as error:
            self._finish(None, error)
        except Exception:  # a fault of ours: the log has the details, and the next request is served
            traceback.print_exc()
            self._finish(None, Refusal(500, "this request failed by a fault of the server, whose log has the details"))

    def _finish(self, result: Any, refusal: InputError | None) -> None:
        self._stop, self._result, self._refusal = time.monotonic(), result, refusal
        self.work = self._progress = None  # pictures, and a tensor of the network's device
        self._over.set()


class Worker:
    """Does one job at a time, in the order of their coming.

    max_queue:   jobs that may wait, beside the running one.
    max_seconds: that a job may run; it ends at its first step after that.
    """

    def __init__(self, max_queue: int, max_seconds: float):
        self.max_queue, self.max_seconds = max_queue, max_seconds
        self._waiting: collections.deque[Job] = collections.deque()
        self._running: Job | None = None
        self._closed = False
        self._changed = threading.Condition()  # of a lock that one thread may hold several times
        self._thread = threading.Thread(target=self._loop, name="sampling", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def place(self) -> Iterator[Job]:
        """Takes a place in the queue before pictures are decoded for the job, so that the memory for these is bounded
        too; it is left if no work is submitted for it. Raises Refusal if the queue is full."""
        with self._changed:
            self.check_room()
            self._waiting.append(job := Job(self))
        try:
            yield job
        finally:
            if job.work is None:
                self.withdraw(job)

    def check_room(self) -> None:
        """Raises Refusal if the queue is full now."""
        with self._changed:
            if self._closed:
                raise Refusal(503, "the server is stopping")
            waiting = len(self._waiting)
            if waiting >= self.max_queue + (self._running is None):  # then one of them is about to run
                raise Refusal(503, f"busy, try again: {waiting} requests are waiting already")

    def submit(self, work: Work, place: Job | None = None) -> Job:
        """Queue ``work(watch)``, which calls ``watch`` at every step. Raises Refusal if the queue is full and no place
        was taken."""
        with self._changed:
            if place is None or self._closed:
                self.check_room()
                self._waiting.append(place := Job(self))
            place.work = work
            self._changed.notify()
        return place

    def withdraw(self, job: Job) -> bool:
        """Take a job from the queue; False if it is not there."""
        with self._changed:
            if job not in self._waiting:
                return False
            self._waiting.remove(job)
            return True

    def ahead(self, job: Job) -> int:
        """The number of jobs before a waiting one; 0 for one that runs."""
        with self._changed:
            return self._waiting.index(job) + (self._running is not None) if job in self._waiting else 0

    def close(self) -> None:
        """Cancel all jobs and end the thread."""
        with self._changed:
            self._closed = True
            jobs = [*self._waiting, *([self._running] if self._running else [])]
            self._changed.notify()
        for job in jobs:
            job.cancel()
        self._thread.join()

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or any(job.work for job in self._waiting))
                if self._closed:
                    return
                job = self._running = next(job for job in self._waiting if job.work)
                self._waiting.remove(job)
            job.run(self.max_seconds)
            with self._changed:
                self._running = None
            del job  # its result belongs to whoever asked for it
