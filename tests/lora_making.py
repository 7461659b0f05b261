"""LoRAs for tiny bases."""

from __future__ import annotations

from pathlib import Path

import torch

from diff_dalle.checkpoints.loading import open_network
from diff_dalle.checkpoints.lora_file import LoraAbout, write_lora
from diff_dalle.embeddings.contract import weights_digest


def make_lora(path: str | Path, base: str, kind: str = "generator") -> str:
    """A LoRA with random weights for one layer of a tiny text encoder."""
    digest = weights_digest(open_network(base, kind).load(torch.device("cpu")).state_dict())
    torch.manual_seed(0)
    tensors = {
        "text_encoder.blocks.0.mlp_in.lora_down": torch.randn(2, 16),
        "text_encoder.blocks.0.mlp_in.lora_up": torch.randn(64, 2),
    }
    with open(path, "wb") as file:
        write_lora(file, LoraAbout(kind, "", digest, 2, 6.0, ("mlp_in",), ()), tensors)
    return str(path)
