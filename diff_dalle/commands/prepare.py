"""The commands of ``prepare_data.py``: render the shapes and the emoji world, pack a folder of images, inspect shards,
embed samples, store the latents of a latent cascade.

To add one: a config class, a function of it that returns lines to print, and a line in ``COMMANDS``. Worlds of one's
own have theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import storage
from ..config import Fault, InputError, option, quantity, section, settings
from ..data.accounting import REPORT, report_lines
from ..data.inspection import InspectionConfig, inspect_shards
from ..data.packing import PackingConfig, pack_folder
from ..distributed.cores import usable_cores
from ..distributed.launch import DistributedConfig, launch
from ..embeddings.computing import EmbeddingsConfig, compute_embeddings
from ..images.output import png_bytes
from ..recipes.cascade.stages import LatentRun
from ..recipes.cascade.storing import LatentsConfig, compute_latents
from ..worlds.contract import RenderedWorld
from ..worlds.emoji.world import EmojiConfig, EmojiWorld
from ..worlds.shapes.shards import ShapesWorld
from ..worlds.table import WORLDS
from .command_line import Subcommand
from .sources import import_parts
from .training_kinds import parse_cascade


def rendering(world: type[RenderedWorld]) -> Subcommand:
    """The command of a world that its settings alone make."""
    name, kind = world.name, world.config_class
    fields = {
        "__doc__": f"Rendering {world.title}",
        "__module__": __name__,
        "__annotations__": {"out_dir": str, "processes": int, name: kind},
        "out_dir": option(f"data/{name}", "folder for the shards of its splits, local or remote"),
        "processes": option(0, "rendering processes; 0 = one per core", least=0),
        name: section(kind),
    }

    def run(given: Any) -> list[str]:
        return _written(world(getattr(given, name)), given.out_dir, given.processes or usable_cores())

    return Subcommand(f"Render {world.title} into shards.", settings(type("WorldRun", (), fields)), run)


@settings
class EmojiRun:
    """Rendering the emoji world"""

    out_dir: str = option(
        "data/emoji", "folder for the shards of train and of the held-out names and combinations, local or remote"
    )
    font: str = option("", "color bitmap font; empty = Noto Color Emoji, in the usual folders")
    emoji: EmojiConfig = section(EmojiConfig)


def emoji(run: EmojiRun) -> list[str]:
    return _written(EmojiWorld(run.emoji, run.font), run.out_dir)


def _written(world: RenderedWorld, out_dir: str, processes: int = 1) -> list[str]:
    return [
        f"{storage.join(out_dir, split)}: {quantity(counts['samples'], 'sample')} in "
        f"{quantity(counts['shards'], 'shard')}"
        for split, counts in world.write(out_dir, processes).items()
    ]


def folder(config: PackingConfig) -> list[str]:
    report = pack_folder(config)
    written, shards = quantity(report["written"], "image"), quantity(report["shards"], "shard")
    return [
        f"{config.out_dir}: {written} in {shards}, {report['bytes'] / 1e6:,.1f} MB",
        *report_lines(report),
        f"report: {storage.join(config.out_dir, REPORT)}",
    ]


def inspect(config: InspectionConfig) -> list[str]:
    lines, grid = inspect_shards(config)
    if grid and config.grid:
        storage.write_bytes(config.grid, png_bytes(grid))
        lines = [*lines, f"examples: {config.grid}"]
    return lines


@settings
class EmbeddingsRun:
    """Computing embeddings"""

    embeddings: EmbeddingsConfig = section(EmbeddingsConfig)
    distributed: DistributedConfig = section(DistributedConfig)


def embeddings(run: EmbeddingsRun) -> list[str]:
    with launch(run.distributed) as world:
        lines = compute_embeddings(run.embeddings, world)
    return lines if world.is_main else []


def latents(config: LatentsConfig) -> list[str]:
    run = parse_cascade([config.run])
    if not isinstance(run, LatentRun) or run.kind == "stage_c_controlnet":
        raise InputError(Fault("run", f"is of the kind {run.kind}, but must be of a stage B or C, or a LoRA of one"))
    with launch(run.distributed) as world:
        lines = compute_latents(config, run, world)
    return lines if world.is_main else []


COMMANDS = {
    "shapes": rendering(ShapesWorld),
    "emoji": Subcommand("Render the emoji of a font into shards.", EmojiRun, emoji),
    "folder": Subcommand("Pack a folder of captioned images into shards.", PackingConfig, folder),
    "inspect": Subcommand("Describe the content of shards.", InspectionConfig, inspect),
    "embeddings": Subcommand("Compute the embeddings of all samples in shards.", EmbeddingsRun, embeddings),
    "latents": Subcommand("Compute the latents and embeddings for stages B and C.", LatentsConfig, latents),
}


def commands_of(words: Sequence[str]) -> dict[str, Subcommand]:
    """``COMMANDS``, and one for each world of the modules that a command line imports. InputError for a module that
    cannot be imported, or that the asked world needs."""
    import_parts(words)
    asked = "".join(words[:1])
    if "." in asked and asked not in WORLDS:
        raise InputError(f"the world {asked!r} is not there: {WORLDS.rule(asked)}")
    own = {asked, *WORLDS} - COMMANDS.keys()
    return COMMANDS | {name: rendering(WORLDS[name]) for name in sorted(own) if name in WORLDS}
