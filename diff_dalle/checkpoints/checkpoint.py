"""Checkpoint files that explain themselves.

Each file carries its format, role, step, samples, trainee, resolved config, tokenizer identity and, where it is not a
built-in one, the tokenizer's vocabulary. It is written under a temporary name and renamed, and is plain data
(``torch.load(weights_only=True)``).
"""

from __future__ import annotations

import fnmatch
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from .. import storage
from ..config import InputError, quantity, quoted
from .content import DamagedError, check_header, check_state, read_archive
from .model_folder import find_file
from .safetensors import HEADER, WEIGHTS, read_safetensors, read_weights_file

FORMAT = 1
ROLES = {
    "model": "a model's weights",
    "ema": "EMA weights",
    "optimizer": "an optimizer's state",
    "sharded": "the index of a sharded checkpoint",
}
INDEX = "index.pt"  # of a sharded checkpoint, a folder; see shards.py
SHOWN_NAMES = 8  # parameters listed in a message
_OPTIONAL = {"trainee": "", "vocabulary": ""}  # not written where they are empty


@dataclass(frozen=True)
class Identity:
    """What every file of a run says about its origin.

    kind:       what the model is, such as "generator"; see kinds.py.
    config:     the run's resolved settings, a nested dict of plain values.
    tokenizer:  identity of the tokenizer whose ids the model reads; None without text.
    vocabulary: the tokenizer's merge file, for files with weights, which need nothing else then; "" = the built-in one.
    """

    kind: str
    config: dict
    tokenizer: str | None = None
    vocabulary: str = ""


def file_name(key: str, step: int) -> str:
    """The name of the file with a state. key: its role, prefixed by the trainee's name in a run of several."""
    trainee, _, role = key.rpartition("/")
    stem = {"model": "model", "optimizer": "opt"}.get(role, f"{role}_")
    return f"{trainee + '_' if trainee else ''}{stem}{step:06d}.pt"


def is_sharded_folder(path: str) -> bool:
    """Whether a path is that of a sharded checkpoint."""
    return not path.endswith((".pt", WEIGHTS)) and storage.exists(storage.join(path, INDEX))


def save_file(
    path: str, role: str, identity: Identity, step: int, samples: int, state: Mapping[str, Any], trainee: str = ""
) -> None:
    """Write one checkpoint file atomically: either the whole file appears or the previous one stays. Arguments as for
    ``file_content``.

    Raises InputError when it cannot be written, e.g. because the disk is full.
    """
    with storage.atomic_writer(path) as file:
        write_file(file, file_content(role, identity, step, samples, state, trainee))


def write_file(file: BinaryIO, content: Mapping[str, Any]) -> None:
    """Write a checkpoint file of what ``load_file`` shall give into an open file."""
    written = {name: value for name, value in content.items() if value or name not in _OPTIONAL}
    torch.save(_canonical(written), file)


def file_content(
    role: str, identity: Identity, step: int, samples: int, state: Mapping[str, Any], trainee: str = ""
) -> dict[str, Any]:
    """What ``load_file`` gives for the file that ``save_file`` writes of this.

    role:    model, optimizer, or ema_RATE, stored as "ema".
    trainee: name of the trainee in a run of several.
    """
    content = {"format": FORMAT, "role": role.partition("_")[0], "step": step, "samples": samples, **vars(identity)}
    if role == "optimizer":
        content["vocabulary"] = ""
    return {**content, "trainee": trainee, "state": state}


