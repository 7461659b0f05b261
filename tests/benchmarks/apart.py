"""Calls in a process of its own, which is replaced after a failure: what hangs, dies or leaves a device unusable takes
nothing else with it."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any


class Apart:
    """One call after another in the same process, until one fails."""

    def __init__(self) -> None:
        self.worker: tuple[BaseProcess, Connection] | None = None

    def call(self, seconds: float, function: Callable[..., Any], *args: Any) -> Any:
        """``function(*args)``; it must be at a module's top level.

        TimeoutError when it takes more than ``seconds``, the start of a process included; ChildProcessError when the
        process dies; RuntimeError with an exception's name and first line when the function raises one.
        """
        process, connection = self.worker = self.worker or _start()
        try:
            connection.send((function, args))
            if not connection.poll(seconds):
                raise TimeoutError(f"took more than {seconds:.0f} s")
            succeeded, found = connection.recv()
        except (EOFError, ConnectionError):
            process.join()
            text = f"the process ended with status {process.exitcode}"
            self.close()
            raise ChildProcessError(text) from None
        except TimeoutError:
            self.close()
            raise
        if not succeeded:
            self.close()
            raise RuntimeError(found)
        return found

    def close(self) -> None:
        """End the process; the next call starts another."""
        if self.worker:
            process, connection = self.worker
            process.kill()
            process.join()
            connection.close()
            self.worker = None


def _start() -> tuple[BaseProcess, Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()  # its only other end, so that the process's death ends a wait for it
    return process, ours


def _serve(connection: Connection) -> None:
    """Answer calls until the caller is gone."""
    while True:
        try:
            function, args = connection.recv()
        except EOFError:
            return
        try:
            answer = True, function(*args)
        except Exception as error:
            answer = False, described(error)
        connection.send(answer)


def described(error: Exception) -> str:
    """An exception's name and first line."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}".rstrip(": ")
