"""``guided_diffusion.logger``: messages and values of a script, shown and recorded by the trackers of this library.

The log directory gets log.txt, progress.csv, and on demand progress.jsonl and TensorBoard's files; only the first rank
writes.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .checkpoints.run_folder import choose_logdir
from .config import lookup
from .distributed.rendezvous import detect
from .tracking.tracker import Tracker
from .tracking.trackers import TrackingConfig, create_trackers

DEBUG, INFO, WARN, ERROR, DISABLED = 10, 20, 30, 40, 50
FORMATS = {"stdout": "console", "log": "log", "csv": "csv", "json": "jsonl", "tensorboard": "tensorboard"}


@dataclass
class Logger:
    """Values by name since the last ``dumpkvs``, with how many each is the mean of. dumps: how often that was."""

    dir: str
    tracker: Tracker
    level: int = INFO
    values: dict[str, Any] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    dumps: int = 0


_current: Logger | None = None


def configure(dir: str | None = None, format_strs: Sequence[str] | None = None) -> None:
    """Start to log.

    dir:         log directory, local or remote; None = $OPENAI_LOGDIR, else a new one in ./runs.
    format_strs: stdout, log, csv, json, tensorboard; None = $OPENAI_LOG_FORMAT, else the first three.
    """
    global _current
    logdir = os.path.expanduser(choose_logdir(dir or ""))
    if format_strs is None:
        format_strs = os.environ.get("OPENAI_LOG_FORMAT", "stdout,log,csv").split(",")
    names = tuple(lookup(FORMATS, name, "format_strs") for name in format_strs if name)
    is_first = detect().rank == 0
    tracker = create_trackers(TrackingConfig(trackers=names), logdir, {}) if is_first else Tracker()
    _current = Logger(logdir, tracker)
    log(f"Logging to {logdir}")


def get_current() -> Logger:
    """The present logger; the first call without one configures it."""
    if _current is None:
        configure()
    assert _current is not None
    return _current


@contextlib.contextmanager
def scoped_configure(dir: str | None = None, format_strs: Sequence[str] | None = None) -> Iterator[None]:
    """A logger of its own inside the block."""
    global _current
    before = _current
    configure(dir, format_strs)
    try:
        yield
    finally:
        reset()
        _current = before


def reset() -> None:
    """End the present logger."""
    global _current
    if _current is not None:
        _current.tracker.finish()
    _current = None


def get_dir() -> str:
    """The log directory."""
    return get_current().dir


def set_level(level: int) -> None:
    """Leave out messages below a level, such as ``WARN``."""
    get_current().level = level


def log(*args: Any, level: int = INFO) -> None:
    """A message of these words."""
    if level >= get_current().level:
        get_current().tracker.note(" ".join(map(str, args)))


def debug(*args: Any) -> None:
    """``log`` at the level ``DEBUG``."""
    log(*args, level=DEBUG)


def info(*args: Any) -> None:
    """``log`` at the level ``INFO``."""
    log(*args, level=INFO)


def warn(*args: Any) -> None:
    """``log`` at the level ``WARN``."""
    log(*args, level=WARN)


def error(*args: Any) -> None:
    """``log`` at the level ``ERROR``."""
    log(*args, level=ERROR)


def logkv(key: str, val: Any) -> None:
    """A value, which replaces one of the same name."""
    get_current().values[key] = val


def logkv_mean(key: str, val: float) -> None:
    """A value of which the next ``dumpkvs`` shows the mean."""
    logger = get_current()
    logger.counts[key] += 1
    before = logger.values.get(key, 0.0)
    logger.values[key] = before + (float(val) - before) / logger.counts[key]


def logkvs(d: Mapping[str, Any]) -> None:
    """``logkv`` of each."""
    for key, value in d.items():
        logkv(key, value)


def getkvs() -> dict[str, Any]:
    """The values since the last ``dumpkvs``."""
    return get_current().values


def dumpkvs() -> dict[str, Any]:
    """Show and record the values, and forget them; returns them. Their step is the value ``step``, else the number of
    calls before. What is no number becomes a message."""
    logger = get_current()
    values, numbers = dict(logger.values), {}
    for name, value in values.items():
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError):
            log(f"{name}: {value}")
    step = int(numbers.pop("step", logger.dumps))
    logger.tracker.log(step, numbers)
    logger.dumps += 1
    logger.values.clear()
    logger.counts.clear()
    return values
