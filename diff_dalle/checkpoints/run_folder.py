"""The folder of a run: its settings and its complete checkpoints.

The checkpoint of step 200 is a set of files, ``model000200.pt``, ``ema_0.9999_000200.pt``, ``opt000200.pt``.
``run.json`` names the sets that are complete; it is replaced last, so that a run killed at any moment resumes from a
complete set. Nothing is parsed from file names.
"""

from __future__ import annotations

import fnmatch
import itertools
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from types import MappingProxyType
from typing import Any, BinaryIO

from .. import storage
from ..config import InputError, cut, differences, named
from ..data.fingerprint import Fingerprint, changes
from ..distributed.world import ALONE, World
from .checkpoint import Identity, file_name, is_sharded_folder, load_file, save_file
from .content import DamagedError
from .record import RECORD, CheckpointSet, Record, load_record, save_record
from .run_lock import RunLock
from .shards import ShardedFolder, save_sharded

MAX_LIST = 2**28  # bytes of a list of shards; 10^6 of them have a quarter


def choose_logdir(flag: str, parent: str = "runs") -> str:
    """``--logdir``, else ``OPENAI_LOGDIR``, else a folder in ``./{parent}`` named by the time that does not exist."""
    if given := flag or os.environ.get("OPENAI_LOGDIR", ""):
        return given
    name = os.path.join(parent, f"{datetime.now():%Y%m%d-%H%M%S}")
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(each for each in names if not os.path.exists(each))


