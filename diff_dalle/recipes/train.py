"""Training what a recipe describes: what a run loads when it starts, how nodes divide its data, and its loop."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from .. import storage
from ..checkpoints.bundle import copy_history, is_bundle, restore_bundle
from ..checkpoints.run_folder import RunFolder, choose_logdir, discard_run, find_set, open_run, read_run
from ..checkpoints.run_lock import RunLock, hold
from ..config import InputError, named, quantity, redact, redacted, setting_changes, spelled, to_dict
from ..data.fingerprint import Fingerprint, check_ranks
from ..data.loader import Loader
from ..data.order import streams_for
from ..distributed.launch import launch
from ..distributed.world import World
from ..evaluation.report import Table
from ..tracking.loader import fetch_source, source_path
from ..tracking.tracker import Tracker
from ..tracking.trackers import create_trackers
from ..training.loop import TrainLoop
from .recipe import Recipe, Session, spelled_as_in_file, spelling_of


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
