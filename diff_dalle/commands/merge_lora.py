"""Settings of ``merge_lora.py``, and what it does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .. import storage
from ..config import Fault, InputError, option, settings
from ..sampling.lora import accept_option, lora_option

if TYPE_CHECKING:  # settings need no torch
    from torch import Tensor, nn

    from ..checkpoints.loading import SavedNetwork
    from ..checkpoints.lora_file import WeightedLora
    from ..text.tokenizer import Tokenizer

    Work = tuple[dict[str, Tensor], Tokenizer | None, list[dict[str, Any]]]

MERGED = "merged_loras"  # in the settings of a checkpoint: what LoRAs its weights have


@settings
class MergeConfig:
    """Merging"""

    model_path: str = option("", "checkpoint of the network that the LoRAs were trained for, ema_….pt or model….pt")
    lora: tuple[str, ...] = lora_option()
    accept_changed_base: bool = accept_option()
    remove: bool = option(
        False, "remove the LoRAs, up to rounding, and their tokens from model_path, into which they were merged"
    )
    out: str = option("merged.pt", "output file, local or remote; must not exist yet")

    def faults(self) -> Iterator[Fault]:
        for name in ("model_path", "lora"):
            if not getattr(self, name):
                yield Fault(name, "is required: a checkpoint, and LoRA files that were trained for it")


def merge_lora_files(config: MergeConfig) -> str:
    """Write a plain checkpoint of the network with the LoRAs in its weights, and their tokens in its vocabulary, which
    needs them no more, or without those that it has; returns a text about it. InputError as ``with_loras``, for a LoRA
    to remove that is not in it, and for an existing file."""
    from ..checkpoints.checkpoint import load_file, write_file
    from ..checkpoints.kinds import KINDS
    from ..checkpoints.loading import open_networks
    from ..sampling.lora import parse_lora_paths
    from ..text.tokenizer import load_tokenizer

    if storage.exists(config.out):
        raise InputError(f"{config.out} exists already: give another file with --out, or remove it")
    content, loras = load_file(config.model_path), parse_lora_paths(config.lora)
    for each in loras:
        if each.lora.about.clip:
            raise InputError(
                f"{each.lora.path} trains tokens of a CLIP, which no checkpoint of a {content['kind']} holds: use it "
                "as it is, by --lora"
            )
    known = merged_loras(content["config"])
    work = _removed if config.remove else _merged
    state, tokenizer, known = work(
        open_networks(config.model_path, tuple(KINDS)), loras, known, config.accept_changed_base
    )
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
    from ..embeddings.contract import weights_digest

    return {
        "file": given.lora.path.rpartition("/")[2],
        "identity": weights_digest(given.lora.tensors),
        "factor": given.weight,
    }


def _merged(networks: Sequence[SavedNetwork], loras: Sequence[WeightedLora], known: list, accept: bool) -> Work:
    import torch

    from ..sampling.lora import with_loras

    merged = with_loras(networks, loras, accept)
    state: dict[str, Tensor] = {}
    for network in merged:
        state |= _named(network, network.load(torch.device("cpu")))
    return state, merged[0].tokenizer, [*known, *map(_record, loras)]


def _removed(networks: Sequence[SavedNetwork], loras: Sequence[WeightedLora], known: list, accept: bool) -> Work:
    import torch

    from ..checkpoints.lora_file import unmerge_lora

    left, (tokenizer, *_) = [*known], [network.tokenizer for network in networks]
    loaded = {network.trainee: network.load(torch.device("cpu")) for network in networks}
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
    state: dict[str, Tensor] = {}
    for network in networks:
        state |= _named(network, loaded[network.trainee])
    return state, tokenizer, left


def _named(network: SavedNetwork, loaded: nn.Module) -> dict[str, Tensor]:
    """A network's weights by their names in its file."""
    prefix = f"{network.trainee}." if network.is_part else ""
    return {prefix + name: value for name, value in loaded.state_dict().items()}
