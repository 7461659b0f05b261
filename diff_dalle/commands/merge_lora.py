"""Settings of ``merge_lora.py``, and what it does."""

from __future__ import annotations

from dataclasses import dataclass

from .. import storage
from ..config import option
from ..errors import InputError
from ..sampling.lora_config import accept_option, lora_option


@dataclass(frozen=True)
class MergeConfig:
    """Merging"""

    model_path: str = option("", "checkpoint of the network that the LoRAs were trained for, ema_….pt or model….pt")
    lora: tuple[str, ...] = lora_option()
    accept_changed_base: bool = accept_option()
    out: str = option("merged.pt", "file to write, local or remote; it must not exist")

    def __post_init__(self):
        for name in ("model_path", "lora"):
            if not getattr(self, name):
                raise InputError(f"--{name} is required: a checkpoint, and LoRA files that were trained for it")


def merge_lora_files(config: MergeConfig) -> str:
    """Write a plain checkpoint of the network with the LoRAs in its weights, and their tokens in its vocabulary, which
    needs them no more; returns a text about it. InputError as ``with_loras``, and for an existing file."""
    import torch

    from ..checkpoints.checkpoint import Identity, load_file, write_file
    from ..checkpoints.kinds import KINDS
    from ..checkpoints.loading import open_networks
    from ..sampling.lora import parse_lora_paths, with_loras

    if storage.exists(config.out):
        raise InputError(f"{config.out} exists already: give another file with --out, or remove it")
    content = load_file(config.model_path)
    networks = open_networks(config.model_path, tuple(KINDS))
    merged = with_loras(networks, parse_lora_paths(config.lora), config.accept_changed_base)
    state: dict[str, torch.Tensor] = {}
    for network in merged:
        prefix = f"{network.trainee}." if network.is_part else ""
        weights = network.load(torch.device("cpu")).state_dict()
        state |= {prefix + name: value for name, value in weights.items()}
    identity = Identity(content["kind"], content["config"], content["tokenizer"], content["vocabulary"])
    tokenizer = merged[0].tokenizer
    if tokenizer is not None and tokenizer.vocabulary.added:
        identity = Identity(identity.kind, identity.config, tokenizer.identity, tokenizer.vocabulary.text())
    with storage.atomic_writer(config.out) as file:
        write_file(file, content["role"], identity, content["step"], content["samples"], state, content["trainee"])
    return f"{config.out}: {config.model_path} with {', '.join(config.lora)}"
