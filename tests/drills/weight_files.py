"""Weights, LoRAs and ControlNets as safetensors, whose headers say shapes, settings and names."""

from __future__ import annotations

import copy
import io
import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import torch
from checkpoint_making import make_file
from control_making import make_controlnet
from lora_making import make_lora
from safetensors.torch import save

from diff_dalle.checkpoints.checkpoint import load_file
from diff_dalle.checkpoints.loading import open_network
from diff_dalle.checkpoints.safetensors import CHECKSUM, METADATA, write_weights_file
from diff_dalle.sampling.lora import Loras

from .mutations import Case, as_json, damaged, distorted, from_file, mixed


def as_weights(path: str) -> bytes:
    """A checkpoint's weights as safetensors."""
    buffer = io.BytesIO()
    write_weights_file(buffer, load_file(path), path, torch.float32)
    return buffer.getvalue()


def rebuilt(whole: bytes) -> Case:
    """A whole header in which one part is strange, or one part of a JSON text in its metadata, before the elements."""
    end = 8 + int.from_bytes(whole[:8], "little")
    header: dict[str, Any] = json.loads(whole[8:end])

    def case(chance: random.Random) -> bytes:
        changed = copy.deepcopy(header)
        texts = changed.get(METADATA, {})
        texts.pop(CHECKSUM, None)
        nested = [name for name, text in texts.items() if text.startswith(("[", "{"))]
        if nested and chance.random() < 0.5:
            name = chance.choice(nested)
            texts[name] = json.dumps(distorted(json.loads(texts[name]), chance))
        else:
            changed = distorted(changed, chance)
        text = as_json(changed)
        return len(text).to_bytes(8, "little") + text + whole[end:]

    return case


def _cases(*seeds: bytes) -> Case:
    """Damaged bytes, and twice as many strange headers."""
    headers = mixed(*map(rebuilt, seeds))
    return mixed(partial(damaged, seeds), headers, headers)


def weights(folder: Path):
    whole = as_weights(make_file(folder))

    def read(path: str) -> None:
        open_network(path, "generator").load(torch.device("cpu"))

    return _cases(whole), from_file(folder / "weights.safetensors", read)


def loras(folder: Path):
    base = make_file(folder)
    saved = open_network(base, "generator")
    own = Path(make_lora(folder / "lora.safetensors", base)).read_bytes()
    pair = {"weights.0.lora_down": torch.zeros(2, 8), "weights.0.lora_up": torch.zeros(8, 2)}
    none = {"embeddings.embeddings": torch.zeros(0, 8), "embeddings.indices": torch.zeros(0, dtype=torch.int64)}
    foreign = save(pair | none)

    def read(path: str) -> None:
        Loras.read([path], accept_changed_base=True).given_to(saved).load(torch.device("cpu"))

    return _cases(own, own, foreign), from_file(folder / "read.safetensors", read)


def controlnets(folder: Path):
    whole = as_weights(make_controlnet(make_file(folder), folder / "controlnet.pt"))

    def read(path: str) -> None:
        open_network(path, "controlnet").load(torch.device("cpu"))

    return _cases(whole), from_file(folder / "read.safetensors", read)
