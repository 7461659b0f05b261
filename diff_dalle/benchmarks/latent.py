"""A training step of stages B and C at their tiny sizes: ours against plain torch modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from ..batch import Conditioning
from ..models.latent.config import LatentUnetConfig
from ..models.latent.probe import zero_inputs
from ..models.latent.stage_b import STAGE_B_SIZES, StageB, StageBConfig
from ..models.latent.stage_c import STAGE_C_SIZES, StageC
from ..models.layers import to_channels_last
from .baseline_latent import BaselineLatentUnet
from .train_step import gradients

B, C = STAGE_B_SIZES["tiny"], STAGE_C_SIZES["tiny"]
SIDES = {B.channels: 16, C.channels: 8}  # of the latents of 64-pixel images, by their channels
BATCH_SIZE = 16
VOCABULARY = 1000  # few words: their embeddings, the same on both sides, should not count


def our_network(config: LatentUnetConfig) -> nn.Module:
    """Ours, none of whose weights is 0: zero-initialized layers hide those before."""
    torch.manual_seed(0)
    network = (StageB if isinstance(config, StageBConfig) else StageC)(config, VOCABULARY)  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape))
    return to_channels_last(network)


def plain_network(config: LatentUnetConfig) -> BaselineLatentUnet:
    """The baseline with the weights of ours."""
    network = BaselineLatentUnet(config, VOCABULARY)
    with torch.no_grad():
        for parameter, value in zip(network.parameters(), our_network(config).parameters(), strict=True):
            parameter.copy_(value.view(parameter.shape))
    return network


def problem(config: LatentUnetConfig) -> tuple[Tensor, Tensor, Conditioning, Tensor]:
    """Noisy latents, noise conditions, what the network is conditioned on, and targets."""
    side, generator = SIDES[config.channels], torch.Generator().manual_seed(0)
    x, _, cond = zero_inputs(config, BATCH_SIZE, side, side)
    x, target = torch.randn(2, *x.shape, generator=generator)
    if cond.tokens is not None:
        cond = replace(cond, tokens=torch.randint(VOCABULARY, cond.tokens.shape, generator=generator))
    if cond.semantic is not None:
        cond = replace(cond, semantic=torch.randn(BATCH_SIZE, cond.semantic.shape[1], 8, 8, generator=generator))
    return x, torch.linspace(0, 1, BATCH_SIZE), cond, target


def pass_through(network: nn.Module, x: Tensor, t: Tensor, cond: Conditioning, target: Tensor) -> tuple[Tensor, Tensor]:
    """Forward and backward pass. Returns the loss and the output."""
    network.zero_grad(set_to_none=True)
    output = network(x, t, cond=cond)
    loss = (output - target).square().mean()
    loss.backward()
    return loss.detach(), output.detach()


def _work(network: nn.Module, config: LatentUnetConfig) -> Callable[[], object]:
    optimizer, given = torch.optim.AdamW(network.parameters(), lr=1e-4, fused=True), problem(config)

    def step() -> Tensor:
        loss, _ = pass_through(network, *given)
        optimizer.step()
        return loss

    return step


def _plain(config: LatentUnetConfig) -> Callable[[], object]:
    return _work(plain_network(config), config)


def _ours(config: LatentUnetConfig) -> Callable[[], object]:
    return _work(our_network(config), config)


def _gate(config: LatentUnetConfig) -> dict[str, tuple[float, float]]:
    """Maximum difference of the outputs, and maximum relative error of a parameter's gradient."""
    networks = our_network(config), plain_network(config)
    ours, plain = (pass_through(network, *problem(config))[1] for network in networks)
    pairs = zip(*map(gradients, networks), strict=True)
    gradient = max(((a.view(b.shape) - b).norm() / b.norm()).item() for a, b in pairs)
    return {"outputs": ((ours - plain).abs().max().item(), 1e-5), "gradients": (gradient, 1e-4)}


plain_b, plain_c = partial(_plain, B), partial(_plain, C)
ours_b, ours_c = partial(_ours, B), partial(_ours, C)
gate_b, gate_c = partial(_gate, B), partial(_gate, C)
