"""The transformer: every setting, shapes, gradients, positions, and what half precision and sharding spare."""

from dataclasses import fields, replace

import pytest
import torch
from network_making import (
    TEXT,
    TRANSFORMER,
    UNET,
    captions,
    make_generator,
    noisy,
    relative,
    without_gradient,
)
from refusing import refused
from torch.testing import assert_close

from diff_dalle.batch import Conditioning
from diff_dalle.models.cost import count_flops, peak_bytes
from diff_dalle.models.generator import Generator, GeneratorConfig
from diff_dalle.models.text_encoder import TextEncoderConfig
from diff_dalle.models.transformer import DenoiserConfig, Transformer
from diff_dalle.models.unet import UNet, UNetConfig
from diff_dalle.models.units import parts_of

CONFIG = replace(UNET, **TRANSFORMER)
ROUTED = {**TRANSFORMER, "depth": 5, "route_share": 0.75, "route_blocks": (1, 3)}


def routed(**changed):
    """A network, a call of it with routing keys, and the conditions."""
    network, (x, t) = make_generator(**{**ROUTED, **changed}), noisy()
    cond = replace(network.encode_text(captions()), routing_keys=torch.tensor([3, 2**50, -9]))
    return network, x, t, cond


def test_a_share_of_the_image_tokens_skips_a_span_of_blocks():
    """Others in each sample, the same in any batch; blocks outside have all of them, and what skipped is unchanged."""
    network, x, t, cond = routed()
    trunk, inputs, turned, outputs, maps = network.denoiser.encoder, [], [], [], []
    for block, named_map in zip(trunk.blocks, trunk.maps, strict=True):
        block.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
        block.register_forward_pre_hook(lambda _, given: turned.append(given[3]))
        block.register_forward_hook(lambda _, given, out: outputs.append(out))
        named_map.register_forward_hook(lambda _, given, out: maps.append(out.flatten(2).transpose(1, 2)))
    whole, texts = network(x, t, cond), 8
    assert [each.shape[1] - texts for each in inputs] == [16, 4, 4, 16, 16]
    kept = (maps[2] - maps[0]).abs().amax(2) > 0
    assert kept.sum(1).tolist() == [4, 4, 4] and not torch.equal(kept[0], kept[1]) and not torch.equal(kept[1], kept[2])
    assert torch.equal(inputs[3][:, :16], maps[2]) and torch.equal(inputs[3][:, 16:], outputs[2][:, 4:])
    assert torch.equal(inputs[1][:, :4].flatten(0, 1), maps[0][kept])
    assert torch.equal(inputs[1][:, 4:], outputs[0][:, 16:])
    for i in range(3):
        places = [*kept[i].nonzero()[:, 0].tolist(), *range(16, 16 + texts)]
        assert torch.equal(turned[1][:, i], turned[0][:, places]) and torch.equal(turned[3], turned[0])
    assert torch.equal(outputs[2][:, :4].flatten(0, 1), maps[2][kept])
    for i in range(3):
        assert_close(network(x[i : i + 1], t[i : i + 1], cond.select([i])), whole[i : i + 1])
    whole.square().mean().backward()
    assert not without_gradient(network)


def test_tokens_that_take_a_span_are_placed_and_see_as_without_routing():
    """With nothing left out, all is as without routing; so it is without keys, where the share is another."""
    network, x, t, cond = routed(route_share=0.01)
    plain = replace(cond, routing_keys=None)
    assert_close(network(x, t, cond), network(x, t, plain))
    network, x, t, cond = routed()
    other, *_ = routed(route_share=0.0, route_blocks=())
    expected = other(x, t, plain)
    assert torch.equal(network(x, t, plain), expected) and relative(network(x, t, cond), expected) > 1e-4


def test_routing_saves_flops_by_the_share_of_the_blocks():
    def flops(keys):
        with torch.device("meta"):
            config = replace(CONFIG, image_size=64, depth=12, route_share=0.5)
            cond = Conditioning(routing_keys=keys and torch.empty(2, dtype=torch.int64))
            x, t = torch.empty(2, 3, 64, 64), torch.empty(2)
            return count_flops(Transformer(config), lambda network: network(x, t, cond))

    assert 0.65 < flops(True) / flops(None) < 0.8  # half of the tokens in 6 of 12 blocks


def test_the_output_is_zero_at_initialization():
    for config in (CONFIG, replace(CONFIG, output_conv=0)):
        assert not Transformer(config, out_channels=6)(*noisy()).any()


def test_a_block_is_the_identity_at_initialization():
    network, (x, t) = Transformer(replace(CONFIG, depth=4)), noisy()
    last, maps, _ = network.encoder(x, t, Conditioning())
    assert len(maps) == 3 and all(torch.equal(last, each) for each in maps)


