"""Checkpoints → a model folder, which holds the networks and nothing about the machine or run that trained them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch

from .. import storage
from ..config import InputError, lookup, to_dict
from ..text.vocabulary import BUILT_IN
from .checkpoint import load_file
from .decoder import ClipConfig
from .kinds import find_kind
from .lora_file import Lora, write_lora
from .model_folder import ROLES, TABLE, ModelFolder, open_model
from .safetensors import write_weights_file

#: What the files for a setting are called; those of ``model_path`` have the names of their kinds.
NAMES = {"upsampler_paths": "upsampler", "classifier_path": "classifier"}
_NETWORKS = [role for role in ROLES if role != "lora"]
_CLIP = {field.name for field in fields(ClipConfig)}
PRECISIONS = {"fp16": torch.float16, "fp32": torch.float32}


def write_model(folder: str, paths: Mapping[str, Sequence[str]], precision: str = "fp16") -> ModelFolder:
    """Write the networks of model or EMA checkpoints into a model folder, which is made or overwritten; its table comes
    last.

    paths:     checkpoints by the settings that take them, among ``ROLES`` without ``lora``.
    precision: of the weights, fp16 or fp32.

    Raises InputError for a file that is no checkpoint with weights, and for values that the precision cannot hold.
    """
    dtype = lookup(PRECISIONS, precision, "precision")
    table: dict[str, list[str]] = {}
    for role, files in paths.items():
        if role not in _NETWORKS:
            raise InputError(f"a model has no network for {role}: give some of {', '.join(_NETWORKS)}")
        contents = [portable(load_file(path, values=True)) for path in files]
        name = NAMES.get(role, contents[0]["kind"] if role == "model_path" and contents else role)
        names = [f"{name}{i if len(files) > 1 else ''}.safetensors" for i in range(len(files))]
        storage.make_dirs(folder)
        for path, content, file_name in zip(files, contents, names, strict=True):
            with storage.atomic_writer(storage.join(folder, file_name)) as file:
                write_weights_file(file, content, path, dtype)
        table |= {role: names} if names else {}
    return _write_table(folder, table)


def write_shared_lora(folder: str, lora: Lora) -> ModelFolder:
    """Write a LoRA into a model folder, which is made or overwritten; its table comes last."""
    name = "lora.safetensors"
    storage.make_dirs(folder)
    with storage.atomic_writer(storage.join(folder, name)) as file:
        write_lora(file, lora.about, lora.tensors)
    return _write_table(folder, {"lora": [name]})


def _write_table(folder: str, table: Mapping[str, Sequence[str]]) -> ModelFolder:
    storage.write_bytes(storage.join(folder, TABLE), (json.dumps(table, indent=2) + "\n").encode())
    model = open_model(folder)
    assert model is not None
    return model


def portable(content: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint's content with the settings that its network needs only, and no folder of its tokenizer or CLIP."""
    config = to_dict(find_kind(content["kind"]).read(content["config"]))
    if (section := config.get("tokenizer")) and section["bpe_path"] not in BUILT_IN:
        section["bpe_path"] = ""  # the vocabulary is in the file
    if previews := config.get("preview"):
        config["preview"] = {"guidance": previews["guidance"]}  # all of it that sampling reads
    for clip in _clips(config):
        clip["model"] = clip["model"].rpartition("/")[2]  # its identity stays, by which another copy is known
    return {**content, "config": config}


def _clips(value: Any) -> Iterator[dict[str, Any]]:
    """The CLIPs of ours that nested settings name: by the path of a checkpoint."""
    if isinstance(value, dict):
        if {"make", "model"} <= value.keys() <= _CLIP and value["make"] == "diff_dalle":
            yield value
        for item in value.values():
            yield from _clips(item)
