"""Training what a recipe describes."""

from __future__ import annotations

import contextlib

from ..checkpoints.run_folder import choose_logdir, open_run
from ..checkpoints.run_lock import RunLock, hold
from ..config import named, redacted, to_dict
from ..data.fingerprint import Fingerprint, check_ranks
from ..data.loader import Loader
from ..distributed.world import World
from ..tracking.tracker import Tracker
from ..tracking.trackers import create_trackers
from ..training.loop import TrainLoop
from .recipe import Recipe
from .spelling import spelled_as_in_file
from .starting import with_loaded, with_streams


def train(recipe: Recipe, world: World) -> None:
    """Train until one of the limits of the run, resuming from its log directory if it holds this run.

    Raises InputError for unusable data and for a log directory that holds another run.
    """
    with spelled_as_in_file(type(recipe.settings)):
        recipe.check(recipe, world)
        world.on_main(recipe.check_packages)
        logdir = world.broadcast(choose_logdir(recipe.training.logdir) if world.is_main else None)
        world.print(f"Logs and checkpoints: {logdir}")
        with hold(logdir) if world.is_main else contextlib.nullcontext() as lock:
            _train(recipe, world, logdir, lock)


def _train(recipe: Recipe, world: World, logdir: str, lock: RunLock | None) -> None:
    if world.is_main:
        recipe.check_folder(logdir)
    session = with_streams(with_loaded(recipe, logdir, world), logdir, world).open(world)
    recipe = session.recipe
    data, held_out = session.both_loaders
    config_class = type(session.settings)
    folder = world.broadcast(open_run(logdir, session.identity(), config_class) if world.is_main else None)
    folder.lock, folder.data = lock, {"data_dir": _fingerprint(data, named("data_dir"), world)}
    if held_out is not None:
        folder.data["val_data_dir"] = _fingerprint(held_out, named("val_data_dir"), world)
    trainees = session.trainees(held_out or data)
    loop = TrainLoop(
        recipe.training,
        trainees,
        data,
        folder,
        world,
        held_out,
        recipe.sample_interval,
        any(saver.save_best_to is not None for saver in recipe.tracking.savers),
        session.frozen,
        session.measure(trainees) if session.measure else None,
        session.exports,
    )
    tracker = Tracker()
    if world.is_main:
        progress = loop.step, loop.total_steps, recipe.epoch_samples or data.samples
        tracker = create_trackers(recipe.tracking, logdir, redacted(to_dict(session.settings)), *progress, session.meta)
    loop.run(tracker)
    world.print(f"Trained for {loop.step:,} steps. Logs and checkpoints: {logdir}")


def _fingerprint(data: Loader, flag: str, world: World) -> Fingerprint:
    """What identifies a loader's shards. InputError when the ranks see different ones."""
    shards = data.collection.shards
    found = Fingerprint.of([each.path for each in shards], [each.size for each in shards], data.collection.counts)
    check_ranks(world, found, flag)
    return found