def networks_content(
    role: str, identity: Identity, step: int, samples: int, states: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """``file_content`` of the weights of networks, by name: several as one, each weight under its network's name
    (``unet0.…``), a single one as it is."""
    if len(states) == 1:
        ((name, state),) = states.items()
    else:
        name, state = "", {f"{name}.{key}": value for name in sorted(states) for key, value in states[name].items()}
    return file_content(role, identity, step, samples, state, name)


def networks_in(content: Mapping[str, Any], names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The contents for those of the named networks that a file of several holds (see ``write_networks``), as if each
    were a file of its own; none for a file of a single network."""
    several = filter(None, names if not content["trainee"] else ())
    return {name: found for name in several if (found := network_in(content, name))["state"]}


def network_in(content: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The content for one of the networks that a file of several holds, without weights if it has none of it."""
    start = f"{name}."
    state = {key[len(start) :]: value for key, value in content["state"].items() if key.startswith(start)}
    return {**content, "trainee": name, "state": state}


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


def load_file(path: str, roles: tuple[str, ...] = ("model", "ema"), values: bool = False) -> dict[str, Any]:
    """Read a checkpoint file: a dict with format, role, step, samples, trainee, kind, config, tokenizer, vocabulary and
    state.

    The file is memory-mapped (a remote one as a temporary copy), so that reading the header is cheap; ``values``
    compares all of it with its checksums. A model folder or its name stands for its ``model_path``; a file of weights
    alone (weights_file.py) is read whole. Of a file of Improved Diffusion, Guided-Diffusion or GLIDE it gives what ours
    would say (see ``foreign``). Raises DamagedError when it is missing, damaged or foreign, and InputError
    when it has none of the ``roles``.
    """
    # They need the networks, whose checkpoints this module reads.
    from .foreign.layouts import find_layout, weights_in

    path = find_file(path)
    if is_sharded_folder(path):
        raise InputError(
            f"{path} is a sharded checkpoint: write ordinary files with diff-dalle consolidate --model_path {path}, "
            "and give one of them"
        )
    content, size = _read(path, values)
    if (state := weights_in(content)) is not None:
        check_state({"role": "model", "state": state}, path, size)
        layout = find_layout(state)
        assert layout is not None
        content, text = layout.content(state, path)
        warnings.warn(f"{path} {text}", stacklevel=2)
        size = sys.maxsize  # checked, and a table of classes has one row more now
    if isinstance(content, dict) and "bundle" in content:
        raise InputError(f"{path} holds a whole run, not one network: give it to tracking.load, or a model….pt here")
    if not isinstance(content, dict) or {*HEADER, "state"} - content.keys() - _OPTIONAL.keys():
        what = "was not written by diff_dalle: it does not say what model it holds"
        raise DamagedError(f"{path} {what}")
    content = {**_OPTIONAL, **content}
    check_header(content, path)
    check_state(content, path, size)
    if content["format"] > FORMAT:
        raise InputError(f"{path} has format {content['format']}, newer than this version reads ({FORMAT}): update")
    if content["role"] not in roles:
        required = " or ".join(ROLES[role] for role in roles)
        raise InputError(
            f"{path} holds {ROLES.get(content['role'], quoted(content['role']))}, but {required} is required here "
            f"({'give model….pt or ema_….pt' if 'model' in roles else 'give opt….pt'})"
        )
    return content


def _read(path: str, values: bool) -> tuple[Any, int]:
    """What a file holds, and how many bytes its tensors may have."""
    return (read_weights_file(path), sys.maxsize) if path.endswith(WEIGHTS) else read_archive(path, values)


def read_foreign(path: str) -> dict[str, Tensor]:
    """The weights in a file of Improved Diffusion, Guided-Diffusion or GLIDE. InputError for any other file."""
    from .foreign.layouts import weights_in

    content, size = _read(path, values=True)
    if (state := weights_in(content)) is None:
        none = "does not hold weights named as in Improved Diffusion, Guided-Diffusion and GLIDE"
        raise InputError(f"{path} {none}")
    check_state({"role": "model", "state": state}, path, size)
    return state


def named_tensors(path: str) -> dict[str, Tensor] | None:
    """The tensors of a file that another package has written, alone or as its ``state_dict``; None for a file that
    holds anything else. DamagedError as ``load_file``."""
    if path.endswith(WEIGHTS):
        if not storage.exists(path):
            raise DamagedError(f"{path} does not exist")
        return read_safetensors(path)[0]
    content, size = read_archive(path, values=True)
    found = content.get("state_dict", content) if isinstance(content, Mapping) else None
    if not isinstance(found, Mapping) or not all(isinstance(value, Tensor) for value in found.values()):
        return None
    state = {name: value.detach() for name, value in found.items()}  # some are parameters
    check_state({"role": "model", "state": state}, path, size)
    return state


def attention_order(path: str) -> bool | None:
    """Whether the rows of projections in another project's file are in Guided-Diffusion's "new" order; None for a file
    of ours."""
    from .foreign.layouts import weights_in
    from .foreign.reading import recognize
    from .foreign.structure import is_unet

    content, _ = _read(find_file(path), values=False)
    state = weights_in(content)
    return recognize(state, path).unseen.use_new_attention_order if state is not None and is_unet(state) else None


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

    Raises InputError for the first difference in any other name.
    """
    own, given = module.state_dict(), content["state"]
    names = list(dict.fromkeys([*own, *given]))
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


def check_patterns(exclude: Sequence[str], names: Sequence[str], source: str) -> None:
    """InputError for a pattern that matches none of the ``names`` of weights in ``source``, a file or several."""
    for pattern in exclude:
        if not fnmatch.filter(names, pattern):
            raise InputError(
                f"the pattern {pattern!r} of excluded weights matches none of {source}: names look like "
                f"{', '.join(names[:3])}"
            )


def load_weights(
    module: nn.Module, content: Mapping[str, Any], path: str, exclude: Sequence[str] = ()
) -> LoadedWeights:
    """Copy a file's weights into ``module``, except those that match a pattern in ``exclude``; see
    ``check_weights``."""
    loaded = check_weights(module, content, path, exclude)
    module.load_state_dict({name: content["state"][name] for name in loaded.taken}, strict=False)
    return loaded
