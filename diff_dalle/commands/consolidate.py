"""Settings of ``consolidate.py``, and what it does."""

from __future__ import annotations

from collections.abc import Iterator

from .. import storage
from ..config import option, settings
from ..errors import Fault


@settings
class ConsolidateConfig:
    """Consolidating"""

    model_path: str = option("", "sharded checkpoint: the folder sharded… in a log directory")
    out: str = option("", "folder for the files; none = beside the checkpoint, where its run would have them")

    def faults(self) -> Iterator[Fault]:
        if not self.model_path:
            yield Fault("model_path", "is required: a sharded checkpoint, the folder sharded… in a log directory")


def consolidate_checkpoint(config: ConsolidateConfig) -> str:
    """Write the files; returns a text about them. InputError as ``consolidate``."""
    from ..checkpoints.consolidating import consolidate

    path = config.model_path.rstrip("/")
    paths = consolidate(path, config.out or storage.split(path)[0] or ".")
    return "\n".join(f"Wrote {each}." for each in paths)
