"""Settings of ``replay.py``."""

from __future__ import annotations

from collections.abc import Iterator

from ..config import Fault, option, section, settings
from ..distributed.launch import DistributedConfig


@settings
class ReplayConfig:
    """Step"""

    logdir: str = option("", "log directory of the run")
    step: int = option(0, "number of the step in flight.jsonl; 0 = the last one")
    data_dir: tuple[str, ...] = option((), "the run's shards, if they have moved; none = where they were")

    def faults(self) -> Iterator[Fault]:
        if not self.logdir:
            yield Fault("logdir", "is required: the log directory of the run")


@settings
class ReplayRun:
    """All settings of ``replay.py``."""

    what: ReplayConfig = section(ReplayConfig)
    distributed: DistributedConfig = section(DistributedConfig)
