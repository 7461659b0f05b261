"""Settings of ``watch.py``."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from ..config import option
from ..errors import InputError
from .command_line import parse


@dataclass(frozen=True)
class WatchConfig:
    """Page"""

    logdirs: tuple[str, ...] = option((), "log directories of runs to compare; also without the flag, before all flags")
    refresh_seconds: float = option(10.0, "seconds between looks at the folders")
    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 = reachable from other machines, without a password")
    port: int = option(7861, "port to listen on; 0 = any free one")

    def __post_init__(self):
        if self.refresh_seconds < 1:
            raise InputError(f"refresh_seconds is {self.refresh_seconds:g}, but must be at least 1")
        if not 0 <= self.port <= 65535:
            raise InputError(f"port is {self.port}, but must lie between 0 and 65535")
        if len(set(self.logdirs)) < len(self.logdirs):
            raise InputError(f"logdirs is {','.join(self.logdirs)}, but must name each run once")


def parse_watch(argv: Sequence[str] | None = None, description: str = "") -> WatchConfig:
    """The command line ``LOGDIR… [flags]`` or ``[flags]``, as ``command_line.parse``. Raises InputError as well when
    it names no run."""
    argv = list(sys.argv[1:] if argv is None else argv)
    given = list(itertools.takewhile(lambda word: not word.startswith("-"), argv))
    config = parse(WatchConfig, argv[len(given) :], description)
    if given and config.logdirs:
        raise InputError(f"logdirs is given twice, as {given[0]} and by --logdirs: give it once")
    if not given and not config.logdirs:
        raise InputError("no run is given: name its log directory, as in watch.py runs/64")
    return dataclasses.replace(config, logdirs=tuple(given)) if given else config
