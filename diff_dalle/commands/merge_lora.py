"""What ``merge_lora.py`` does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import storage
from ..checkpoints.checkpoint import load_file, write_file
from ..checkpoints.kinds import KINDS
from ..checkpoints.loading import SavedNetwork, open_networks
from ..checkpoints.lora_file import WeightedLora, unmerge_lora
from ..config import InputError
from ..embeddings.contract import weights_digest
from ..sampling.lora import parse_lora_paths, with_loras
from ..text.tokenizer import Tokenizer, load_tokenizer
from .file_settings import MergeConfig
from .gathering import check_new

#: Networks by trainee, their tokenizer, and what is recorded of the LoRAs that they have.
Work = tuple[dict[str, nn.Module], Tokenizer | None, list[dict[str, Any]]]

MERGED = "merged_loras"  # in the settings of a checkpoint: what LoRAs its weights have


def merge_lora_files(config: MergeConfig) -> str:
    """Write a plain checkpoint of the network with the LoRAs in its weights, and their tokens in its vocabulary, which
    needs them no more, or without those that it has; returns a text about it. InputError as ``with_loras``, for a LoRA
    to remove that is not in it, and for an existing file."""
    check_new(config.out)
    content, loras = load_file(config.model_path), parse_lora_paths(config.lora)
    for each in loras:
        if each.lora.about.clip:
            raise InputError(
                f"{each.lora.path} trains tokens of a CLIP, which no checkpoint of a {content['kind']} holds: use it "
                "as it is, by --lora"
            )
    networks, work = open_networks(config.model_path, tuple(KINDS)), _removed if config.remove else _merged
    loaded, tokenizer, known = work(networks, loras, merged_loras(content["config"]), config.accept_changed_base)
    state: dict[str, Tensor] = {}
    for network in networks:
        prefix = f"{network.trainee}." if network.is_part else ""
        state |= {prefix + name: value for name, value in loaded[network.trainee].state_dict().items()}
    settings = {name: value for name, value in content["config"].items() if name != MERGED}
    settings |= {MERGED: known} if known else {}
    content |= {"config": settings, "state": state}
    if tokenizer is not None and tokenizer.identity != content["tokenizer"]:
        vocabulary = "" if tokenizer.identity == load_tokenizer().identity else tokenizer.vocabulary.text()
        content |= {"tokenizer": tokenizer.identity, "vocabulary": vocabulary}
    with storage.atomic_writer(config.out) as file:
        write_file(file, content)
    return f"{config.out}: {config.model_path} {'without' if config.remove else 'with'} {', '.join(config.lora)}"


def merged_loras(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What a checkpoint's settings say about the LoRAs in its weights: file, identity and factor of each."""
    found = config.get(MERGED, [])
    entries = [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []
    return [
        {"file": str(entry.get("file")), "identity": str(entry.get("identity")), "factor": entry["factor"]}
        for entry in entries
        if isinstance(entry.get("factor"), (int, float))
    ]


def _record(given: WeightedLora) -> dict[str, Any]:
    """What a checkpoint says about a LoRA in its weights."""
    return {
        "file": given.lora.path.rpartition("/")[2],
        "identity": weights_digest(given.lora.tensors),
        "factor": given.weight,
    }


def _merged(networks: Sequence[SavedNetwork], loras: Sequence[WeightedLora], known: list, accept: bool) -> Work:
    merged = with_loras(networks, loras, accept)
    return _loaded(merged), merged[0].tokenizer, [*known, *map(_record, loras)]


def _removed(networks: Sequence[SavedNetwork], loras: Sequence[WeightedLora], known: list, accept: bool) -> Work:
    left, tokenizer, loaded = [*known], networks[0].tokenizer, _loaded(networks)
    for each in loras:
        about, record = each.lora.about, _record(each)
        same = [entry for entry in left if {**entry, "file": ""} == {**record, "file": ""}]
        if about.kind != networks[0].settings.name or about.trainee not in loaded or not (same or accept):
            names = ", ".join(f"{entry['file']}:{entry['factor']:g}" for entry in left) or "none"
            raise InputError(
                f"{each.lora.path}:{each.weight:g} is not among the LoRAs that {networks[0].path} says it has "
                f"({names}): give one of them with its factor, or remove it nevertheless by --accept_changed_base True"
            )
        left = [entry for entry in left if entry not in same[:1]]
        tokenizer = unmerge_lora(loaded[about.trainee], tokenizer, each)
    return loaded, tokenizer, left


def _loaded(networks: Sequence[SavedNetwork]) -> dict[str, nn.Module]:
    return {network.trainee: network.load(torch.device("cpu")) for network in networks}
