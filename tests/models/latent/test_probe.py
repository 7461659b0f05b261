from dataclasses import replace

import pytest
import torch
from latent_making import B, C, own_text

from diff_dalle.models.cost import measure
from diff_dalle.models.latent.probe import zero_inputs
from diff_dalle.models.latent.stage_b import StageB, StageBConfig
from diff_dalle.models.latent.stage_c import STAGE_C_SIZES, StageC


def stage(config):
    return (StageB if isinstance(config, StageBConfig) else StageC)(config, 50)


@pytest.mark.parametrize(
    "config", [B, C, own_text(B), own_text(C), replace(C, text_width=0, pooled_width=0, image_width=0)]
)
def test_zeros_pass_every_network(config):
    """At any size, here and on the meta device."""
    x, t, cond = zero_inputs(config, 2, 8, 12)
    assert stage(config)(x, t, cond).shape == x.shape == (2, config.channels, 8, 12)
    with torch.device("meta"):
        network, inputs = stage(config), zero_inputs(config, 2, 8, 12)
        cost = measure(network, lambda model: model(*inputs), images=2)
        alone = measure(network, lambda model: model(*zero_inputs(config, 1, 8, 12)))
    assert cost.parameters == sum(p.numel() for p in network.parameters())
    assert cost.flops == alone.flops > 0
    assert cost.activation_bytes <= alone.activation_bytes


def test_the_cost_of_stage_c_grows_with_its_positions():
    """A multiply-add for each weight and position, and little else: attention, at 4 × 4 positions, and conditions."""
    config = replace(STAGE_C_SIZES["tiny"], text=replace(C.text, text_length=1), text_width=0, pooled_width=0)
    with torch.device("meta"):
        network = stage(config)
        costs = [measure(network, lambda model, n=n: model(*zero_inputs(config, 1, n, n))) for n in (4, 8)]
    timestep = sum(p.numel() for name, p in network.named_parameters() if ".mappers." in name)
    weights = 2 * (costs[0].parameters - timestep)
    assert 0.95 < costs[0].flops / (16 * weights) < 1.1
    assert 3.9 < costs[1].flops / costs[0].flops < 4.6 and costs[1].activation_bytes > 3 * costs[0].activation_bytes
