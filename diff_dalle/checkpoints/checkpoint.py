"""Checkpoints that explain themselves, and the folder of a run.

A checkpoint of step 200 is a set of files, ``model000200.pt``, ``ema_0.9999_000200.pt``, ``opt000200.pt``. Each
carries its format, role, step, samples, resolved config and tokenizer identity, is written under a temporary name and
renamed, and is plain data (``torch.load(weights_only=True)``). ``run.json`` names the sets that are complete; it is
replaced last, so a kill at any moment leaves a run that continues from a complete set. Nothing is read from names.
"""

from __future__ import annotations

import io
import pickle
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch
from torch import nn

from .. import storage
from ..errors import InputError

FORMAT = 1
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
