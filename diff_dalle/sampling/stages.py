"""From checkpoint files to stages: a table by kind of network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from ..checkpoints.decoder import DecoderConfig
from ..checkpoints.kinds import DecoderSettings, find_kind
from ..checkpoints.loading import SavedNetwork, open_networks
from ..distributed.devices import use_device
from ..models.precision import resolve_precision
from .generator_stage import GeneratorStage
from .stage import Stage
from .unet_stage import UnetStage

#: The stage that a network of each kind is.
STAGES: dict[str, type[Stage]] = {"generator": GeneratorStage, "decoder": UnetStage}


def load_stages(
    path: str, device: str | torch.device = "auto", precision: str = "auto", bpe_path: str = "", keep: bool = True
) -> list[Stage]:
    """The networks of a checkpoint: a generator, a U-Net of a decoder, or all U-Nets of one, from the lowest resolution
    to the highest. Arguments and errors as for ``pipeline.load``.

    keep: False = load the weights for each use and free them afterwards.
    """
    networks, resolved = open_networks(path, tuple(STAGES), bpe_path), use_device(device)
    precision = resolve_precision(precision, resolved)
    return [STAGES[saved.kind.name](saved, resolved, precision, bpe_path, keep) for saved in networks]


@dataclass(frozen=True)
class _InMemory(SavedNetwork):
    """A network that is in memory, in place of a file."""

    network: nn.Module = field(default_factory=nn.Module)

    def load(self, device: torch.device) -> nn.Module:
        return self.network


def decoder_stages(decoder: DecoderConfig, networks: Mapping[str, nn.Module], device: torch.device) -> list[Stage]:
    """Stages of U-Nets that are in memory, such as in training, by name; not all of the decoder's need be there. They
    stay as they are: in the precision of the autocast around, with the weights that they have at the time."""
    kind, settings = find_kind("decoder"), DecoderSettings(decoder)
    return [
        UnetStage(_InMemory(name, kind, settings, None, 0, name, network=networks[name]), device)
        for name in decoder.names
        if name in networks
    ]
