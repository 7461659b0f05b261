"""The commands of ``prepare_data.py``: render the shapes world, pack a folder of images, inspect shards, embed samples.

To add one: a config class, a function of it that returns lines to print, and a line in ``COMMANDS``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .. import storage
from ..config import option, section
from ..data.inspection import InspectionConfig, inspect_shards
from ..data.packing import REPORT, PackingConfig, pack_folder
from ..distributed.launch import DistributedConfig, launch
from ..embeddings.computing import EmbeddingsConfig, compute_embeddings
from ..errors import quantity
from ..images.output import png_bytes
from ..shapes.scenes import ShapesConfig
from ..shapes.shards import write_shapes


@dataclass(frozen=True)
class ShapesRun:
    """Rendering the shapes world"""

    out_dir: str = option("data/shapes", "folder for the shards of the splits train and val, local or remote")
    shapes: ShapesConfig = section(ShapesConfig)


def shapes(run: ShapesRun) -> list[str]:
    return [
        f"{storage.join(run.out_dir, split)}: {quantity(counts['samples'], 'sample')} in "
        f"{quantity(counts['shards'], 'shard')}"
        for split, counts in write_shapes(run.shapes, run.out_dir).items()
    ]


def folder(config: PackingConfig) -> list[str]:
    report = pack_folder(config)
    written, shards = quantity(report["written"], "image"), quantity(report["shards"], "shard")
    return [
        f"{config.out_dir}: {written} in {shards}, {report['bytes'] / 1e6:,.1f} MB",
        *(f"skipped {quantity(count, 'image')}: {reason}" for reason, count in report["skipped"].items()),
        f"report: {storage.join(config.out_dir, REPORT)}",
    ]


def inspect(config: InspectionConfig) -> list[str]:
    lines, grid = inspect_shards(config)
    if grid and config.grid:
        storage.write_bytes(config.grid, png_bytes(grid))
        lines = [*lines, f"examples: {config.grid}"]
    return lines


@dataclass(frozen=True)
class EmbeddingsRun:
    """Computing embeddings"""

    embeddings: EmbeddingsConfig = section(EmbeddingsConfig)
    distributed: DistributedConfig = section(DistributedConfig)


def embeddings(run: EmbeddingsRun) -> list[str]:
    with launch(run.distributed) as world:
        lines = compute_embeddings(run.embeddings, world)
    return lines if world.is_main else []


@dataclass(frozen=True)
class Command:
    """config: class of its settings; run: does the work, returns lines to print."""

    description: str
    config: type
    run: Callable[[Any], list[str]]


COMMANDS = {
    "shapes": Command("Render the shapes world into shards.", ShapesRun, shapes),
    "folder": Command("Pack a folder of captioned images into shards.", PackingConfig, folder),
    "inspect": Command("Describe the content of shards.", InspectionConfig, inspect),
    "embeddings": Command("Compute the embeddings of all samples of shards.", EmbeddingsRun, embeddings),
}
