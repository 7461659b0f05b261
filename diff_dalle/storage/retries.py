"""The one policy for temporary failures of all remote storage: how long, how often, and what ends it early.

A call is repeated for ``RETRY_SECONDS`` after its first failure, with pauses of random length ("full jitter"), so that
many processes do not return to a busy server at the same moment. Progress, such as a part of a file, starts a new call.
"""

from __future__ import annotations

import contextlib
import email.utils
import itertools
import logging
import multiprocessing
import queue
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import TypeVar

from ..config import redact
from .failures import UnavailableError, is_temporary, reason_of

RETRY_SECONDS = 300.0  # how long a server may be away; well below the time-out of collectives (1800 s)
FIRST_PAUSE = 0.5  # upper limit of the first pause in seconds, doubled after each attempt …
LONGEST_PAUSE = 20.0  # … up to this
CONNECT_SECONDS = 10.0  # time-out of a connection attempt
SILENT_SECONDS = 60.0  # time-out without receiving a byte
NOTED_SECONDS = 5.0  # of failures of a call, after which the log names the server
THREADS = 16  # at once, which wait for disks and networks, not for each other
LOOK_SECONDS = 1.0  # pauses end early when the program ends; how often to look
Item = TypeVar("Item")
Result = TypeVar("Result")
log = logging.getLogger(__name__)

_dice = random.SystemRandom()  # global generators belong to training
_lost: set[str] = set()  # servers that were away for RETRY_SECONDS: one attempt each until they answer again
_noted: set[str] = set()  # servers whose failure the log names
_thread = threading.local()


@contextlib.contextmanager
def stopped_by(event: threading.Event) -> Iterator[None]:
    """Let the retries of this thread end, with UnavailableError, as soon as ``event`` is set."""
    _thread.event = event
    try:
        yield
    finally:
        del _thread.event


def _stopping() -> bool:
    event, parent = getattr(_thread, "event", None), multiprocessing.parent_process()
    return (event is not None and event.is_set()) or (parent is not None and not parent.is_alive())


def retry(path: str, call: Callable[[], Result], since: float | None = None) -> Result:
    """``call()``, repeated after temporary failures.

    since: the time.monotonic() from which RETRY_SECONDS count; None = now.

    Raises UnavailableError when the time is used up. Other errors pass unchanged.
    """
    began = time.monotonic()
    deadline = RETRY_SECONDS + (began if since is None else since)
    server = _server(path)
    for attempt in itertools.count(1):
        try:
            result = call()
        except Exception as error:
            if not is_temporary(error):
                raise
            left = deadline - time.monotonic()
            if left <= 0 or server in _lost or _stopping():
                if left <= 0:
                    _lost.add(server)
                tried = "once" if attempt == 1 else f"{attempt} times in {time.monotonic() - began:.0f} s"
                raise UnavailableError(f"{path} is not available ({reason_of(error)}); tried {tried}") from error
            if time.monotonic() - began >= NOTED_SECONDS and server not in _noted:
                _noted.add(server)
                log.warning("%s: %s; retrying for up to %.0f s", *map(redact, (server, reason_of(error))), left)
            _wait(min(left, max(_jitter(attempt), _asked(error))))
        else:
            _lost.discard(server)
            if server in _noted:
                _noted.discard(server)
                log.warning("%s answers again", redact(server))
            return result
    raise AssertionError("unreachable")


def pause(attempt: int) -> None:
    """Wait before attempt ``attempt`` + 1, counted from 1."""
    _wait(_jitter(attempt))


def _server(path: str) -> str:
    """What may be away as a whole: the host of a URL, the bucket of an object store."""
    scheme, mark, rest = path.partition("://")
    return f"{scheme}{mark}{re.split('[/?#]', rest)[0].rpartition('@')[2]}"


def _jitter(attempt: int) -> float:
    return _dice.uniform(0.0, min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(attempt - 1, 30)))


def _asked(error: BaseException) -> float:
    """The seconds that a busy server asks to wait (Retry-After: a number or a date), 0 if it does not."""
    asked, response = getattr(error, "wait", ""), getattr(error, "response", None)
    if isinstance(response, dict):
        asked = response.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("retry-after", "")
    if asked.strip().isdigit():
        return float(asked)
    with contextlib.suppress(ValueError, TypeError):
        return max(0.0, email.utils.parsedate_to_datetime(asked).timestamp() - time.time())
    return 0.0


def _wait(seconds: float) -> None:
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0 and not _stopping():
        time.sleep(min(left, LOOK_SECONDS))


def in_parallel(call: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
    """``call(item)`` of each item, in order, at most ``THREADS`` at once; an error is raised in its turn.

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
    for _ in range(min(THREADS, len(items))):
        threading.Thread(target=work, daemon=True).start()
    try:
        for each in found:
            yield each.result()
    finally:
        ended.set()
