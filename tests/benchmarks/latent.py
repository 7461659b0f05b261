"""A training step of stages B and C at their tiny sizes: ours against plain torch modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from network_making import randomize
from torch import Tensor, nn

from diff_dalle.batch import Conditioning
from diff_dalle.models.latent.config import LatentUnetConfig
from diff_dalle.models.latent.stages import STAGE_B_SIZES, STAGE_C_SIZES, StageB, StageBConfig, StageC, zero_inputs
from diff_dalle.models.layers import to_channels_last

from .baseline_latent import BaselineLatentUnet
from .regression import SPREAD, Differences, adamw_step, copy_weights, gradients, pass_through, same_function

STAGES: dict[str, LatentUnetConfig] = {"b": STAGE_B_SIZES["tiny"], "c": STAGE_C_SIZES["tiny"]}
SIDES = {STAGES["b"].channels: 16, STAGES["c"].channels: 8}  # of the latents of 64-pixel images, by their channels
BATCH_SIZE = 16
VOCABULARY = 1000  # few words: their embeddings, the same on both sides, should not count


def our_network(config: LatentUnetConfig) -> nn.Module:
    """Ours, none of whose weights is 0: zero-initialized layers hide those before."""
    torch.manual_seed(0)
    network = (StageB if isinstance(config, StageBConfig) else StageC)(config, VOCABULARY)  # type: ignore[arg-type]
    return to_channels_last(randomize(network, spread=SPREAD))


def plain_network(config: LatentUnetConfig) -> BaselineLatentUnet:
    """The baseline with the weights of ours."""
    network = BaselineLatentUnet(config, VOCABULARY)
    copy_weights(network, our_network(config).parameters())
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


def _work(network: nn.Module, config: LatentUnetConfig) -> Callable[[], object]:
    given = problem(config)
    return adamw_step(network, lambda: given)


def plain(stage: str) -> Callable[[], object]:
    return _work(plain_network(STAGES[stage]), STAGES[stage])


def ours(stage: str) -> Callable[[], object]:
    return _work(our_network(STAGES[stage]), STAGES[stage])


def gate(stage: str) -> Differences:
    config = STAGES[stage]
    networks = our_network(config), plain_network(config)
    outputs = [pass_through(network, *problem(config))[1] for network in networks]
    return same_function(outputs, *map(gradients, networks))
