from dataclasses import replace

import pytest
import torch
from latent_making import B, C, own_text

from diff_dalle.models.cost import count_flops, peak_bytes
from diff_dalle.models.latent.stages import STAGE_C_SIZES, StageB, StageBConfig, StageC, zero_inputs
from diff_dalle.models.layers import to_channels_last


def stage(config):
    return (StageB if isinstance(config, StageBConfig) else StageC)(config, 50)


@pytest.mark.parametrize(
    "config", [B, C, own_text(B), own_text(C), replace(C, text_width=0, pooled_width=0, image_width=0)]
)
def test_zeros_pass_every_network(config):
    """At any size, here and on the meta device."""
    x, t, cond = zero_inputs(config, 2, 8, 12)
    assert stage(config)(x, t, cond).shape == x.shape == (2, config.channels, 8, 12)
    if config in (B, C):
        with torch.device("meta"):
            network = stage(config)
            calls = [lambda model, n=n: model(*zero_inputs(config, n, 8, 12)) for n in (2, 1)]
            flops, peaks = ([found(network, call) for call in calls] for found in (count_flops, peak_bytes))
        assert flops[0] == 2 * flops[1] > 0
        assert peaks[0] <= 2 * peaks[1]


def test_the_cost_of_stage_c_grows_with_its_positions():
    """A multiply-add for each weight and position, and little else: attention, at 4 × 4 positions, and conditions."""
    config = replace(STAGE_C_SIZES["tiny"], text=replace(C.text, text_length=1), text_width=0, pooled_width=0)
    with torch.device("meta"):
        network = stage(config)
        calls = [lambda model, n=n: model(*zero_inputs(config, 1, n, n)) for n in (4, 8)]
        flops, peaks = ([found(network, call) for call in calls] for found in (count_flops, peak_bytes))
    weights = 2 * sum(p.numel() for name, p in network.named_parameters() if ".mappers." not in name)
    assert 0.95 < flops[0] / (16 * weights) < 1.1
    assert 3.9 < flops[1] / flops[0] < 4.6 and peaks[1] > 2.5 * peaks[0]


def test_the_memory_of_a_block_of_stage_c_is_what_can_be_counted_by_hand():
    """Saved for the backward pass, in feature maps of the network's width: C its input, that of its norm and that of
    its MLP, 4 each before and after GELU and after dropout, and the mask, of one byte for each of 4 · width; T its
    input; A the inputs of its norm and of its last layer, and for positions and tokens together the input of the first
    layer, queries, keys and values."""
    width, side, tokens = 64, 12, 9 + 2 + 2
    wide = replace(C, widths=(width, width), heads=(2, 2), levels=("CTA", "CTA"), dropout=(0.1, 0.1), cond_width=width)
    wide = replace(wide, switch_level=(False,), down_repeats=(1, 1), up_repeats=(1, 1), micro_conditions=())
    peaks = []
    for blocks in (2, 4):
        with torch.device("meta"):
            network = stage(replace(wide, down_blocks=(blocks, 1), up_blocks=(1, 1)))
            inputs = zero_inputs(wide, 4, side, side)
            peaks.append(peak_bytes(to_channels_last(network), lambda model, inputs=inputs: model(*inputs)))
    maps = (3 + 3 * 4 + 1) + 1 + (2 + 4 * (1 + tokens / side**2))
    assert (peaks[1] - peaks[0]) / 2 == pytest.approx(4 * 4 * width * side**2 * maps, rel=0.02)
