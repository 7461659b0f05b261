"""Weights alone, in the safetensors format, with the header of the checkpoint that they are from: half the size, and
readable by any program that reads the format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, BinaryIO

import torch

from .. import storage
from ..errors import InputError, named
from .content import DamagedError
from .safetensors import read_safetensors, write_safetensors

WEIGHTS = ".safetensors"  # how the names of such files end
FORMAT = "diff_dalle weights 1"
LORA_FORMAT = "diff_dalle LoRA 1"  # of LoRAs, which end alike; see lora_file.py
HEADER = ("format", "role", "step", "samples", "trainee", "kind", "config", "tokenizer", "vocabulary")


def write_weights_file(
    file: BinaryIO, content: Mapping[str, Any], path: str, dtype: torch.dtype = torch.float16
) -> None:
    """Write the weights and the header of a checkpoint (``load_file``), from ``path``, into an open file, as ``dtype``.

    Raises InputError for weights that are neither floating-point numbers nor int64, or, as ``dtype``, not finite.
    """
    for name, value in content["state"].items():
        if not value.is_floating_point() and value.dtype != torch.int64:
            raise InputError(f"{path} has {name} of {value.dtype}, but only floating-point weights can be written")
        if value.is_floating_point() and not value.to(dtype).isfinite().all():
            remedy = "" if dtype == torch.float32 else ": write float32"
            raise InputError(f"{path} has values in {name} that {dtype} cannot hold{remedy}")
    header = json.dumps({name: content[name] for name in HEADER}, ensure_ascii=False)
    write_safetensors(file, content["state"], {"format": FORMAT, "header": header}, dtype)


def read_weights_file(path: str) -> dict[str, Any]:
    """What ``load_file`` gives for such a file, in fp32; of one with weights in others' layout, these. DamagedError for
    any other one."""
    from .foreign.structure import is_unet

    if not storage.exists(path):
        raise DamagedError(f"checkpoint {path} does not exist")
    state, texts = read_safetensors(path)
    if texts.get("format") != FORMAT:
        if is_unet(state):
            return dict(state)
        if texts.get("format") == LORA_FORMAT:
            takes = f"which {named('lora')} takes"
            raise InputError(f"{path} is a LoRA, {takes}, but a checkpoint of a network is required here")
        raise DamagedError(f"{path} was not written by diff_dalle: its metadata do not say the format {FORMAT!r}")
    try:
        header = json.loads(texts["header"])
    except (KeyError, ValueError, RecursionError):
        header = None
    if not isinstance(header, dict) or header.keys() != set(HEADER):
        raise DamagedError(f"{path} is damaged: its metadata do not describe a network")
    return {**header, "state": state}
