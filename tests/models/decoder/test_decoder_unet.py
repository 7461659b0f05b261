from dataclasses import replace

import pytest
import torch
from decoder_making import TINY, decoder_conditions
from network_kinds import COMBINED
from network_making import noisy, randomize, relative
from refusing import refused
from torch.nn import functional as F
from torch.testing import assert_close

from diff_dalle.batch import Conditioning
from diff_dalle.config import from_dict, to_dict
from diff_dalle.diffusion.guidance import extrapolated
from diff_dalle.models.decoder.blocks import LinearAttention, MultiQueryAttention, NullAttention, ResidualBlock
from diff_dalle.models.decoder.config import DecoderUnetConfig
from diff_dalle.models.decoder.unet import DecoderUnet
from diff_dalle.models.layers import to_channels_last
from diff_dalle.models.units import compile_training


def make(config=TINY, **conditions):
    torch.manual_seed(0)
    return randomize(DecoderUnet(config, **conditions))


def run(network, cond, size=(16, 16)):
    x, t = noisy(len(cond.image_embedding), size, network.config.channels)
    return network(x, t, cond)


def gradients(network, cond):
    network.zero_grad()
    out = run(network, cond)
    out.square().mean().backward()
    return out, [p.grad for p in network.parameters()]


def test_the_network_of_the_documented_example_has_186_million_parameters():
    """186.28 million: less the null text tokens that a network without text does not need."""
    config = DecoderUnetConfig(dim=128, image_embed_dim=768, cond_dim=64, dim_mults=(1, 2, 4, 8))
    with torch.device("meta"):
        network = DecoderUnet(config, learned_variance=True)
    assert sum(p.numel() for p in network.parameters()) == pytest.approx(186.3e6, abs=0.05e6)


@pytest.mark.parametrize(("name", "kind"), [("self_attn", MultiQueryAttention), ("sparse_attn", LinearAttention)])
def test_attention_over_positions_is_where_it_is_asked_for(name, kind):
    network = make(replace(TINY, attend_at_middle=False, **{name: (False, True)}))
    found = [each for each, module in network.named_modules() if isinstance(module, kind)]
    assert found == ["downs.1.attention.attention", "ups.0.attention.attention"]
    both = make(replace(TINY, attend_at_middle=False, self_attn=(True, False), sparse_attn=(True,)))
    linear = [each for each, module in both.named_modules() if isinstance(module, LinearAttention)]
    assert linear == found


def test_settings_of_stages_are_one_value_or_a_list_in_files():
    given = {"dim": 128, "dim_mults": [1, 2], "self_attn": True, "num_resnet_blocks": [1, 3], "resnet_groups": 4}
    config = from_dict(DecoderUnetConfig, given)
    assert from_dict(DecoderUnetConfig, to_dict(config)) == config
    assert [(s.attention, s.blocks, s.groups) for s in config.stages] == [("self", 1, 4), ("self", 3, 4)]
    with refused("self_attn is 3, but must be comma-separated True or False"):
        from_dict(DecoderUnetConfig, {"dim": 128, "self_attn": 3})


def test_one_value_stands_for_all_stages_and_widths_follow():
    config = replace(TINY, dim_mults=(3, 1, 2), init_dim=12, self_attn=(True,), resnet_groups=(4, 8, 2))
    assert [(s.in_width, s.out_width, s.width) for s in config.stages] == [(12, 24, 12), (24, 8, 24), (8, 16, 8)]
    assert [s.attention for s in config.stages] == ["self"] * 3 and [s.groups for s in config.stages] == [4, 8, 2]
    efficient = replace(config, memory_efficient=True)
    assert [s.width for s in efficient.stages] == [24, 8, 16] and (config.divisor, efficient.divisor) == (4, 8)


def test_a_network_without_a_condition_ignores_it():
    config = replace(TINY, cond_on_text_encodings=False)
    network, cond = make(config, image_embedding=False), decoder_conditions()
    x, t = noisy()
    assert torch.equal(network(x, t), network(x, t, cond))


def test_a_condition_that_is_missing_or_of_another_width_is_named():
    network, cond = make(low_res=True, low_res_level=True), decoder_conditions()
    for name in ("image_embedding", "text_states", "mask", "low_res", "low_res_level"):
        with refused(name):
            network(*noisy(), replace(cond, **{name: None}))
    for name, setting in (("image_embedding", "image_embed_dim"), ("text_states", "text_embed_dim")):
        with refused(rf"width 4, but {setting} is"):
            run(network, replace(cond, **{name: getattr(cond, name)[..., :4]}))


