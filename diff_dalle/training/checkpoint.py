"""Checkpoints that explain themselves, and the folder of a run.

A checkpoint of step 200 is a set of files, ``model000200.pt``, ``ema_0.9999_000200.pt``, ``opt000200.pt``. Each
carries its format, role, step, samples, resolved config and tokenizer identity, is written under a temporary name and
renamed, and is plain data (``torch.load(weights_only=True)``). ``run.json`` names the sets that are complete; it is
replaced last, so a kill at any moment leaves a run that continues from a complete set. Nothing is read from names.
"""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

import torch
from torch import nn

from .. import storage
from ..config import differences, load_mapping
from ..errors import InputError

FORMAT = 1
RECORD = "run.json"
ROLES = {"model": "a model's weights", "ema": "averaged weights", "optimizer": "an optimizer's state"}


@dataclass(frozen=True)
class Identity:
    """What every file of a run says about where it comes from.

    kind:      what the model is, such as "generator".
    config:    the run's resolved settings, a nested dict of plain values.
    tokenizer: identity of the tokenizer whose ids the model understands; None without text.
    """

    kind: str
    config: dict
    tokenizer: str | None = None


def save_file(path: str, role: str, identity: Identity, step: int, samples: int, state: dict) -> None:
    """Write one checkpoint file atomically: whole, or the previous one stays. InputError for a full disk, say.

    role: model, optimizer, or ema_RATE, which the file calls ema.
    """
    about = {"format": FORMAT, "role": role.partition("_")[0], "step": step, "samples": samples, **asdict(identity)}
    with storage.atomic_writer(path) as file:
        torch.save(_canonical({**about, "state": state}), file)