@dataclass
class RunFolder(Record):
    """A log directory with its record.

    data:         the present shards, by "data_dir" and "val_data_dir"; checkpoints say which ones they were trained on.
    lock:         checked before anything is written.
    config_class: of the identity's config; None in a folder that is only read.
    source:       what it starts from, where that is not a file of its settings; "" = these say it.
    batch:        samples per step, those of all processes.
    keep:         > 0: a new checkpoint drops all but so many and those of the steps for which ``is_backup(step)``.
    """

    path: str = ""
    data: dict[str, Fingerprint] = field(default_factory=dict)
    lock: RunLock | None = None
    config_class: type | None = None
    source: str = ""
    batch: int = 0
    keep: int = 0
    is_backup: Callable[[int], bool] | None = None

    def write_record(self) -> None:
        save_record(self.path, self)

    def key(self, entry: CheckpointSet, trainee: str, role: str) -> str:
        """What a set calls the state of a trainee in a role. InputError when it has none."""
        key = f"{trainee}/{role}" if trainee else role
        if key not in entry.files:
            raise InputError(f"the checkpoint of step {entry.step} in {self.path} has no {key}")
        return key

    def load(self, entry: CheckpointSet, trainee: str, role: str, values: bool = True) -> tuple[dict[str, Any], str]:
        """The content and path of one file of a set; of a sharded one, what the file would hold. InputError when there
        is none for this trainee and role, DamagedError when it cannot be read.

        values: False = tensors of a sharded set are on the meta device.
        """
        key = self.key(entry, trainee, role)
        if entry.folder:
            folder = self.sharded(entry)
            state = folder.read(key, self.path) if values else folder.outline(key)
            return {**folder.content, "role": role.partition("_")[0], "state": state}, folder.path
        path = storage.join(self.path, entry.files[key])
        content = load_file(path, (role.partition("_")[0],), values=True)
        if content["trainee"] not in ("", trainee):  # files of earlier versions carry no name
            raise InputError(f"{path} belongs to the trainee {content['trainee']!r}, not to {trainee!r}")
        return content, path

    def save(
        self,
        step: int,
        samples: int,
        states: Mapping[str, dict],
        exports: Mapping[str, Callable[[BinaryIO], object]] = MappingProxyType({}),
        world: World | None = None,
    ) -> None:
        """Write a complete set.

        states:  state dicts by role.
        exports: further files of the set, by ROLE.EXTENSION: functions that write them.
        world:   its ranks write a sharded set (see shards.py), and every rank calls this; None = files, by this process
                 alone. InputError, on all ranks, when one of them cannot write.
        """
        ranks = world or ALONE
        ranks.on_main(self._check_lock)
        entry = CheckpointSet(step, samples, {key: file_name(key, step) for key in states}, self.batch)
        if world is not None:
            entry.folder = f"sharded{step:06d}"
            save_sharded(storage.join(self.path, entry.folder), states, world, self.identity, step, samples)
            states = {}
        for key, state in states.items():
            trainee, _, role = key.rpartition("/")
            save_file(storage.join(self.path, entry.files[key]), role, self.identity, step, samples, state, trainee)
        for key, write in exports.items():
            stem, _, extension = key.replace("/", "_").rpartition(".")
            entry.files[key] = f"{stem}{step:06d}.{extension}"
            with storage.atomic_writer(storage.join(self.path, entry.files[key])) as file:
                write(file)
        ranks.on_main(lambda: self._add(entry))

    def _add(self, entry: CheckpointSet) -> None:
        """Record a checkpoint whose files are complete, and drop those that are not kept."""
        entry.data = self._save_data()
        checkpoints = [*(each for each in self.checkpoints if each.step < entry.step), entry]
        latest = checkpoints[-self.keep :]
        backups = [each for each in checkpoints if self.is_backup is not None and self.is_backup(each.step)]
        self.checkpoints = [each for each in checkpoints if each in latest or each in backups]
        self.write_record()
        kept = {name for each in self.checkpoints for name in each.files.values()}
        for old in checkpoints:
            if old not in self.checkpoints:
                self._remove(old, {*old.files.values()} - kept)

    def _remove(self, entry: CheckpointSet, names: Iterable[str]) -> None:
        """Remove some files of a set, and its folder."""
        for name in names:
            _remove(storage.join(self.path, name))
        if entry.folder:
            storage.remove_folder(storage.join(self.path, entry.folder))

    def sharded(self, entry: CheckpointSet) -> ShardedFolder:
        """The folder of a sharded checkpoint. DamagedError when it cannot be read."""
        folder = ShardedFolder(storage.join(self.path, entry.folder))
        missing = entry.files.keys() - folder.states.keys()
        if missing or folder.content["step"] != entry.step:
            raise DamagedError(f"{folder.path} is not the checkpoint of step {entry.step:,} of {self.path}")
        return folder

    def _check_lock(self) -> None:
        if self.lock is not None:
            self.lock.check()

    def _save_data(self) -> dict[str, dict[str, str]]:
        """What a checkpoint says about the present shards. Their lists are files of their own, one for each state of
        the data, since a list may be long."""
        known = {each["digest"] for entry in self.checkpoints for each in entry.data.values()}
        for shards in self.data.values():
            if shards.digest not in known:
                path = storage.join(self.path, _list_name(shards.digest))
                storage.write_bytes(path, shards.text().encode())
        return {name: {"digest": each.digest, "totals": each.totals} for name, each in self.data.items()}

    def names_of(self, entry: CheckpointSet) -> list[str]:
        """The files of a complete checkpoint, with its lists of shards."""
        return [*entry.files.values(), *(_list_name(each["digest"]) for each in entry.data.values())]

    def changed_settings(self, other: RunFolder) -> list[str]:
        """``name (other's → own)`` for each setting that is not free and differs from another run's."""
        assert self.config_class is not None  # a run is opened with one
        return differences(other.identity.config, self.identity.config, self.config_class)

    def begin(self) -> None:
        """Record a new run before its first checkpoint, so that the record's absence beside one means a loss."""
        if not self.checkpoints:
            self.write_record()

    def changed_data(self, run: RunFolder, entry: CheckpointSet) -> dict[str, str]:
        """What differs between the present shards and those of a checkpoint, by "data_dir" and "val_data_dir"; nothing
        for data that are equal, or of which one of the two knows nothing.

        run: the folder of the checkpoint ``entry``.
        """
        found = {}
        for name, now in self.data.items():
            then = entry.data.get(name)
            if then is None or then["digest"] == now.digest:
                continue
            old = run._read_list(then["digest"])
            found[name] = changes(old, now) if old else f"{cut(then['totals'])} before, {now.totals} now"
        return found

    def _read_list(self, digest: str) -> Fingerprint | None:
        """A list that ``save`` wrote, None when it is missing or damaged."""
        path = storage.join(self.path, _list_name(digest))
        if not storage.exists(path):
            return None
        try:
            found = Fingerprint.parse(storage.read_bytes(path, 0, MAX_LIST).decode())
        except (ValueError, RecursionError):
            return None
        return found if found.digest == digest else None

    def is_best(self, trainee: str, loss: float) -> bool:
        """Whether a held-out loss is the trainee's lowest so far. NaN never is."""
        return loss < self.best.get(trainee, {"loss": math.inf})["loss"]

    def keep_best(self, trainee: str, step: int, samples: int, loss: float, state: Mapping, role: str) -> None:
        """Write the weights ``state``, of ``role`` model or ``ema_RATE``, with the lowest held-out loss so far, as
        best.pt (TRAINEE_best.pt in a run of several)."""
        self._check_lock()
        path = storage.join(self.path, best_file(trainee))
        save_file(path, role, self.identity, step, samples, state, trainee)
        self.best[trainee] = {"step": step, "loss": loss}
        self.write_record()


