"""Every kind of network is divided into blocks that hold nearly all of it, or is refused."""

import pytest
import torch
from refusing import refused

from diff_dalle.checkpoints.kinds import find_kind
from diff_dalle.commands.info import parse_info
from diff_dalle.models.adapters.controlnet import UnetControlConfig, UnetControlNet
from diff_dalle.models.adapters.latent_controlnet import LatentControlConfig, LatentControlNet
from diff_dalle.models.attention import AttentionBlock
from diff_dalle.models.latent.stages import STAGE_C_SIZES
from diff_dalle.models.layers import ResBlock
from diff_dalle.models.units import parts_of
from diff_dalle.recipes.planning.cost import shapes_of

PRESETS = (
    "generator_64",
    "upsampler_256",
    "classifier_64",
    "decoder_example",
    "cascade_stage_b_3b",
    "cascade_stage_c_3b",
)


def networks(preset):
    run = parse_info(preset.split() if " " in preset else ["--preset", preset])
    settings = find_kind(run.kind).of_run(run)
    with torch.device("meta"):
        return [settings.build(1000, name) for name in settings.trainees]


TRANSFORMER = "--network transformer --patch_size 8 --num_channels 128 --enc_attn_dim 128 --enc_depth 1"


@pytest.mark.parametrize("preset", [*PRESETS, TRANSFORMER])
def test_blocks_hold_nearly_all_and_are_small(preset):
    """None lies in another: it would be gathered twice."""
    for network in networks(preset):
        *blocks, rest = (sum(map(torch.Size.numel, map(torch.Size, block))) for block in shapes_of(network))
        total = sum(each.numel() for each in network.parameters())
        assert sum(blocks) + rest == total
        assert rest <= 0.2 * total and max(blocks) <= 0.2 * total, (rest / total, max(blocks) / total)
        assert all(callable(getattr(network, name)) for name in parts_of(network, None).methods)
        found = parts_of(network, None).blocks
        inside = {id(each) for block in found for each in block.modules() if each is not block}
        assert not inside & set(map(id, found))


def test_a_controlnet_is_divided_as_the_encoder_that_it_copies():
    """Of a pixel generator; that of stage C, which is small, has blocks only in its largest form."""
    (generator,), base = networks("shapes_32"), STAGE_C_SIZES["1B"]
    with torch.device("meta"):
        copy = UnetControlNet(UnetControlConfig(8), generator.config, 1)
        small, large = (LatentControlNet(LatentControlConfig((0,), name), base, 1) for name in ("simple", "large"))
    expected = [each for each in generator.unet.encoder.modules() if isinstance(each, (ResBlock, AttentionBlock))]
    assert list(map(type, parts_of(copy, None).blocks)) == list(map(type, expected)) and len(expected) > 3
    assert list(map(len, (parts_of(small, None).blocks, parts_of(large, None).blocks))) == [0, 8]


@pytest.mark.parametrize("preset", ["cascade_stage_a_tiny", "cascade_semantic_tiny"])
def test_networks_without_blocks_are_refused(preset):
    (network,) = networks(preset)
    with refused("so its weights cannot be sharded: set parallel ddp"):
        parts_of(network, None)
    assert shapes_of(network) == []
