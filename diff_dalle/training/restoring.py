"""The state in which a run starts: that of a checkpoint, or the first one."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from .. import storage
from ..checkpoints.checkpoint import Identity, check_patterns, check_weights, load_file, load_weights, networks_in
from ..checkpoints.content import DamagedError
from ..checkpoints.run_folder import CheckpointSet, RunFolder, find_set
from ..checkpoints.shards import ShardedFolder
from ..checkpoints.sharing import share_state, share_tensors
from ..distributed.world import World
from ..errors import Fault, InputError, named, quantity, redact
from .settings import TrainingConfig
from .sharded_restoring import contents_of, load_trainee, place_weights
from .trainee import Trainee


class Start:
    """Puts trainees in the state in which a run starts. Rank 0 reads the files and sends their values to the others.

    After ``restore``, ``step`` and ``samples`` count what has been trained.
    """

    def __init__(self, config: TrainingConfig, trainees: Sequence[Trainee], run: RunFolder, world: World):
        self.config, self.trainees, self.run, self.world = config, trainees, run, world
        self.sharded = any(trainee.is_sharded for trainee in trainees)
        self.step = self.samples = 0

    def restore(self) -> None:
        """Resume from the log directory's latest complete checkpoint that can be read, or start as the settings say.

        Raises InputError when none of them can be read, when the settings name another run's checkpoint although the
        log directory has its own, and when data or global batch have changed without consent.
        """
        config, run = self.config, self.run
        given = [config.resume_checkpoint] if config.resume_checkpoint else list(config.init_checkpoint)
        given = [_spelled(path) for path in given]
        if run.checkpoints:
            self._check_origin(given)
            self._load_latest()
            return
        if config.resume_checkpoint:
            found = self.world.broadcast(find_set(config.resume_checkpoint) if self.world.is_main else None)
            self._load_set(*found)
            if changed := self._changed_settings(found[0]):
                self.world.print(f"Note: settings that differ from those of {found[0].path}: {changed}")
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

    def _load_set(self, run: RunFolder, entry: CheckpointSet) -> None:
        """Load a checkpoint of this run or another. DamagedError, on every rank, when a file cannot be read."""
        files: dict[tuple[str, str], tuple[dict[str, Any], str]] = {}
        folder, problem = None, None
        if self.world.is_main:
            self._check_identity(run.identity, run.path)
            try:
                folder = run.sharded(entry) if entry.folder and self.sharded else None
                for trainee in self.trainees:
                    for role in trainee.roles:
                        if folder is not None:  # each rank reads its own share
                            run.key(entry, trainee.name, role)
                        else:
                            files[trainee.name, role] = run.load(entry, trainee.name, role)
            except DamagedError as error:
                problem = str(error)
        problem = self.world.broadcast(problem)
        if problem is not None:
            raise DamagedError(problem)
        if self.world.is_main:
            self._check_batch(run, entry)
            self._check_data(run, entry)
        for trainee in self.trainees:
            state = None
            if trainee.is_sharded:
                self._load_sharded(trainee, run, files, folder)
                continue
            if self.world.is_main:
                content, path = files[trainee.name, "model"]
                load_weights(trainee.task.model, content, path)
                for ema in trainee.emas:
                    content, path = files[trainee.name, ema.role]
                    check_weights(trainee.task.model, content, path)
                    ema.load_state(content["state"])
                content, path = files[trainee.name, "optimizer"]
                state = content["state"]
                self._check_optimizer(trainee, state, path, run)
            self._share_weights(trainee)
            trainee.load_optimizer(share_state(self.world, state))
        self.step, self.samples = entry.step, entry.samples
        self.world.print(f"Resuming at step {self.step:,} ({quantity(self.samples, 'sample')}) of {run.path}")

    def _load_sharded(
        self, trainee: Trainee, run: RunFolder, files: Mapping[tuple[str, str], Any], folder: ShardedFolder | None
    ) -> None:
        """files, folder: on rank 0, the contents of ordinary files by trainee and role, or a sharded checkpoint."""
        contents: dict[str, tuple[dict[str, Any], str]] | None = None
        if self.world.is_main:
            contents = contents_of(folder, trainee) if folder else {}
            contents |= {role: found for (name, role), found in files.items() if name == trainee.name}
            for role, (content, path) in contents.items():
                if role == "optimizer":
                    self._check_optimizer(trainee, content["state"], path, run)
                else:
                    check_weights(trainee.task.model, content, path)
        load_trainee(trainee, contents, self.world.broadcast(folder), self.world)

    def _changed_settings(self, run: RunFolder) -> str:
        return redact(", ".join(self.run.changed_settings(run)))

    def _check_optimizer(self, trainee: Trainee, state: Mapping[str, Any], path: str, run: RunFolder) -> None:
        """InputError when a state of ``run`` cannot be restored, as one of another timestep sampler, naming the changed
        settings."""
        try:
            trainee.check_optimizer(state, path)
        except InputError as error:
            changed = self._changed_settings(run)
            if not changed:
                raise
            raise InputError(
                f"{error.message(named)}; settings that differ from those of {run.path}: {changed}: give the same, or "
                f"start a new run from its weights by {named('init_checkpoint')}"
            ) from None

    def _share_weights(self, trainee: Trainee) -> None:
        share_tensors(self.world, trainee.task.model.state_dict().values())
        for ema in trainee.emas:
            share_tensors(self.world, ema.averages.values())

    def _check_batch(self, run: RunFolder, entry: CheckpointSet) -> None:
        now, processes = self.config.batch_size * self.world.size, self.world.size
        if entry.batch in (0, now):
            return
        if not self.config.accept_changed_batch:
            raise InputError(
                f"{run.path} was trained with {quantity(entry.batch, 'sample')} per step, but now a step has {now:,}, "
                f"those of {quantity(processes, 'process')}: set {named('batch_size')} so that it has as many, or "
                f"accept the change by {named('accept_changed_batch')} True"
            )
        self.world.print(f"Note: from here on a step has {quantity(now, 'sample')} instead of {entry.batch:,}.")

    def _check_data(self, run: RunFolder, entry: CheckpointSet) -> None:
        for name, changed in self.run.changed_data(run, entry).items():
            if name == "data_dir" and not self.config.accept_changed_data:
                remedy = f"give the same data, or accept the change by {named('accept_changed_data')} True"
                rule = f"differs from the data of step {entry.step:,} in {run.path}: {changed}. The run would see other"
                raise InputError(Fault(name, f"{rule} samples in another order: {remedy}"))
            self.world.print(f"Note: {name} differs from step {entry.step:,} of {run.path}: {changed}.")

    def _start_from_weights(self, paths: Sequence[str]) -> None:
        """Initialize each trainee from the file that carries its name; in a run of one, from the only file."""
        exclude = self.config.init_exclude
        taken: dict[str, tuple[list[str], Mapping[str, Any] | None]] = {}
        if self.world.is_main:
            found = self._files_of_trainees(paths)
            own = [trainee.task.model.state_dict() for trainee, _, _ in found]
            names = [name for state in (*own, *(file["state"] for _, file, _ in found)) for name in state]
            check_patterns(exclude, names, ", ".join(paths))
            for trainee, content, path in found:
                if trainee.is_sharded:
                    loaded = check_weights(trainee.task.model, content, path, exclude)
                    taken[trainee.name] = loaded.taken, content["state"]
                else:
                    loaded = load_weights(trainee.task.model, content, path, exclude)
                    for ema in trainee.emas:
                        ema.load_state({**ema.state(), **{key: content["state"][key] for key in loaded.taken}})
                self.world.print(f"Starting from the weights of {path}: {loaded}")
        if self.sharded:
            for name, names in self.world.broadcast({name: names for name, (names, _) in taken.items()}).items():
                trainee = next(each for each in self.trainees if each.name == name)
                place_weights(trainee, names, taken[name][1] if self.world.is_main else None, self.world)
            return
        for trainee in self.trainees:
            self._share_weights(trainee)

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


def _spelled(path: str) -> str:
    """A file's path as run.json says it: absolute, without secrets."""
    return redact(path if storage.is_remote(path) else os.path.abspath(storage.local_path(path)))
