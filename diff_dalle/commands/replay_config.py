"""Settings of ``replay.py``."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import option, section
from ..distributed.launch import DistributedConfig
from ..errors import InputError


@dataclass(frozen=True)
class ReplayConfig:
    """Step"""

    logdir: str = option("", "log directory of the run")
    step: int = option(0, "number of the step in flight.jsonl; 0 = the last one there")
    data_dir: tuple[str, ...] = option((), "the run's shards, if they have moved; none = where they were")

    def __post_init__(self):
        if not self.logdir:
            raise InputError("--logdir is required: the log directory of the run")


@dataclass(frozen=True)
class ReplayRun:
    """All settings of ``replay.py``."""

    what: ReplayConfig = section(ReplayConfig)
    distributed: DistributedConfig = section(DistributedConfig)
