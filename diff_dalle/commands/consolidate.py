"""Settings of ``consolidate.py``, and what it does."""

from __future__ import annotations

from dataclasses import dataclass

from .. import storage
from ..config import option
from ..errors import InputError


@dataclass(frozen=True)
class ConsolidateConfig:
    """Consolidating"""

    model_path: str = option("", "sharded checkpoint: the folder sharded… in a log directory")
    out: str = option("", "folder for the files; none = beside the checkpoint, where its run would have them")

    def __post_init__(self):
        if not self.model_path:
            raise InputError("--model_path is required: a sharded checkpoint, the folder sharded… in a log directory")


def consolidate_checkpoint(config: ConsolidateConfig) -> str:
    """Write the files; returns a text about them. InputError as ``consolidate``."""
    from ..checkpoints.consolidating import consolidate

    path = config.model_path.rstrip("/")
    paths = consolidate(path, config.out or storage.split(path)[0] or ".")
    return "\n".join(f"Wrote {each}." for each in paths)
