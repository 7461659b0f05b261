"""The state in which a run starts: that of a checkpoint, or the first one."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import storage
from ..checkpoints.checkpoint import Identity, check_patterns, check_weights, load_file, networks_in
from ..checkpoints.content import DamagedError, numbered, replaced
from ..checkpoints.run_folder import CheckpointSet, RunFolder, find_set
from ..checkpoints.shards import ShardedFolder
from ..config import Fault, InputError, named, quantity, redact
from ..distributed.parallel import own_rows, place
from ..distributed.world import World
from .settings import TrainingConfig
from .trainee import Trainee

_AVERAGE = re.compile(r"ema_[\d.e-]+")  # a role; not that of an exported file
Contents = Mapping[str, tuple[Mapping[str, Any], str]]  # of files by role, and their paths


@dataclass(eq=False)
class Start:
    """Puts trainees in the state in which a run starts. Rank 0 reads the files and sends their values to the others.

    After ``restore``, ``step`` and ``samples`` count what has been trained.
    """

    config: TrainingConfig
    trainees: Sequence[Trainee]
    run: RunFolder
    world: World
    step: int = 0
    samples: int = 0

    def restore(self) -> None:
        """Resume from the log directory's latest complete checkpoint that can be read, or start as the settings say:
        from another run's checkpoint, from weights, or from nothing.

        Raises InputError when none of them can be read, when the settings name another run's checkpoint although the
        log directory has its own, when data or global batch of a resumed run have changed without consent, and when
        the state does not fit.
        """
        config, run = self.config, self.run
        given = [config.resume_checkpoint] if config.resume_checkpoint else list(config.init_checkpoint)
        given = [_spelled(path) for path in ([run.source] if run.source else given)]
        if run.checkpoints:
            self._check_origin(given)
            self._load_latest()
            return
        if config.resume_checkpoint:
            found = self.world.broadcast(find_set(config.resume_checkpoint) if self.world.is_main else None)
            source, entry = found
            self._load_set(source, entry, is_start=True)
        elif config.init_checkpoint:
            self._start_from_weights(config.init_checkpoint)
        run.started_from = given

    def _check_origin(self, given: Sequence[str]) -> None:
        """InputError when the settings name other files to start from than the run in the log directory did."""
        if not given or self.run.started_from == list(given):
            return
        setting = "resume_checkpoint" if self.config.resume_checkpoint else "init_checkpoint"
        if self.run.started_from is None:  # written by an earlier version
            self.world.print(f"Note: {setting} is not read, because {self.run.path} holds checkpoints.")
            return
        origin = ", ".join(self.run.started_from) or "its own first step"
        raise InputError(
            f"{named(setting)} is {', '.join(given)}, but {self.run.path} holds a run that started from {origin}: "
            f"leave {named(setting)} out to resume it, or choose another {named('logdir')}"
        )

    def _load_latest(self) -> None:
        run, problems = self.run, []
        while run.checkpoints:
            entry = run.checkpoints[-1]
            try:
                self._load_set(run, entry)
            except DamagedError as error:
                problems.append(str(error))
                run.checkpoints.pop()  # in memory; the record keeps it until the next checkpoint
                if run.checkpoints:
                    before = run.checkpoints[-1].step
                    self.world.print(
                        f"Warning: the checkpoint of step {entry.step:,} cannot be used: {error}; falling back to that "
                        f"of step {before:,}"
                    )
                continue
            return
        raise InputError(
            f"{run.path} holds no checkpoint that can be read: {'; '.join(problems)}. Choose another "
            f"{named('logdir')} to start again"
        )

    def _load_set(self, run: RunFolder, entry: CheckpointSet, is_start: bool = False) -> None:
        """Load a checkpoint of this run; or of another one, from which this one starts. DamagedError, on every rank,
        when a file cannot be read."""
        sources = {
            each.name: _sources(each, entry) if is_start else dict(zip(each.roles, each.roles, strict=True))
            for each in self.trainees
        }
        files: dict[str, Contents] = {}
        folder: ShardedFolder | None = None

        def read() -> None:
            nonlocal folder
            self._check_identity(run.identity, run.path)
            for each in self.trainees:
                given = sources[each.name]
                files[each.name] = {
                    role: run.load(entry, each.name, source, not each.is_sharded) for role, source in given.items()
                }
            if entry.folder:
                folder = run.sharded(entry)
            self._check_batch(run, entry, is_start)
            self._check_data(run, entry, is_start)
            for each in self.trainees:
                if files[each.name]:
                    self._check_fits(each, files[each.name], run)

        self.world.on_main(read)
        folder = self.world.broadcast(folder)
        for trainee in self.trainees:
            if sources[trainee.name]:
                share = folder if trainee.is_sharded else None
                self._load(trainee, sources[trainee.name], files.get(trainee.name, {}), share)
        if any("optimizer" in each for each in sources.values()):
            self.step, self.samples = entry.step, entry.samples
        if is_start:
            for trainee in self.trainees:
                self._say_what_is_missing(trainee, sources[trainee.name], entry)
        how, origin = "Starting" if is_start else "Resuming", (is_start and self.run.source) or run.path
        self.world.print(f"{how} at step {self.step:,} ({quantity(self.samples, 'sample')}) of {origin}")

    def _say_what_is_missing(self, trainee: Trainee, given: Mapping[str, str], entry: CheckpointSet) -> None:
        """What of a trainee another run's checkpoint does not hold. given: what it takes from there, by role."""
        name = trainee.name or "the network"
        if not given:
            self.world.print(f"Note: the checkpoint has no {name}, which starts from its initial weights.")
        elif "optimizer" not in given:
            self.world.print(f"Note: the checkpoint has only weights of {name}, whose optimizer starts anew.")
        for role, source in given.items():
            if role != source:
                self.world.print(f"Note: {role} of {name} starts from {source} of step {entry.step:,}.")

    def _check_fits(self, trainee: Trainee, contents: Contents, run: RunFolder) -> None:
        """InputError when states of ``run`` cannot be restored, as those of a network of another size or of another
        timestep sampler, naming the changed settings."""
        try:
            for role, (content, path) in contents.items():
                if role == "optimizer":
                    trainee.check_optimizer(content["state"], path)
                else:
                    check_weights(trainee.task.model, content, path)
        except InputError as error:
            changed = redact(", ".join(self.run.changed_settings(run)))
            if not changed:
                raise
            raise InputError(
                f"{error.message(named)}; settings that differ from those of {self.run.source or run.path}: {changed}: "
                f"give the same, or start a new run from its weights by {named('init_checkpoint')}"
            ) from None

    def _load(
        self, trainee: Trainee, roles: Mapping[str, str], contents: Contents, folder: ShardedFolder | None
    ) -> None:
        """Overwrite a trainee's state. Every rank calls it.

        roles:    those of the states that it takes, by its own.
        contents: of its files by its own roles, on rank 0.
        folder:   where each rank reads its own share of the values instead; None = rank 0 sends them.
        """
        given: dict[str, Any] = {role: content["state"] for role, (content, _) in contents.items()}
        outline = replaced(given["optimizer"], _described) if "optimizer" in given else None
        own = trainee.loadable(self.world.broadcast(outline))
        if folder is not None:
            given = {role: folder.states[trainee.prefix + source] for role, source in roles.items()}
        if given:  # files hold more than is averaged
            given |= {role: {name: given[role][name] for name in state} for role, state in trainee.weights().items()}
        sources = numbered(given)[1]
        for i, target in enumerate(numbered(own)[1]):
            if folder is not None:
                folder.fill(sources[i], *own_rows(target))
            else:
                place(target, sources[i] if sources else None, self.world)
        if "optimizer" in own:
            trainee.load_optimizer(own["optimizer"])

    def _check_batch(self, run: RunFolder, entry: CheckpointSet, is_start: bool) -> None:
        now, processes = self.config.batch_size * self.world.size, self.world.size
        if entry.batch in (0, now):
            return
        if not (is_start or self.config.accept_changed_batch):
            raise InputError(
                f"{run.path} was trained with {quantity(entry.batch, 'sample')} per step, but now a step has {now:,}, "
                f"those of {quantity(processes, 'process')}: set {named('batch_size')} so that it has as many, or "
                f"accept the change by {named('accept_changed_batch')} True"
            )
        self.world.print(f"Note: from here on a step has {quantity(now, 'sample')} instead of {entry.batch:,}.")

    def _check_data(self, run: RunFolder, entry: CheckpointSet, is_start: bool) -> None:
        for name, changed in self.run.changed_data(run, entry).items():
            if name == "data_dir" and not (is_start or self.config.accept_changed_data):
                remedy = f"give the same data, or accept the change by {named('accept_changed_data')} True"
                rule = f"differs from the data of step {entry.step:,} in {run.path}: {changed}. The run would see other"
                raise InputError(Fault(name, f"{rule} samples in another order: {remedy}"))
            self.world.print(f"Note: {name} differs from step {entry.step:,} of {run.path}: {changed}.")

    def _start_from_weights(self, paths: Sequence[str]) -> None:
        """Initialize each trainee from the file that carries its name; in a run of one, from the only file."""
        taken: dict[str, list[str]] = {}
        given: dict[str, Mapping[str, Tensor]] = {}

        def read() -> None:
            exclude = self.config.init_exclude
            found = self._files_of_trainees(paths)
            states = [state for each, file, _ in found for state in (each.task.model.state_dict(), file["state"])]
            check_patterns(exclude, [name for state in states for name in state], ", ".join(paths))
            for each, content, path in found:
                loaded = check_weights(each.task.model, content, path, exclude)
                taken[each.name], given[each.name] = loaded.taken, content["state"]
                self.world.print(f"Starting from the weights of {path}: {loaded}")

        self.world.on_main(read)
        taken = self.world.broadcast(taken)
        for trainee in self.trainees:
            names = taken.get(trainee.name, ())
            for state in trainee.weights().values():
                for name in filter(state.__contains__, names):
                    place(state[name], given[trainee.name][name] if given else None, self.world)

    def _files_of_trainees(self, paths: Sequence[str]) -> list[tuple[Trainee, dict[str, Any], str]]:
        """Each trainee for which there is a file, with the file's content and path."""
        names = ", ".join(repr(trainee.name) for trainee in self.trainees)
        if len(paths) > len(self.trainees):
            networks = quantity(len(self.trainees), "network")
            rule = f"this run trains {networks}: give at most one file for each"
            raise InputError(Fault("init_checkpoint", f"has {len(paths)} files ({', '.join(paths)}), but {rule}"))
        found, remaining = [], {trainee.name: trainee for trainee in self.trainees}
        for path in paths:
            content = load_file(path, values=True)
            self._check_identity(Identity(content["kind"], content["config"], content["tokenizer"]), path)
            parts = networks_in(content, list(remaining))
            if not parts:
                parts = {content["trainee"] if len(self.trainees) > 1 else self.trainees[0].name: content}
            for name, part in parts.items():
                if name not in remaining:
                    rule = f"but this run trains {names}, each of which takes one file"
                    raise InputError(Fault("init_checkpoint", f"{path} holds the trainee {name!r}, {rule}"))
                found.append((remaining.pop(name), part, path))
        return found

    def _check_identity(self, found: Identity, path: str) -> None:
        """InputError when ``path`` holds another kind or was trained with another tokenizer."""
        own = self.run.identity
        if found.kind != own.kind:
            raise InputError(f"{path} holds a {found.kind}, not a {own.kind}")
        if found.tokenizer != own.tokenizer:
            raise InputError(
                f"{path} was trained with tokenizer {found.tokenizer}, this run has {own.tokenizer}: "
                f"set {named('bpe_path')} to match"
            )


def _sources(trainee: Trainee, entry: CheckpointSet) -> dict[str, str]:
    """What a trainee of a run that starts takes from another run's checkpoint: the roles there, by its own. An average
    that is not there starts from one that is, or from the weights; a trainee that is not there, from its initial
    weights."""
    there = {key.removeprefix(trainee.prefix) for key in entry.files if key.startswith(trainee.prefix)}
    if "model" not in there:
        return {}
    instead = min(filter(_AVERAGE.fullmatch, there), default="model")
    found = {role: role if role in there else instead for role in trainee.roles if role != "optimizer"}
    return found | ({"optimizer": "optimizer"} if "optimizer" in there else {})


def _described(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _spelled(path: str) -> str:
    """A file's path as run.json says it: absolute, without secrets."""
    return redact(path if storage.is_remote(path) else os.path.abspath(storage.local_path(path)))
