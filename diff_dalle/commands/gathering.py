"""Settings of ``assemble_decoder.py`` and ``consolidate.py``, which make files of several others, and what they do."""

from __future__ import annotations

from collections.abc import Iterator

from .. import storage
from ..config import Fault, InputError, option, settings


@settings
class ConsolidateConfig:
    """Consolidating"""

    model_path: str = option("", "sharded checkpoint: the folder sharded… in a log directory")
    out: str = option("", "output folder; none = beside the checkpoint, where its run would write them")

    def faults(self) -> Iterator[Fault]:
        if not self.model_path:
            yield Fault("model_path", "is required: a sharded checkpoint, the folder sharded… in a log directory")


def consolidate_checkpoint(config: ConsolidateConfig) -> str:
    """Write the files; returns a text about them. InputError as ``consolidate``."""
    from ..checkpoints.shards import consolidate

    path = config.model_path.rstrip("/")
    paths = consolidate(path, config.out or storage.split(path)[0] or ".")
    return "\n".join(f"Wrote {each}." for each in paths)


@settings
class AssembleConfig:
    """Assembling"""

    model_paths: tuple[str, ...] = option(
        (), "checkpoints of the U-Nets of a decoder, ema_….pt or model….pt, in any order; some may hold several"
    )
    out: str = option("decoder.pt", "output file, local or remote; must not exist yet")

    def faults(self) -> Iterator[Fault]:
        if not self.model_paths:
            yield Fault("model_paths", "is required: checkpoints of the U-Nets of a decoder, separated by commas")


def assemble_decoder(config: AssembleConfig) -> str:
    """Write the decoder; returns a text about what was taken. InputError as ``assemble``, and for an existing file."""
    from ..checkpoints.assembling import assemble

    if storage.exists(config.out):
        raise InputError(f"{config.out} exists already: give another file with --out, or remove it")
    return assemble(config.model_paths, config.out)
