"""Which parts of a network are gathered together when its weights are sharded over processes, and compiled together.

To make another network shardable: an entry in ``UNITS``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from ..config import InputError, named
from ..distributed.parallel import Parts
from . import attention, layers, text_encoder, transformer_blocks
from .adapters import control_backbones
from .adapters.latent_controlnet import LatentControlNet
from .adapters.unet_controlnet import UnetControlNet
from .decoder import attention as decoder_attention
from .decoder import blocks as decoder_blocks
from .decoder.unet import DecoderUnet
from .generator import Generator
from .latent import blocks as latent_blocks
from .latent import stage_a
from .latent.unet import LatentUnet
from .noised_clip import NoisedClip
from .norms import GroupNorm32, LayerNorm32
from .precision import full_precision_layers
from .projector import Projector


@dataclass(frozen=True)
class Units:
    """How a network is sharded.

    blocks:  classes of the modules that are gathered one by one; the rest of the network is gathered as a whole.
    methods: the methods beside ``forward`` by which others run it. None of them may be called inside ``forward``.
    """

    blocks: tuple[type[nn.Module], ...]
    methods: tuple[str, ...] = ()


_UNET = (layers.ResBlock, attention.AttentionBlock, text_encoder.TextBlock)
_PIXEL = (*_UNET, transformer_blocks.TransformerBlock)
_LATENT = (latent_blocks.ConvBlock, latent_blocks.AttentionBlock, latent_blocks.FeedForward, text_encoder.TextBlock)
_DECODER = (decoder_blocks.ResidualBlock, decoder_attention.OverPositions)

_NORMS = (
    GroupNorm32,
    LayerNorm32,
    latent_blocks.GlobalResponseNorm,
    transformer_blocks.Modulation,
    transformer_blocks.TurnedNorm,
)

UNITS: dict[type[nn.Module], Units] = {
    Generator: Units(_PIXEL, ("encode_text",)),
    NoisedClip: Units(_UNET, ("encode_image", "encode_text")),
    DecoderUnet: Units(_DECODER, ("encode_text",)),
    LatentUnet: Units(_LATENT, ("encode_text",)),
    UnetControlNet: Units(_PIXEL, ("encode",)),
    Projector: Units(()),
    LatentControlNet: Units((control_backbones.Residual,), ("encode",)),  # the other backbones are small
}

#: What torch.compile captures, too: a graph for each of them.
BLOCKS = (*dict.fromkeys(block for units in UNITS.values() for block in units.blocks), stage_a.GatedBlock)


def units_of(network: nn.Module) -> Units:
    """The entry of a network. InputError for one that cannot be sharded."""
    found = next((UNITS[each] for each in type(network).__mro__ if each in UNITS), None)
    if found is None:
        raise InputError(
            f"a {type(network).__name__} is not made of blocks that can be gathered one by one, so its weights cannot "
            f"be sharded: set {named('parallel')} ddp, with which each process has all of them"
        )
    return found


def parts_of(network: nn.Module, half: torch.dtype | None) -> Parts:
    """A network's modules as they are gathered. half: the dtype of autocast, None without it.

    Autocast computes the same from weights that are gathered in its dtype, except in the layers that it spares.
    """
    units = units_of(network)
    full = full_precision_layers(network)
    full |= {each for each in network.modules() if isinstance(each, _NORMS)}
    blocks = [each for each in network.modules() if isinstance(each, units.blocks)]
    return Parts(blocks, full, units.methods, half)