def _canonical(value):
    """The same values in fresh plain containers with interned strings.

    A pickle's bytes depend on which equal objects are one object; that differs between a run and its continuation,
    whose files must be the same bit for bit.
    """
    if isinstance(value, Mapping):
        return {_canonical(key): _canonical(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_canonical(item) for item in value]
    return sys.intern(value) if type(value) is str else value


def load_file(path: str, roles: tuple[str, ...] = ("model", "ema"), map_location="cpu") -> dict:
    """Read a checkpoint file: a dict with format, role, step, samples, kind, config, tokenizer and state.

    Local files are memory-mapped, so looking at one costs little. Raises InputError when the file is missing, cut
    short, not one of ours, or has none of the wanted ``roles``.
    """
    if not storage.exists(path):
        raise InputError(f"checkpoint {path} does not exist")
    local = not storage.is_remote(path)
    if local:
        storage.open_read(path).close()  # a folder, or a file that may not be read, is called so
    source = storage.local_path(path) if local else io.BytesIO(storage.read_bytes(path))
    try:
        content = torch.load(source, map_location=map_location, weights_only=True, mmap=local)
    except (RuntimeError, EOFError, ValueError, OSError, zipfile.BadZipFile, pickle.UnpicklingError):
        raise InputError(f"{path} is cut short or is not a PyTorch file of plain tensors") from None
    if not isinstance(content, dict) or not {"format", "role", "kind", "state"} <= content.keys():
        raise InputError(f"{path} was not written by diff_dalle: it does not say what model it holds")
    if content["format"] > FORMAT:
        raise InputError(f"{path} has format {content['format']}, newer than this version reads ({FORMAT}); update")
    if content["role"] not in roles:
        wanted = " or ".join(ROLES[role] for role in roles)
        raise InputError(
            f"{path} holds {ROLES.get(content['role'], content['role'])}, but {wanted} is needed here "
            f"({'give model….pt or ema_….pt' if 'model' in roles else 'give opt….pt'})"
        )
    return content


def check_weights(module: nn.Module, content: Mapping, path: str) -> None:
    """InputError with the first difference unless a loaded file's weights fit ``module``, which may be on "meta"."""
    own, given = module.state_dict(), content["state"]
    for name in [*own, *given]:
        if name not in given or name not in own:
            problem = f"has {'no' if name not in given else 'an extra'} {name}"
        elif own[name].shape != given[name].shape:
            problem = f"has {name} of shape {tuple(given[name].shape)} where {tuple(own[name].shape)} is needed"
        else:
            continue
        raise InputError(f"{path} does not fit this model: it {problem}; its settings differ from the ones asked for")


def load_weights(module: nn.Module, content: Mapping, path: str) -> None:
    """Copy a loaded file's weights into ``module``; InputError with the first difference if they do not fit."""
    check_weights(module, content, path)
    module.load_state_dict(content["state"])


def choose_logdir(flag: str) -> str:
    """``--logdir``, else ``OPENAI_LOGDIR``, else a fresh folder under the system's temporary one."""
    return flag or os.environ.get("OPENAI_LOGDIR", "") or tempfile.mkdtemp(prefix="diff_dalle-")


@dataclass
class CheckpointSet:
    """A complete checkpoint: file names by role, relative to the run's folder. EMA roles are ``ema_RATE``."""

    step: int
    samples: int
    files: dict[str, str]


@dataclass
class RunFolder:
    """A log directory, what is being run in it, and its complete checkpoints, oldest first.

    best: step and held-out loss of the best weights kept, by trainee's name.
    """

    path: str
    identity: Identity
    checkpoints: list[CheckpointSet] = field(default_factory=list)
    best: dict[str, dict[str, float]] = field(default_factory=dict)

    def write_record(self) -> None:
        entries = [asdict(entry) for entry in self.checkpoints]
        record = {**asdict(self.identity), "checkpoints": entries, "best": self.best}
        with storage.atomic_writer(storage.join(self.path, RECORD)) as file:
            file.write(json.dumps(record, indent=1, ensure_ascii=False).encode())

    def file(self, entry: CheckpointSet, role: str) -> str:
        if role not in entry.files:
            raise InputError(f"the checkpoint of step {entry.step} in {self.path} has no {role}")
        return storage.join(self.path, entry.files[role])

    def save(self, step: int, samples: int, states: Mapping[str, dict], keep: int = 0) -> CheckpointSet:
        """Write a complete set. ``states`` maps roles (``model``, ``ema_RATE``, ``optimizer``, perhaps with a prefix
        per trainee, ``NAME/model``) to state dicts. ``keep`` > 0 removes all but the latest ``keep`` sets.
        """
        files = {}
        for role, state in states.items():
            prefix, _, short = role.rpartition("/")
            stem = {"model": "model", "optimizer": "opt"}.get(short, f"{short}_")
            files[role] = f"{prefix + '_' if prefix else ''}{stem}{step:06d}.pt"
            save_file(storage.join(self.path, files[role]), short, self.identity, step, samples, state)
        entry = CheckpointSet(step, samples, files)
        self.checkpoints = [other for other in self.checkpoints if other.step < step] + [entry]
        dropped = self.checkpoints[:-keep] if keep > 0 else []
        self.checkpoints = self.checkpoints[len(dropped) :]
        self.write_record()
        for old in dropped:
            for path in (storage.join(self.path, name) for name in old.files.values()):
                if storage.exists(path):  # else someone has made room by hand
                    storage.remove(path)
        return entry

    def keep_best(self, name: str, step: int, samples: int, loss: float, state: dict, role: str) -> None:
        """Write the weights ``state``, of ``role`` model or ``ema_RATE``, as best.pt (NAME_best.pt for a named trainee)
        if their held-out loss is the lowest so far."""
        if not loss < self.best.get(name, {"loss": math.inf})["loss"]:  # NaN is never the lowest
            return
        path = storage.join(self.path, f"{name}_best.pt" if name else "best.pt")
        save_file(path, role, self.identity, step, samples, state)
        self.best[name] = {"step": step, "loss": loss}
        self.write_record()


def read_run(path: str) -> RunFolder | None:
    """The run recorded in a folder, or None when there is none."""
    record = storage.join(path, RECORD)
    if not storage.exists(record):
        return None
    saved = load_mapping(storage.read_text(record), record)
    try:
        identity = Identity(saved["kind"], saved["config"], saved["tokenizer"])
        return RunFolder(path, identity, [CheckpointSet(**entry) for entry in saved["checkpoints"]],
                         dict(saved.get("best", {})))  # fmt: skip
    except (KeyError, TypeError):
        raise InputError(f"{record} is damaged or was not written by diff_dalle; choose another --logdir") from None


def open_run(path: str, identity: Identity, config_class: type) -> RunFolder:
    """The folder for a run: a new one, or the same run to be continued.

    Raises InputError when the folder holds a run whose settings differ in more than the free ones.
    """
    storage.make_dirs(path)
    saved = read_run(path)
    if saved is None:
        return RunFolder(path, identity)
    if saved.identity.kind != identity.kind:
        raise InputError(
            f"{path} holds a run of a {saved.identity.kind}, not of a {identity.kind}; choose another --logdir"
        )
    changed = differences(saved.identity.config, identity.config, config_class)
    if saved.identity.tokenizer != identity.tokenizer:
        changed.append(f"tokenizer ({saved.identity.tokenizer} → {identity.tokenizer})")
    if changed:
        raise InputError(
            f"{path} holds a run with other settings: {', '.join(changed)}; choose another --logdir, or give the "
            "settings it was started with"
        )
    return RunFolder(path, identity, saved.checkpoints, saved.best)


def changed_settings(old: Mapping, new: Mapping) -> list[str]:
    """``name (old → new)`` for every setting of two nested configs that differs."""
    changed = []
    for name in dict.fromkeys([*old, *new]):
        before, after = old.get(name), new.get(name)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            changed += changed_settings(before, after)
        elif before != after:
            changed.append(f"{name} ({before} → {after})")
    return changed


def find_set(path: str) -> tuple[RunFolder, CheckpointSet]:
    """The complete checkpoint that the file ``path`` belongs to, for ``--resume_checkpoint``."""
    content = load_file(path, roles=("model", "ema", "optimizer"))
    run = read_run(os.path.dirname(path) or ".")
    if run is None:
        raise InputError(
            f"{path} lies alone: its folder has no {RECORD} that names the optimizer's state, so the run cannot be "
            "continued; use --init_checkpoint to start a new run from these weights"
        )
    for entry in run.checkpoints:
        if entry.step == content["step"]:
            return run, entry
    raise InputError(f"{path} is of step {content['step']}, but {run.path} has no complete checkpoint of that step")
