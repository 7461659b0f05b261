"""Writing while training goes on: calls in a thread, and the copies of states that they write."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from .shards import replaced


class Background:
    """Calls in a thread, in the order in which they are given. What one raises is kept until it is asked for, and the
    process does not end before the last one has."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="saving")
        self._jobs: list[Future[object]] = []

    def start(self, call: Callable[[], object]) -> None:
        """Call it after all that were given before."""
        self._jobs = [job for job in self._jobs if not job.done() or job.exception()]
        self._jobs.append(self._pool.submit(_call, [call]))

    def join(self) -> None:
        """Wait until all calls have ended. Raises what the first failing one raised, which ``check`` and ``wait`` still
        will."""
        concurrent.futures.wait(self._jobs)
        for job in self._jobs:
            job.result()

    def wait(self) -> None:
        """Wait until all calls have ended. Raises, once, what the first failing one raised."""
        try:
            self.join()
        finally:
            self._jobs.clear()

    def check(self) -> None:
        """Raise, once, what a call raised that has failed by now."""
        if any(job.done() and job.exception() for job in self._jobs):
            self.wait()


def _call(given: list[Callable[[], object]]) -> None:
    given.pop()()  # and let it go, with what it holds, before its end is known


class Snapshot:
    """Copies on the host of states at one step, which later updates leave alone.

    They have the layout of the originals: what shares its memory there does here, also between several states.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        # By the original's address; with the original, since the address of a freed one could be used again.
        self._copies: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def of(self, state: Any) -> Any:
        """The copy of a state: nested dicts and lists of tensors and plain values."""
        return replaced(state, self._copy)

    def _copy(self, tensor: Tensor) -> Tensor:
        original = tensor.untyped_storage()
        if original._cdata not in self._copies:
            data = torch.empty(0, dtype=torch.uint8, device=original.device).set_(original)
            self._copies[original._cdata] = original, data.to("cpu", copy=True).untyped_storage()
        copy = self._copies[original._cdata][1]
        return torch.empty(0, dtype=tensor.dtype).set_(copy, tensor.storage_offset(), tensor.size(), tensor.stride())