@pytest.mark.parametrize("position_patches", [0, 4])
def test_positions_of_other_sizes_are_scaled(position_patches):
    """To as many patches along a side in the geometric mean; text has position 0, that of the center."""
    trunk = Transformer(replace(CONFIG, position_patches=position_patches)).encoder
    found = trunk._positions((2, 8), torch.device("cpu")).unflatten(0, (2, 8))
    scale = 1 if position_patches == 0 else position_patches / 4
    assert_close(found[:, 0, 0], scale * torch.tensor([-0.5, 0.5]))
    assert_close(found[0, :, 1], scale * (torch.arange(8) - 3.5))
    assert_close(
        trunk._positions((8, 8), torch.device("cpu"))[0], torch.tensor([-3.5, -3.5]) * (0.5 if position_patches else 1)
    )


def test_patches_are_told_apart_by_their_positions():
    """Without positions, an image of moved patches has the moved output."""
    network = make_generator(
        TextEncoderConfig(enc_attn_dim=0), **{**TRANSFORMER, "output_conv": 0, "separate_blocks": 0}
    )
    x, t = noisy()
    moved = network(x.roll(4, 3), t).roll(-4, 3)
    assert relative(moved, network(x, t)) > 1e-3
    network.denoiser.encoder._positions = lambda size, device: torch.zeros(size[0] * size[1], 2)
    assert_close(network(x.roll(4, 3), t).roll(-4, 3), network(x, t))


def test_separate_blocks_have_weights_of_their_own_for_text():
    network, (x, t), cond = make_generator(**TRANSFORMER), noisy(), captions()
    first, second, _ = network.denoiser.encoder.blocks
    assert (len(first.streams), len(second.streams)) == (2, 1)
    encoded = network.encode_text(cond)
    out = network(x, t, encoded)
    with torch.no_grad():
        first.streams[1].attention_qkv.weight += 0.5
    assert relative(network(x, t, encoded), out) > 1e-3


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"image_size": 18}, "image_size is 18, but must be a multiple of patch_size .4."),
        ({"separate_blocks": 2}, "separate_blocks is 2, but must be below half of depth .3."),
        ({"num_heads": 8}, "num_heads is 8, but must give heads of a multiple of 4 channels"),
        ({"num_head_channels": 2}, "num_head_channels is 2, but must give heads of a multiple of 4"),
        ({"num_heads": 3}, "num_heads is 3, but must divide the 16 channels"),
        ({"network": "mixer"}, "network is 'mixer', but must be one of unet, transformer"),
        ({"depth": 0}, "depth is 0"),
        ({"route_share": 1.0}, "route_share is 1, but"),
        ({"route_share": 0.5}, "route_blocks is '?2,-1'?, but must be two increasing numbers below depth .3."),
        ({"route_share": 0.5, "route_blocks": (1, 3)}, "route_blocks is '?1,3"),
        ({"route_share": 0.5, "route_blocks": (1, 1)}, "route_blocks is '?1,1"),
        ({"route_blocks": (1,)}, "route_blocks is .*must have 2 values"),
    ],
)
def test_impossible_settings_are_refused(changed, message):
    with refused(message):
        replace(CONFIG, **changed)
    with refused("the image|image_size is 16×18"):
        Transformer(CONFIG)(*noisy(size=(18, 16)))


def test_separate_blocks_are_for_text():
    with refused("separate_blocks is 1, but .*enc_attn_dim is 0"):
        GeneratorConfig(CONFIG, TextEncoderConfig(enc_attn_dim=0))


def test_the_default_is_the_unet():
    """With all settings that it has as a U-Net's config alone, and under the same names."""
    assert isinstance(Generator(GeneratorConfig(UNET, TEXT), 50).unet, UNet)
    old = UNetConfig(*(getattr(UNET, field.name) for field in fields(UNetConfig)))
    assert (UNET.divisor, UNET.emb_width, UNET.mults) == (old.divisor, old.emb_width, old.mults)


def test_norms_and_modulation_stay_in_full_precision():
    network = make_generator(**TRANSFORMER)
    parts = parts_of(network, torch.bfloat16)
    spared = {id(p) for module in parts.full for p in module.parameters(recurse=False)}
    for name, parameter in network.denoiser.named_parameters():
        expected = (
            "_norm." in name or "modulation" in name or "time_emb" in name or name.startswith(("out", "pixel_conv"))
        )
        assert (id(parameter) in spared) == (expected or "text_emb" in name), name
    assert len(parts.blocks) == 3 + TEXT.enc_depth


def test_activation_checkpointing_saves_memory():
    def peak(use_checkpoint):
        config = DenoiserConfig(64, 64, network="transformer", patch_size=4, depth=12, use_checkpoint=use_checkpoint)
        with torch.device("meta"):
            return peak_bytes(Transformer(config), lambda network: network(torch.empty(2, 3, 64, 64), torch.empty(2)))

    assert peak(True) <= 0.4 * peak(False)