def _list_name(digest: str) -> str:
    return f"data-{digest[:16]}.jsonl"


def best_file(trainee: str) -> str:
    """The name of the file with a trainee's best weights."""
    return f"{trainee}_best.pt" if trainee else "best.pt"


def read_run(path: str) -> RunFolder | None:
    """The run recorded in a folder, or None when there is none. Raises InputError for a damaged record."""
    saved = load_record(path)
    return RunFolder(**vars(saved), path=path) if saved else None


def discard_run(path: str) -> None:
    """Remove the run recorded in a folder: its checkpoints, its best weights, its lists of shards, and then its
    record. Nothing else."""
    run = read_run(path)
    if run is None:
        return
    for entry in run.checkpoints:
        run._remove(entry, run.names_of(entry))
    for trainee in run.best:
        _remove(storage.join(path, best_file(trainee)))
    _remove(storage.join(path, RECORD))


def _remove(path: str) -> None:
    if storage.exists(path):  # unless somebody removed it by hand
        storage.remove(path)


def open_run(path: str, identity: Identity, config_class: type, anew: bool = False) -> RunFolder:
    """The folder of a run: a new one, or one in which the same run is resumed. ``begin`` records it.

    anew: as if no run were recorded there.

    Raises InputError when the folder holds a run whose settings differ in more than the free ones, and when it holds
    the optimizer's states of a run but no record of it.
    """
    storage.make_dirs(path)
    saved = read_run(path)
    if saved is None:
        names = fnmatch.filter([storage.split(each)[1] for each in storage.list_files(path)], "*opt??????*.pt")
        if names:
            raise InputError(
                f"{path} holds {names[-1]} of a run, but no {RECORD}, without which that run cannot be resumed: "
                f"restore it, or choose another {named('logdir')}"
            )
    if saved is None or anew or not (saved.checkpoints or saved.best):
        return RunFolder(identity, path=path, config_class=config_class)
    if saved.identity.kind != identity.kind:
        raise InputError(
            f"{path} holds a run of a {saved.identity.kind}, not of a {identity.kind}: choose another {named('logdir')}"
        )
    changed = differences(saved.identity.config, identity.config, config_class)
    if saved.identity.tokenizer != identity.tokenizer:
        changed.append(f"tokenizer ({saved.identity.tokenizer} → {identity.tokenizer})")
    if changed:
        raise InputError(
            f"{path} holds a run with other settings: {', '.join(changed)}; give the settings it was started with, or "
            f"choose another {named('logdir')}, where a run can start from its checkpoint: {named('resume_checkpoint')}"
        )
    saved.identity, saved.config_class = identity, config_class
    return saved


def find_set(path: str) -> tuple[RunFolder, CheckpointSet]:
    """The complete checkpoint that the file ``path`` belongs to, for ``--resume_checkpoint``."""
    path = path.rstrip("/")
    sharded = is_sharded_folder(path)
    content = ShardedFolder(path).content if sharded else load_file(path, roles=("model", "ema", "optimizer"))
    run = read_run(os.path.dirname(path) or ".")
    if run is None:
        raise InputError(
            f"there is no {RECORD} beside {path}, so its optimizer state is unknown and its run cannot be resumed: use "
            f"{named('init_checkpoint')} to start a new run from these weights"
        )
    for entry in run.checkpoints:
        if entry.step == content["step"]:
            return run, entry
    raise InputError(f"{path} is of step {content['step']}, but {run.path} has no complete checkpoint of that step")