def test_every_condition_acts():
    """Self-conditioning without an image is that with zeros; low_res is resized bilinearly."""
    network, cond = make(replace(TINY, self_cond=True), low_res=True, low_res_level=True), decoder_conditions()
    cond = replace(cond, embedding_mask=None, mask=torch.ones(3, 5, dtype=torch.bool), text_states=torch.randn(3, 5, 5))
    out = run(network, cond)
    for name in ("image_embedding", "text_states", "mask", "low_res", "low_res_level"):
        value = getattr(cond, name)
        changed = replace(cond, **{name: ~value if name == "mask" else value + 1})
        assert (run(network, changed) - out).flatten(1).norm(dim=1).min() > 1e-3, name
    without = run(network, replace(cond, extra={}))
    assert relative(without, out) > 1e-3
    assert torch.equal(run(network, replace(cond, extra={"self_cond": torch.zeros(3, 3, 16, 16)})), without)
    resized = replace(cond, low_res=F.interpolate(cond.low_res, (16, 16), mode="bilinear"))
    assert torch.equal(run(network, resized), out)


@pytest.mark.parametrize("name", ["image", "text"])
def test_a_dropped_condition_has_no_effect_and_is_learned(name):
    """Samples where it is dropped have one output whatever it was; the learned values give it, alone or in a batch."""
    network, where = make(), torch.tensor([True, False, True])
    drop = Conditioning.drop_embedding if name == "image" else Conditioning.drop_text
    cond = replace(decoder_conditions(n=3), embedding_mask=None)
    other = replace(cond, image_embedding=cond.image_embedding + 1) if name == "image" else cond
    other = replace(other, text_states=other.text_states * 2) if name == "text" else other
    outs = [run(network, drop(each, where)) for each in (cond, other)]
    assert_close(outs[0][where], outs[1][where])
    changes = [(a - b).norm() for a, b in zip(*outs, strict=True)]
    assert changes[1] > 1e-3 and (run(network, cond) - outs[0])[0].norm() > 1e-3
    nulls = [p for each, p in network.named_parameters() if each.startswith(f"conditions.{name}.null")]
    assert len(nulls) == 1 + (name == "image")
    for null in nulls:
        before = run(network, drop(cond, where))
        with torch.no_grad():
            null.neg_()  # a constant would be removed by the norm of the tokens
        moved = (run(network, drop(cond, where)) - before).flatten(1).norm(dim=1)
        # Every text here is shorter than max_text_len, so that it has learned tokens at its end.
        assert (moved[where] > 1e-3).all() and (name == "text" or moved[1] == 0)


@pytest.mark.parametrize("added", [False, True])
def test_the_image_embedding_is_added_to_the_timestep_vector_if_asked(added):
    network, cond = (
        make(replace(TINY, add_image_embeds_to_time=added)),
        replace(decoder_conditions(), embedding_mask=None),
    )
    vectors = [
        network.conditions(torch.tensor([1, 2, 3]), network.encode_text(replace(cond, image_embedding=embedding)))[0]
        for embedding in (cond.image_embedding, cond.image_embedding + 1)
    ]
    assert torch.equal(*vectors) != added


def test_embedding_and_text_are_dropped_independently():
    network, everywhere = make(), torch.ones(3, dtype=torch.bool)
    cond = decoder_conditions(seed=4)
    outs = [run(network, each) for each in (cond, cond.drop_text(everywhere), cond.drop_embedding(everywhere))]
    outs.append(run(network, cond.drop(everywhere)))
    for i, one in enumerate(outs):
        for other in outs[:i]:
            assert relative(one[:2], other[:2]) > 1e-3


def test_text_beyond_its_end_and_beyond_max_text_len_has_no_effect():
    network, cond = make(), decoder_conditions()
    noise = torch.randn(3, 5, 5)
    scrambled = replace(cond, text_states=torch.where(cond.mask[..., None], cond.text_states, noise))
    assert_close(run(network, scrambled), run(network, cond))
    states, mask = F.pad(cond.text_states, (0, 0, 0, 6), value=1.0), F.pad(cond.mask, (0, 6))
    padded = replace(cond, text_states=states, mask=mask)
    assert_close(run(network, padded), run(network, cond))
    long = Conditioning(image_embedding=torch.randn(2, 6), text_states=torch.randn(2, 9, 5))
    long = replace(long, mask=torch.ones(2, 9, dtype=torch.bool))
    cut = replace(long, text_states=long.text_states[:, :7], mask=long.mask[:, :7])
    assert_close(run(network, long), run(network, cut))


def test_only_the_middle_sees_the_text():
    network, cond = make(replace(TINY, dim_mults=(3, 1, 2))), decoder_conditions()
    seen = []
    for down in network.downs:
        down.register_forward_hook(lambda module, inputs, out: seen.append(out))
    for text in (cond.text_states, cond.text_states * 2):
        run(network, replace(cond, text_states=text))
    assert all(torch.equal(a, b) for a, b in zip(seen[:3], seen[3:], strict=True))


