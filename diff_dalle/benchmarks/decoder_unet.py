"""A training step of the decoder's U-Net: ours against plain torch modules, and with activation checkpointing.

The network is that of the documented example (186 million parameters) at a quarter of its width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..batch import Conditioning
from ..models.decoder.config import DecoderUnetConfig
from ..models.decoder.unet import DecoderUnet
from ..models.layers import to_channels_last
from .baseline_decoder_unet import BaselineDecoderUnet, to_plain
from .train_step import gradients

NETWORK = DecoderUnetConfig(dim=32, image_embed_dim=768, cond_dim=16, dim_mults=(1, 2, 4, 8), attn_heads=4)
IMAGE_SIZE, BATCH_SIZE = 64, 8
WARM_UP_SIZE = 8


def our_network(use_checkpoint: bool = False) -> DecoderUnet:
    """Ours, with the same weights for both values, none of them 0 (zero-initialized layers hide those before)."""
    torch.manual_seed(0)
    network = DecoderUnet(replace(NETWORK, checkpoint_during_training=use_checkpoint), learned_variance=True)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape))
    return to_channels_last(network)


def plain_network() -> BaselineDecoderUnet:
    """The baseline with the weights of ours."""
    ours, network = our_network(), BaselineDecoderUnet(NETWORK)
    with torch.no_grad():
        for parameter, value in zip(network.parameters(), to_plain(ours, list(ours.parameters())), strict=True):
            parameter.copy_(value)
    return network


def pass_through(network: nn.Module, size: int) -> tuple[Tensor, Tensor]:
    """Forward and backward pass on ``BATCH_SIZE`` images of ``size``×``size`` pixels, of which a quarter have no
    embedding. Returns the loss and the output."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(BATCH_SIZE, 3, size, size, generator=generator)
    target = torch.randn(BATCH_SIZE, 6, size, size, generator=generator)
    embedding = torch.randn(BATCH_SIZE, NETWORK.image_embed_dim or 0, generator=generator)
    cond = Conditioning(image_embedding=embedding).drop(torch.arange(BATCH_SIZE) % 4 == 3)
    network.zero_grad(set_to_none=True)
    output = network(x, torch.linspace(0, 999, BATCH_SIZE), cond=cond)
    loss = (output - target).square().mean()
    loss.backward()
    return loss.detach(), output.detach()


def _work(network: nn.Module) -> Callable[[], object]:
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, fused=True)

    def step():
        pass_through(network, IMAGE_SIZE)
        optimizer.step()

    pass_through(network, WARM_UP_SIZE)  # allocates the libraries' own memory, which must not count as activations
    optimizer.step()
    return step


def plain() -> Callable[[], object]:
    return _work(plain_network())


def ours() -> Callable[[], object]:
    return _work(our_network())


def ours_checkpointed() -> Callable[[], object]:
    return _work(our_network(use_checkpoint=True))


def gate() -> dict[str, tuple[float, float]]:
    """Maximum difference of the outputs, and maximum relative error of a parameter's gradient."""
    network, other = our_network(), plain_network()
    outputs = [pass_through(each, IMAGE_SIZE)[1] for each in (network, other)]
    pairs = zip(to_plain(network, gradients(network)), gradients(other), strict=True)
    gradient = max(((a - b).norm() / b.norm()).item() for a, b in pairs)
    return {"outputs": ((outputs[0] - outputs[1]).abs().max().item(), 1e-5), "gradients": (gradient, 1e-4)}


def checkpoint_gate() -> dict[str, tuple[float, float]]:
    """Relative difference of the losses, and maximum relative error of a parameter's gradient."""
    networks = [our_network(use_checkpoint) for use_checkpoint in (False, True)]
    loss, other_loss = (pass_through(network, IMAGE_SIZE)[0] for network in networks)
    gradient = max(((b - a).norm() / a.norm()).item() for a, b in zip(*map(gradients, networks), strict=True))
    return {"losses": (((other_loss - loss).abs() / loss).item(), 1e-6), "gradients": (gradient, 1e-6)}
