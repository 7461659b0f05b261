"""The files of the public networks: how they are recognized, what reads them, and what makes checkpoints of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from typing import Any

from ... import storage
from ...checkpoints.content import read_archive
from ...checkpoints.safetensors import WEIGHTS, tensor_names
from ...config import Fault, InputError
from ...models.latent import released
from ...models.latent.stage_b import STAGE_B_SIZES
from ...models.latent.stage_c import STAGE_C_SIZES

Converter = Callable[[Any, Mapping[str, Any]], released.Converted]

# By stage: what one kind of file has, and what reads it. A semantic encoder may come in several files.
CONVERTERS: dict[str, dict[str, Converter]] = {
    "stage_a": {"vquantizer.codebook.weight": released.stage_a_weights},
    "semantic": {
        "mapper.0.weight": released.semantic_encoder_weights,
        "features.0.0.weight": released.backbone_weights,
        "blocks.0.weight": released.previewer_weights,
    },
    "stage_b": {"effnet_mapper.0.weight": released.stage_b_weights},
    "stage_c": {"clip_txt_mapper.weight": released.stage_c_weights},
}
# Settings that name networks, by their stages; "" = that of the run.
SETTINGS = {
    "generator_checkpoint_path": "",
    "stage_a_checkpoint_path": "stage_a",
    "effnet_checkpoint_path": "semantic",
    "previewer_checkpoint_path": "semantic",
}


def converter_of(stage: str, names: Collection[str]) -> Converter | None:
    """What reads a file of a stage with tensors of these names; None if it is of something else."""
    return next((convert for name, convert in CONVERTERS[stage].items() if name in names), None)


def check_imported(kind: str, settings: Mapping[str, Any]) -> None:
    """InputError, with the command that makes a checkpoint of it, when one of the ``SETTINGS`` is a file of a public
    network. kind: of the run."""
    own = kind.removesuffix("_lora").removesuffix("_controlnet")
    found: dict[str, list[tuple[str, str]]] = {}  # by stage: settings and files
    for setting, stage in SETTINGS.items():
        path = settings.get(setting)
        if isinstance(path, str) and converter_of(stage or own, _names_in(path)):
            found.setdefault(stage or own, []).append((setting, path))
    for stage, files in found.items():
        (setting, path), *_ = files
        weights = ",".join(dict.fromkeys(each for _, each in files))
        version = _version(stage, settings.get("model_version"))
        command = f"scripts/import_cascade.py --stage {stage}{version} --weights {weights} --out {stage}.pt"
        rule = f"is {path}, which holds the weights of a public network: make a checkpoint of it by {command}"
        raise InputError(Fault(setting, f"{rule}, and give that"))


def _version(stage: str, given: Any) -> str:
    """How the command says the size, of a stage that was published in several."""
    sizes = {"stage_b": [*STAGE_B_SIZES], "stage_c": [*STAGE_C_SIZES]}.get(stage, [])
    published = [name for name in sizes if name != "tiny"]
    return f" --model_version {given if given in published else '|'.join(published)}" if published else ""


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
