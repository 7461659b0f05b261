"""Many reads at once, which nothing waits for when their results are not needed any more."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import TypeVar

from .retries import stopped_by

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_parallel(call: Callable[[Item], Result], items: Sequence[Item], threads: int) -> Iterator[Result]:
    """``call(item)`` of each item, in order, at most ``threads`` at once; an error is raised in its turn.

    When the iteration ends early, by an error or Ctrl-C, no further call starts, and retries end. A pool of
    ``concurrent.futures`` would wait for a server that is away.
    """
    found: list[Future[Result]] = [Future() for _ in items]
    left: queue.SimpleQueue[int] = queue.SimpleQueue()
    ended = threading.Event()

    def work() -> None:
        with stopped_by(ended):
            while not ended.is_set():
                try:
                    i = left.get_nowait()
                except queue.Empty:
                    return
                try:
                    found[i].set_result(call(items[i]))
                except BaseException as error:  # for the thread that iterates
                    found[i].set_exception(error)

    for i in range(len(items)):
        left.put(i)
    for _ in range(min(threads, len(items))):
        threading.Thread(target=work, daemon=True).start()
    try:
        for each in found:
            yield each.result()
    finally:
        ended.set()