def test_conditions_can_be_projected_in_advance():
    """With the same result, without another projection at every step, and for guidance after it."""
    network, cond = make(), decoder_conditions()
    expected, encoded = run(network, cond), network.encode_text(cond)
    assert network.encode_text(encoded) is encoded
    calls = []
    for layer in (network.conditions.image.tokens, network.conditions.image.emb, network.conditions.text.tokens):
        layer.register_forward_hook(lambda *args: calls.append(1))
    assert torch.equal(run(network, encoded), expected) and not calls
    everywhere = torch.ones(3, dtype=torch.bool)
    null = cond.drop(everywhere)
    assert_close(run(network, encoded.drop(everywhere)), run(network, null))
    x, t = noisy()
    with torch.no_grad():
        both = Conditioning.concat([encoded, network.encode_text(null)])
        guided = extrapolated(network, both, 3.0, 0.0, 0.0)(x, t)
        plain, baseline = run(network, cond), run(network, null)
    assert_close(guided, baseline + 3 * (plain - baseline), atol=1e-4, rtol=1e-4)


def test_the_output_is_zero_at_initialization():
    x, t = noisy()
    network = DecoderUnet(replace(TINY, final_conv_kernel_size=3), low_res=True, learned_variance=True)
    out = network(x, t, decoder_conditions())
    assert out.shape == (3, 6, 16, 16) and not out.any()


def test_a_network_can_be_built_on_the_meta_device():
    with torch.device("meta"):
        network = DecoderUnet(TINY)
        cond = Conditioning(torch.empty(2, 5), torch.ones(2, 5, dtype=torch.bool), text_states=torch.empty(2, 5, 5))
        cond = replace(cond, image_embedding=torch.empty(2, 6), embedding_mask=torch.ones(2, dtype=torch.bool))
        assert network(torch.empty(2, 3, 16, 16), torch.empty(2), cond).shape == (2, 3, 16, 16)
    network.to_empty(device="cpu").load_state_dict(make().state_dict())
    assert torch.equal(run(network, decoder_conditions()), run(make(), decoder_conditions()))


@pytest.mark.slow
def test_blocks_are_captured_as_one_graph_each():
    torch._dynamo.reset()
    config = replace(TINY, self_attn=(False, True), sparse_attn=(True,), checkpoint_during_training=True)
    network, cond, graphs = make(config, low_res=True), decoder_conditions(), []
    out, expected = gradients(network, cond)
    compile_training(network, lambda graph, inputs: graphs.append(graph) or graph.forward)
    compiled, found = gradients(network, cond)
    captured = len(graphs)
    run(network, decoder_conditions(seed=5))
    assert len(graphs) == captured > 0
    assert_close(compiled, out, atol=1e-5, rtol=1e-4)
    for a, b in zip(found, expected, strict=True):
        assert_close(a, b, atol=1e-5, rtol=1e-3)


def test_activation_checkpointing_applies_to_blocks_and_attention():
    network = make(replace(TINY, checkpoint_during_training=True, self_attn=(False, True)))
    layers = [m.first.conv for m in network.modules() if isinstance(m, ResidualBlock)]
    layers += [m.norm for m in network.modules() if isinstance(m, NullAttention)]
    calls, cond = [], decoder_conditions()
    for layer in layers:
        layer.register_forward_pre_hook(lambda module, args: calls.append(module))
    gradients(network, cond)
    assert [calls.count(layer) for layer in layers] == [2] * len(layers)
    calls.clear()
    with torch.no_grad():
        run(network, cond)
    assert [calls.count(layer) for layer in layers] == [1] * len(layers)


@pytest.mark.parametrize("changes", COMBINED.values(), ids=COMBINED)
@pytest.mark.parametrize("converted", [False, True])
def test_activations_stay_channels_last(changes, converted):
    """Also where the weights are not stored so, as sharded ones cannot be; then except for the result."""
    config, seen = replace(TINY, **{**changes, "dim": 16, "init_dim": 16}), []
    network = make(config, low_res=True)
    if converted:
        to_channels_last(network)
    for module in set(network.modules()) - (set() if converted else {network, network.out_conv}):
        module.register_forward_hook(lambda module, inputs, out: seen.append((type(module).__name__, out)))
    run(network, decoder_conditions(config))
    maps = [(name, out) for name, out in seen if isinstance(out, torch.Tensor) and out.dim() == 4]
    assert len(maps) > 30
    assert {name for name, out in maps if not out.is_contiguous(memory_format=torch.channels_last)} == set()


