"""Checkpoint files that explain themselves.

Each file carries its format, role, step, samples, trainee, resolved config and tokenizer identity, is written under a
temporary name and renamed, and is plain data (``torch.load(weights_only=True)``).
"""

from __future__ import annotations

import fnmatch
import io
import pickle
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from .. import storage
from ..errors import InputError, quantity

FORMAT = 1
ROLES = {"model": "a model's weights", "ema": "EMA weights", "optimizer": "an optimizer's state"}
SHOWN_NAMES = 8  # parameters listed in a message


@dataclass(frozen=True)
class Identity:
    """What every file of a run says about its origin.

    kind:      what the model is, such as "generator"; see kinds.py.
    config:    the run's resolved settings, a nested dict of plain values.
    tokenizer: identity of the tokenizer whose ids the model reads; None without text.
    """

    kind: str
    config: dict
    tokenizer: str | None = None


def save_file(
    path: str, role: str, identity: Identity, step: int, samples: int, state: Mapping[str, Any], trainee: str = ""
) -> None:
    """Write one checkpoint file atomically: either the whole file appears or the previous one stays.

    role:    model, optimizer, or ema_RATE, stored as "ema".
    trainee: name of the trainee in a run of several.

    Raises InputError when it cannot be written, e.g. because the disk is full.
    """
    header = {"format": FORMAT, "role": role.partition("_")[0], "step": step, "samples": samples, **asdict(identity)}
    if trainee:
        header["trainee"] = trainee
    with storage.atomic_writer(path) as file:
        torch.save(_canonical({**header, "state": state}), file)


def _canonical(value):
    """The same values in fresh plain containers with interned strings.

    The bytes of a pickle depend on which equal objects are identical; that differs between an uninterrupted and a
    resumed run, whose files must be equal bit for bit.
    """
    if isinstance(value, Mapping):
        return {_canonical(key): _canonical(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_canonical(item) for item in value]
    return sys.intern(value) if type(value) is str else value


def load_file(path: str, roles: tuple[str, ...] = ("model", "ema")) -> dict[str, Any]:
    """Read a checkpoint file: a dict with format, role, step, samples, trainee, kind, config, tokenizer and state.

    Local files are memory-mapped, so that reading the header is cheap. Raises InputError when the file is missing,
    truncated, foreign, or has none of the ``roles``.
    """
    if not storage.exists(path):
        raise InputError(f"checkpoint {path} does not exist")
    is_local = not storage.is_remote(path)
    if is_local:
        storage.open_read(path).close()  # reports a folder and missing permissions
    source = storage.local_path(path) if is_local else io.BytesIO(storage.read_bytes(path))
    try:
        content = torch.load(source, map_location="cpu", weights_only=True, mmap=is_local)
    except (RuntimeError, EOFError, ValueError, OSError, zipfile.BadZipFile, pickle.UnpicklingError):
        raise InputError(f"{path} is truncated or is not a PyTorch file of plain tensors") from None
    if not isinstance(content, dict) or not {"format", "role", "kind", "state"} <= content.keys():
        raise InputError(f"{path} was not written by diff_dalle: it does not say what model it holds")
    if content["format"] > FORMAT:
        raise InputError(f"{path} has format {content['format']}, newer than this version reads ({FORMAT}): update")
    if content["role"] not in roles:
        required = " or ".join(ROLES[role] for role in roles)
        raise InputError(
            f"{path} holds {ROLES.get(content['role'], content['role'])}, but {required} is required here "
            f"({'give model….pt or ema_….pt' if 'model' in roles else 'give opt….pt'})"
        )
    content.setdefault("trainee", "")
    return content


@dataclass(frozen=True)
class LoadedWeights:
    """Names of state-dict entries. taken: copied from the file; excluded: in the model, but left at their initial
    values; unused: in the file only, and excluded."""

    taken: list[str]
    excluded: list[str]
    unused: list[str]

    def __str__(self) -> str:
        text = quantity(len(self.taken), "tensor") + " loaded"
        for names, what in ((self.excluded, "left at initial values"), (self.unused, "of the file not used")):
            if names:
                listed = ", ".join(names[:SHOWN_NAMES]) + (", …" if len(names) > SHOWN_NAMES else "")
                text += f"; {len(names)} {what}: {listed}"
        return text


def check_weights(
    module: nn.Module, content: Mapping[str, Any], path: str, exclude: Sequence[str] = ()
) -> LoadedWeights:
    """Which of a file's weights go into ``module``, which may be on the meta device.

    exclude: shell-style patterns of names that are not loaded, present in either or both.

    Raises InputError for the first difference in any other name, and for a pattern that matches nothing.
    """
    own, given = module.state_dict(), content["state"]
    names = list(dict.fromkeys([*own, *given]))
    for pattern in exclude:
        if not fnmatch.filter(names, pattern):
            raise InputError(
                f"the pattern {pattern!r} of excluded weights matches none of {path}: names look like "
                f"{', '.join(names[:3])}"
            )
    excluded = {name for pattern in exclude for name in fnmatch.filter(names, pattern)}
    for name in names:
        if name in excluded:
            continue
        if name not in given or name not in own:
            problem = f"has {'no' if name not in given else 'an extra'} {name}"
        elif own[name].shape != given[name].shape:
            problem = f"has {name} of shape {tuple(given[name].shape)} where {tuple(own[name].shape)} is required"
        else:
            continue
        raise InputError(f"{path} does not fit this model: it {problem}; its settings differ from the ones given")
    return LoadedWeights(
        [name for name in own if name not in excluded],
        [name for name in own if name in excluded],
        [name for name in given if name in excluded and name not in own],
    )


def load_weights(
    module: nn.Module, content: Mapping[str, Any], path: str, exclude: Sequence[str] = ()
) -> LoadedWeights:
    """Copy a file's weights into ``module``, except those that match a pattern in ``exclude``; see
    ``check_weights``."""
    loaded = check_weights(module, content, path, exclude)
    module.load_state_dict({name: content["state"][name] for name in loaded.taken}, strict=False)
    return loaded
