"""How a run starts: what it loads, and how its data is divided among nodes."""

from __future__ import annotations

from dataclasses import replace

from .. import storage
from ..checkpoints.bundle import is_bundle, restore_bundle
from ..checkpoints.run_folder import find_set, read_run
from ..config import InputError, named
from ..data.order import streams_for
from ..distributed.world import World
from ..tracking.loader import fetch_source, source_path
from .recipe import Recipe


def with_loaded(recipe: Recipe, logdir: str, world: World) -> Recipe:
    """The run with what ``tracking.load`` names: a whole run is put into the log directory, a model becomes
    ``init_checkpoint``. A log directory with checkpoints of its own goes on from these."""
    config, training = recipe.tracking.load, recipe.training
    if config is None or config.load_from is None:
        return recipe
    weights: tuple[str, ...] = ()
    if world.is_main:
        present, folder = read_run(logdir), storage.join(logdir, "loaded")
        if present is not None and (present.checkpoints or present.best):
            if present.started_from:
                weights = (source_path(config, folder),)
        elif present is not None or not config.only_auto_resume:
            path = fetch_source(config, folder, recipe.tracking.wandb_run_path(logdir))
            if is_bundle(path):
                world.print(f"Restored step {restore_bundle(path, logdir):,} of {path}")
            else:
                weights = (path,)
    weights = world.broadcast(weights)
    if not weights:
        return recipe
    if training.init_checkpoint or training.resume_checkpoint:
        others = f"{named('init_checkpoint')} or {named('resume_checkpoint')}"
        raise InputError(f"tracking.load and {others} exclude each other: give one of them")
    return replace(recipe, training=replace(training, init_checkpoint=weights))


def with_streams(recipe: Recipe, logdir: str, world: World) -> Recipe:
    """The run with its number of streams: it follows the number of nodes when a run starts, and then stays the same."""
    streams = recipe.data.streams
    if not streams and world.is_main:
        resumed = read_run(logdir)
        if resumed is None and recipe.training.resume_checkpoint:
            resumed = find_set(recipe.training.resume_checkpoint)[0]
        saved = resumed.identity.config.get("data") if resumed and resumed.checkpoints else None
        known = saved.get("streams") if isinstance(saved, dict) else None
        streams = known if isinstance(known, int) and known > 0 else streams_for(world.nodes)
    streams = world.broadcast(streams)
    if streams % world.nodes:
        world.print(
            f"Note: the {streams} streams of this run are no multiple of its {world.nodes} nodes, so a shard is read "
            "on several of them; results do not depend on it"
        )
    settings = recipe.settings
    recorded = recipe.of(replace(settings, data=replace(settings.data, streams=streams)))
    return replace(recorded, data=replace(recipe.data, streams=streams))
