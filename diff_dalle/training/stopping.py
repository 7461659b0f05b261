"""Why a run ends before its limit. All ranks agree on a reason, a number, by a vote: the largest counts."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import InputError

TIME = 1  # the limit in hours
SIGNAL = 128  # plus the signal's number: also the exit status
FAILURE = 1000  # an InputError on some rank

#: SIGUSR1 is what Slurm can be asked to send before it preempts a job or its time is up.
SIGNALS = tuple(number for name in ("SIGTERM", "SIGINT", "SIGUSR1") if (number := getattr(signal, name, None)))


class Diverged(InputError):
    """Training has diverged, so that its state is not worth saving."""

    status = 3


@dataclass
class Stop:
    """reason: 0, or ``SIGNAL`` plus the number of the first signal that came."""

    reason: int = 0


@contextlib.contextmanager
def stop_on_signals() -> Iterator[Stop]:
    """``SIGNALS`` only set the reason inside the block; a second Ctrl-C interrupts."""
    stop = Stop()

    def request(number, frame):
        if stop.reason and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.reason = stop.reason or SIGNAL + number

    previous = {number: signal.signal(number, request) for number in SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
