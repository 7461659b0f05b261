"""How a run starts: what it loads, and how its data is divided among nodes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

from .. import storage
from ..checkpoints.bundle import is_bundle, restore_bundle
from ..checkpoints.run_folder import RunFolder, find_set, read_run
from ..config import InputError, named
from ..data.order import streams_for
from ..distributed.world import World
from ..tracking.loader import fetch_source, source_path
from .recipe import Recipe


@dataclass(frozen=True)
class Origin:
    """What of ``tracking.load`` a run starts from.

    path:     the file that the settings name, or its copy; "" = none.
    unpacked: a folder with the run that the file holds, for as long as it is read; "" = it holds none.
    is_past:  the run goes on from checkpoints of its own. The file, which need not be there any more, is read for
              networks that are not trained and that checkpoints of earlier versions do not hold.
    """

    path: str = ""
    unpacked: str = ""
    is_past: bool = False

    def of(self, recipe: Recipe) -> Recipe:
        """The run that starts from it: from a checkpoint, or from weights."""
        if not self.path:
            return recipe
        training = recipe.training
        if training.init_checkpoint or training.resume_checkpoint:
            others = f"{named('init_checkpoint')} or {named('resume_checkpoint')}"
            raise InputError(f"tracking.load and {others} exclude each other: give one of them")
        if self.is_past and (not storage.exists(self.path) or is_bundle(self.path)):
            return recipe
        run = read_run(self.unpacked) if self.unpacked else None
        if run is None:
            return replace(recipe, training=replace(training, init_checkpoint=(self.path,)))
        first = next(iter(run.checkpoints[-1].files.values()))
        return replace(recipe, training=replace(training, resume_checkpoint=storage.join(self.unpacked, first)))

    def is_moved(self, run: RunFolder) -> bool:
        """Whether it is the same run as ``run``, whose settings it has but for free ones, in another place."""
        found = read_run(self.unpacked) if self.unpacked else None
        return found is not None and not run.changed_settings(found)


@contextlib.contextmanager
def arriving(recipe: Recipe, present: RunFolder | None, logdir: str, world: World) -> Iterator[Origin]:
    """What ``tracking.load`` names, for a log directory without checkpoints; others go on from their own.

    present: the run in the log directory. A run that arrives is unpacked into a folder there, which is gone after the
    block; a download of weights only if the block fails, as it does where the run is refused.
    """
    config, folder = recipe.tracking.load, storage.join(logdir, "loaded")
    if config is None or config.load_from is None:
        yield Origin()
        return
    origin, unpacked = Origin(), storage.join(folder, "run")
    done = False
    try:
        if world.is_main:
            if present is not None and (present.checkpoints or present.best):
                origin = Origin(source_path(config, folder) if present.started_from else "", is_past=True)
            elif present is not None or not config.only_auto_resume:
                path = fetch_source(config, folder, recipe.tracking.wandb_run_path(logdir))
                origin = Origin(path, unpacked if is_bundle(path) else "")
                if origin.unpacked:
                    restore_bundle(path, unpacked)
            else:
                world.print("Note: no earlier session of this run is there, so nothing is loaded (only_auto_resume).")
        yield world.broadcast(origin)
        done = True
    finally:
        if world.is_main and (origin.unpacked or not (done or present)):
            storage.remove_folder(folder)


def with_streams(recipe: Recipe, present: RunFolder | None, world: World) -> Recipe:
    """The run with its number of streams: it follows the number of nodes when a run starts, and then stays the same.

    present: the run in its log directory.
    """
    streams = recipe.data.streams
    if not streams and world.is_main:
        resumed = present
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
