"""LoRAs for tiny bases."""

from __future__ import annotations

from pathlib import Path

import torch

from diff_dalle.checkpoints.loading import open_network
from diff_dalle.checkpoints.lora_file import LoraAbout, write_lora
from diff_dalle.embeddings.contract import weights_digest
from diff_dalle.models.adapters.lora import text_encoder_of


def make_lora(path: str | Path, base: str, kind: str = "generator") -> str:
    """A LoRA with random weights for one layer of a tiny text encoder."""
    network = open_network(base, kind).load(torch.device("cpu"))
    name, encoder = text_encoder_of(network)
    digest, (outputs, inputs) = weights_digest(network.state_dict()), encoder.blocks[0].mlp_in.weight.shape
    torch.manual_seed(0)
    module = f"{name}.blocks.0.mlp_in"
    tensors = {f"{module}.lora_down": torch.randn(2, inputs), f"{module}.lora_up": torch.randn(outputs, 2)}
    with open(path, "wb") as file:
        write_lora(file, LoraAbout(kind, "", digest, 2, 6.0, ("mlp_in",), ()), tensors)
    return str(path)
