"""Settings of ``watch.py``."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Iterator, Sequence

from ..config import Fault, InputError, option, settings
from ..config.bounds import MAX_SECONDS
from .command_line import parse


@settings
class WatchConfig:
    """Page"""

    logdirs: tuple[str, ...] = option((), "log directories of runs to compare; also as arguments before all flags")
    refresh_seconds: float = option(10.0, "seconds between reads of folders", least=1, most=MAX_SECONDS)
    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 = reachable from other machines, without a password")
    port: int = option(7861, "port to listen on; 0 = any free one", least=0, most=65535)

    def faults(self) -> Iterator[Fault]:
        if len(set(self.logdirs)) < len(self.logdirs):
            yield Fault("logdirs", f"is {','.join(self.logdirs)}, but must name each run once")


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