def test_conditions_norms_and_output_are_computed_in_float32_under_autocast():
    network, cond, seen = make(low_res=True, low_res_level=True), decoder_conditions(), {}
    for name, module in network.named_modules():
        module.register_forward_hook(lambda module, inputs, out, name=name: seen.update({name: out}))
    statistics = []
    plain = F.layer_norm
    with torch.autocast("cpu", torch.bfloat16), pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "layer_norm", lambda x, *args: statistics.append(x.dtype) or plain(x, *args))
        run(network, cond)
    assert all(out.dtype == torch.float32 for out in seen["conditions"]) and seen["out_conv"].dtype == torch.float32
    assert seen["conditions.time"].dtype == seen["conditions.text.tokens"].dtype == torch.float32
    assert seen["downs.0.block"].dtype == seen["middle_attention"].dtype == torch.bfloat16
    assert len(statistics) > 8 and set(statistics) == {torch.float32}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(
            ({name: 0}, f"{name} is 0")
            for name in (
                "dim",
                "image_embed_dim",
                "channels",
                "attn_heads",
                "attn_dim_head",
                "num_image_tokens",
                "num_time_tokens",
                "max_text_len",
                "init_dim",
            )
        ),
        ({"dim": 1}, "dim is 1, .*at least 2"),
        ({"dim_mults": ()}, "dim_mults is empty"),
        ({"dim_mults": (1, 0)}, "dim_mults is 0"),
        ({"text_embed_dim": None}, "text_embed_dim is none"),
        ({"cond_dim": -1}, "cond_dim is -1"),
        ({"num_resnet_blocks": (1, 0)}, "num_resnet_blocks is 0"),
        ({"resnet_groups": (0,)}, "resnet_groups is 0"),
        ({"resnet_groups": (3,)}, "resnet_groups has 3, but must divide the 8 channels"),
        ({"init_dim": 6}, "resnet_groups has 4, but must divide the 6 channels"),
        ({"init_dim": 6, "memory_efficient": True}, "resnet_groups has 4, but must divide the 6 channels"),
        ({"dim_mults": (1, 2), "resnet_groups": (4, 16)}, "resnet_groups has 16, but must divide the 8 channels"),
        ({"self_attn": (True, False, True)}, "self_attn has 3 values, .*the 2 stages"),
        ({"sparse_attn": ()}, "sparse_attn has 0 values"),
        ({"resnet_groups": (4, 4, 4)}, "resnet_groups has 3 values"),
        ({"as_published": True, "dim": 2}, "dim is 2, but must be even and at least 4 with as_published"),
        ({"num_resnet_blocks": (1, 1, 1)}, "num_resnet_blocks has 3 values"),
        ({"init_conv_kernel_size": 4}, "init_conv_kernel_size has 4, .*odd"),
        ({"init_cross_embed_kernel_sizes": (3, 8)}, "init_cross_embed_kernel_sizes has 8, .*odd"),
        ({"init_cross_embed_kernel_sizes": ()}, "init_cross_embed_kernel_sizes is empty"),
        ({"init_cross_embed_kernel_sizes": (1,) * 5}, "init_cross_embed_kernel_sizes has 5 sizes, but 8 channels"),
        ({"cross_embed_downsample_kernel_sizes": (3,)}, "cross_embed_downsample_kernel_sizes has 3, .*even"),
        (
            {"cross_embed_downsample_kernel_sizes": (2,) * 5, "cross_embed_downsample": True},
            "cross_embed_downsample_kernel_sizes has 5 sizes, but 8 channels",
        ),
        ({"final_conv_kernel_size": 0}, "final_conv_kernel_size has 0"),
    ],
)
def test_impossible_settings_are_refused(changes, message):
    with refused(message):
        replace(TINY, **changes)


@pytest.mark.parametrize(("efficient", "divisor"), [(False, 4), (True, 8)])
def test_image_sizes_that_the_stages_do_not_divide_are_refused(efficient, divisor):
    network = make(replace(TINY, dim_mults=(3, 1, 2), memory_efficient=efficient))
    with refused(f"image size is {divisor + 2}×{divisor}, but must be a multiple of {divisor}"):
        run(network, decoder_conditions(), size=(divisor, divisor + 2))
    assert run(network, decoder_conditions(), size=(divisor, 2 * divisor)).shape == (3, 3, divisor, 2 * divisor)


def test_impossible_conditions_are_refused():
    with refused("image_embed_dim is none"):
        DecoderUnet(replace(TINY, image_embed_dim=None))
    DecoderUnet(replace(TINY, image_embed_dim=None), image_embedding=False)
    with refused("low_res_level is the noise level of low_res"):
        DecoderUnet(TINY, low_res_level=True)
