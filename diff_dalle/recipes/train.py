"""Training what a recipe describes."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from ..checkpoints.bundle import copy_history
from ..checkpoints.run_folder import choose_logdir, discard_run, find_set, open_run, read_run
from ..checkpoints.run_lock import RunLock, hold
from ..config import named, quantity, redact, redacted, setting_changes, spelled, to_dict
from ..data.fingerprint import Fingerprint, check_ranks
from ..data.loader import Loader
from ..distributed.launch import launch
from ..distributed.world import World
from ..evaluation.report import Table
from ..tracking.tracker import Tracker
from ..tracking.trackers import create_trackers
from ..training.loop import TrainLoop
from .recipe import Recipe, Session
from .spelling import spelled_as_in_file, spelling_of
from .starting import Origin, arriving, with_streams


def launch_training(settings: Any) -> str:
    """Train what the settings of a run describe, in all processes of this job. Returns the log directory; errors as
    ``train_recipe``."""
    with launch(settings.recipe().distributed) as world:
        return train_recipe(settings.recipe(world.size), world)


def train_recipe(recipe: Recipe, world: World) -> str:
    """Train until one of the limits of the run, resuming from its log directory if it holds this run. Returns that.

    Raises InputError for unusable data and for a log directory that holds another run.
    """
    with spelled_as_in_file(type(recipe.settings)):
        recipe.check(recipe, world)
        world.on_main(recipe.check_packages)
        logdir = world.broadcast(choose_logdir(recipe.training.logdir) if world.is_main else None)
        with hold(logdir) if world.is_main else contextlib.nullcontext() as lock:
            _train(recipe, world, logdir, lock)
    return logdir


def _train(recipe: Recipe, world: World, logdir: str, lock: RunLock | None) -> None:
    is_replaced = world.broadcast(recipe.is_replaced(logdir) if world.is_main else None)
    present = None if is_replaced or not world.is_main else read_run(logdir)
    with arriving(recipe, present, logdir, world) as origin:
        recipe = with_streams(origin.of(replace(recipe, present=world.broadcast(present))), present, world)
        session = recipe.open(world)
        loop = _loop(session, origin, is_replaced, logdir, world)
        if world.is_main:
            if is_replaced:
                discard_run(logdir)
            loop.run_folder.lock = lock
            loop.run_folder.begin()
            if origin.is_moved(loop.run_folder):
                copy_history(origin.unpacked, logdir)
    recipe, data = session.recipe, loop.data
    world.print(_introduction(loop, logdir, world))
    tracker = Tracker()
    if world.is_main:
        progress = loop.step, loop.total_steps, recipe.epoch_samples or data.samples
        tracker = create_trackers(recipe.tracking, logdir, redacted(to_dict(session.settings)), *progress, session.meta)
    loop.run(tracker)
    loss = "" if math.isnan(loop.last_loss) else f"; the last loss was {loop.last_loss:.3g}"
    world.print(f"Trained for {loop.step:,} steps{loss}. Logs and checkpoints: {logdir}")


def _loop(session: Session, origin: Origin, is_replaced: bool, logdir: str, world: World) -> TrainLoop:
    """The loop of a run in the state in which it starts. Nothing is written yet: InputError for whatever does not
    suit."""
    recipe = session.recipe
    data, held_out = session.both_loaders
    opening = logdir, session.identity(), type(session.settings), is_replaced
    folder = world.broadcast(open_run(*opening) if world.is_main else None)
    folder.source, folder.data = origin.path, {"data_dir": _fingerprint(data, named("data_dir"), world)}
    if held_out is not None:
        folder.data["val_data_dir"] = _fingerprint(held_out, named("val_data_dir"), world)
    if world.is_main:
        _say_changes(recipe, session.identity().config)
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
    if loop.is_finished:
        limit = spelled(named("iterations"), spelling_of(type(recipe.settings)))
        world.print(f"Note: nothing is left to train after step {loop.step:,}: raise {limit}.")
    return loop


def _introduction(loop: TrainLoop, logdir: str, world: World) -> str:
    """What is trained on what, in a line each."""
    config, shards = loop.config, len(loop.data.collection.shards)
    networks = (f"{each.prefix}{each.trained_parameters:,} in {each.precision}" for each in loop.trainees)
    threads = f", {quantity(torch.get_num_threads(), 'thread')}" if world.device.type == "cpu" else ""
    processes = f" in {world.size} processes" if world.size > 1 else ""
    total, done = loop.total_steps, f"; {loop.step:,} are done" if loop.step else ""
    many = f"{total:,}" if total is not None else f"as many as {config.hours:g} hours allow"
    lines = {
        "parameters": ", ".join(networks),
        "data": f"{quantity(loop.data.samples, 'sample')} in {quantity(shards, 'shard')}",
        "device": f"{world.device}{threads}{processes}",
        "steps": f"{many}, of {quantity(config.batch_size * world.size, 'sample')} each{done}",
        "logdir": logdir,
    }
    return "\n".join(f"{name + ':':12}{text}" for name, text in lines.items())


def _say_changes(recipe: Recipe, config: Mapping[str, Any]) -> None:
    """Print the settings that differ from those of the checkpoint that the run goes on or starts from."""
    run, path = recipe.present, recipe.training.resume_checkpoint
    if run is None or not run.checkpoints:
        run = find_set(path)[0] if path else None
    rows = setting_changes(run.identity.config, config, type(recipe.settings)) if run else ()
    if rows:
        table = Table(["setting", "checkpoint", "now"], [[each.name, each.before, each.now] for each in rows])
        print(redact(f"Settings that differ from those of the checkpoint:\n{table.markdown(aligned=True)}"), flush=True)


def _fingerprint(data: Loader, flag: str, world: World) -> Fingerprint:
    """What identifies a loader's shards. InputError when the ranks see different ones."""
    shards = data.collection.shards
    found = Fingerprint.of([each.path for each in shards], [each.size for each in shards], data.collection.counts)
    check_ranks(world, found, flag)
    return found
