"""The files of the public networks: how they are recognized, what reads them, and what makes checkpoints of them."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any

from ... import storage
from ...checkpoints.content import read_archive
from ...checkpoints.foreign.stable_cascade import network_command
from ...checkpoints.safetensors import WEIGHTS, tensor_names
from ...config import Fault, InputError
from ...models.latent.released import find_released

# Settings that name networks, by their stages; "" = that of the run.
SETTINGS = {
    "generator_checkpoint_path": "",
    "stage_a_checkpoint_path": "stage_a",
    "effnet_checkpoint_path": "semantic",
    "previewer_checkpoint_path": "semantic",
}


def check_imported(kind: str, settings: Mapping[str, Any]) -> None:
    """InputError, with the command that makes a checkpoint of it, when one of the ``SETTINGS`` is a file of a public
    network. kind: of the run."""
    own = kind.removesuffix("_lora").removesuffix("_controlnet")
    found: dict[str, list[tuple[str, str]]] = {}  # by stage: settings and files
    for setting, stage in SETTINGS.items():
        path = settings.get(setting)
        if isinstance(path, str) and find_released(stage or own, _names_in(path)):
            found.setdefault(stage or own, []).append((setting, path))
    for stage, files in found.items():
        (setting, path), *_ = files
        weights = list(dict.fromkeys(each for _, each in files))
        command = network_command(stage, weights, settings.get("model_version"))
        rule = f"is {path}, which holds the weights of a public network: make a checkpoint of it by {command}"
        raise InputError(Fault(setting, f"{rule}, and give that"))


def _names_in(path: str) -> Collection[str]:
    """The names of the tensors in a file that this package has not written; none if they cannot be found out cheaply,
    or what reads the file says what is wrong with it."""
    try:
        if path.endswith(WEIGHTS):
            return tensor_names(path) if storage.exists(path) else ()
        if storage.is_remote(path) or not os.path.isfile(storage.local_path(path)):
            return ()
        content, _ = read_archive(path, values=False)
    except InputError:
        return ()
    found = content.get("state_dict", content) if isinstance(content, Mapping) else ()
    return found.keys() if isinstance(found, Mapping) else ()
