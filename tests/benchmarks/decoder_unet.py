"""A training step of the decoder's U-Net: ours against plain torch modules, and with activation checkpointing.

The network is that of the documented example (186 million parameters) at a quarter of its width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import torch
from dalle2_making import OtherUnet
from decoder_making import make_decoder
from network_making import randomize
from torch import Tensor, nn

from diff_dalle.batch import Conditioning
from diff_dalle.checkpoints.foreign.dalle2_pytorch import unet_state
from diff_dalle.models.decoder.config import DecoderUnetConfig
from diff_dalle.models.decoder.unet import DecoderUnet
from diff_dalle.models.layers import to_channels_last

from .regression import SPREAD, Differences, adamw_step, gradients, pass_through, same_function, same_step

NETWORK = DecoderUnetConfig(
    dim=32, image_embed_dim=768, cond_dim=16, dim_mults=(1, 2, 4, 8), attn_heads=4, as_published=True
)
IMAGE_SIZE, BATCH_SIZE = 64, 8
WARM_UP_SIZE = 8


def our_network(use_checkpoint: bool = False) -> DecoderUnet:
    """Ours, with the same weights for both values, none of them 0 (zero-initialized layers hide those before)."""
    torch.manual_seed(0)
    network = DecoderUnet(replace(NETWORK, checkpoint_during_training=use_checkpoint), learned_variance=True)
    return to_channels_last(randomize(network, spread=SPREAD))


class PlainNetwork(nn.Module):
    """With the weights of ours."""

    def __init__(self):
        super().__init__()
        self.unet = OtherUnet(NETWORK, variance=True)
        self.unet.load_state_dict(unet_state(our_network(), make_decoder(1, NETWORK).stage(0), "ours"))

    def forward(self, x: Tensor, t: Tensor, cond: Conditioning) -> Tensor:
        return self.unet(x, t, cond.image_embedding, kept=cond.embedding_mask)


def problem(size: int) -> tuple[Tensor, Tensor, Conditioning, Tensor]:
    """``BATCH_SIZE`` noisy images of ``size``×``size`` pixels, of which a quarter have no embedding, and targets."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(BATCH_SIZE, 3, size, size, generator=generator)
    target = torch.randn(BATCH_SIZE, 6, size, size, generator=generator)
    embedding = torch.randn(BATCH_SIZE, NETWORK.image_embed_dim or 0, generator=generator)
    cond = Conditioning(image_embedding=embedding).drop(torch.arange(BATCH_SIZE) % 4 == 3)
    return x, torch.linspace(0, 999, BATCH_SIZE), cond, target


def _work(network: nn.Module) -> Callable[[], object]:
    step = adamw_step(network, problem)
    step(WARM_UP_SIZE)  # allocates the libraries' own memory, which must not count as activations
    return lambda: step(IMAGE_SIZE)


def plain() -> Callable[[], object]:
    return _work(PlainNetwork())


def ours(use_checkpoint: bool = False) -> Callable[[], object]:
    return _work(our_network(use_checkpoint))


def gate() -> Differences:
    """The gradients are those of the images."""
    outputs, found = [], []
    for network in (our_network(), PlainNetwork()):
        x, t, cond, target = problem(IMAGE_SIZE)
        outputs.append(pass_through(network, x.requires_grad_(), t, cond, target)[1])
        found.append([cast(Tensor, x.grad)])
    return same_function(outputs, *found)


def checkpoint_gate() -> Differences:
    networks = [our_network(use_checkpoint) for use_checkpoint in (False, True)]
    losses = [pass_through(network, *problem(IMAGE_SIZE))[0] for network in networks]
    return same_step(losses, [*map(gradients, networks)])
