"""Stages B and C: order of blocks against a plain walk through them, sizes, conditions, control, initial values."""

import math
from dataclasses import replace

import pytest
import torch
from latent_making import B, C, conditioning, latents, make, own_text
from network_making import VOCABULARY, relative
from refusing import refused
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from diff_dalle.batch import Conditioning
from diff_dalle.models.cost import count_flops, peak_bytes
from diff_dalle.models.dropout import Dropout
from diff_dalle.models.latent.blocks import (
    AttentionBlock,
    Context,
    ConvBlock,
    FeedForward,
    ResponseMlp,
    TimestepBlock,
    noise_embedding,
)
from diff_dalle.models.latent.stages import STAGE_B_SIZES, STAGE_C_SIZES, StageB, StageBConfig, StageC

BOTH = pytest.mark.parametrize("config", [B, C], ids=["B", "C"])
BOTH_TEXTS = pytest.mark.parametrize(
    "config", [B, C, own_text(B), own_text(C)], ids=["B", "C", "B own text", "C own text"]
)
KINDS = {"C": ConvBlock, "T": TimestepBlock, "A": AttentionBlock, "F": FeedForward}


def run(network, cond, size=(8, 12), **arguments):
    x, t = latents(network.config, size=size)
    return network(x, t, cond, **arguments)


# ------------------------------------------------------------------------------------------------------- the whole walk


def resize(x, size):
    return F.interpolate(x, size, mode="bilinear", align_corners=True)


def walk(network, x, t, cond, control=None):
    """What the network must compute, with its own blocks: the way down, the way up from the deepest level, repeats,
    skip connections that are given again in each pass, and what each block C got as input."""
    c, inputs = network.config, []
    control = list(control or ()) + [None] * len(c.residual_widths)
    values = [t] + [cond.extra[name] for name in c.micro_conditions]
    emb = torch.stack([noise_embedding(value, c.time_width) for value in values], 1)
    context = Context(emb, F.silu(network.condition_tokens(cond, len(x))), None)
    h = network.in_norm(network.in_conv(F.pixel_unshuffle(x, c.patch_size)))
    if isinstance(network, StageB):
        semantic = resize(cond.semantic, h.shape[2:])
        pixels = resize(network.pixel_mapper((cond.low_res + 1) / 2), h.shape[2:])
        h = h + network.semantic_mapper(semantic) + pixels

    def level(blocks, repeats, h, skip=None):
        for i in range(len(repeats) + 1):
            for k, block in enumerate(blocks):
                if isinstance(block, ConvBlock):
                    extra = control[len(inputs)]
                    h = h if extra is None else h + resize(extra, h.shape[2:])
                    inputs.append(h)
                    h = block(h, context, skip if k == 0 else None)
                else:
                    h = block(h, context)
            if i < len(repeats):
                h = repeats[i](h)
        return h

    skips = []
    for i, (blocks, repeats) in enumerate(zip(network.down_blocks, network.down_repeats, strict=True)):
        h = level(blocks, repeats, network.down_transitions[i - 1](h) if i else h)
        skips.append(h)
    for i, (blocks, repeats) in enumerate(zip(network.up_blocks, network.up_repeats, strict=True)):
        if i:
            h = resize(network.up_transitions[i - 1](h), skips[-1 - i].shape[2:])
        h = level(blocks, repeats, h, skips[-1 - i] if i else None)
    return F.pixel_shuffle(network.out_conv(network.out_norm(h)), c.patch_size), inputs


@BOTH
@pytest.mark.parametrize("size", [(8, 12), (14, 10)])
def test_the_order_of_blocks(config, size):
    """Grids that the levels do not divide too (7×5 patches of B, whose second level has 3×2)."""
    network, cond = make(config), conditioning(config)
    x, t = latents(config, size=size)
    expected, inputs = walk(network, x, t, cond)
    assert_close(network(x, t, cond), expected)
    assert len(inputs) == len(config.residual_widths) == 1 * 2 + 2 * 1 + 2 * 2 + 1 * 3


@pytest.mark.parametrize("size", [(1, 1), (1, 5), (3, 2)])
def test_without_a_change_of_resolution_any_size_goes(size):
    """In one process as in the walk: the tiny latents of stage C at stride 32."""
    config = replace(C, switch_level=(False,))
    network, cond = make(config), conditioning(config)
    x, t = latents(config, size=size)
    assert_close(network(x, t, cond), walk(network, x, t, cond)[0])


@BOTH
def test_levels_consist_of_their_letters(config):
    network = make(config)
    for level, blocks in enumerate(network.down_blocks):
        assert [type(b) for b in blocks] == [KINDS[x] for x in config.levels[level] * config.down_blocks[level]]
    for i, blocks in enumerate(network.up_blocks):
        assert [type(b) for b in blocks] == [KINDS[x] for x in config.levels[1 - i] * config.up_blocks[i]]
    skips = [block.skip_channels for blocks in network.up_blocks for block in blocks if isinstance(block, ConvBlock)]
    assert skips == [0, 0, config.widths[0]]


def test_adapters_find_the_attention_by_name():
    """ ".attn" selects the weights of queries, keys, values and the output of every attention, and nothing else."""
    found = [name for name, module in make(C).named_modules() if ".attn" in name and hasattr(module, "weight")]
    layers = ["down_blocks.1.2", "down_blocks.1.5", "up_blocks.0.2", "up_blocks.0.5"]
    assert found == [f"{layer}.attn.{part}" for layer in layers for part in ("in_proj", "out_proj")]


# -------------------------------------------------------------------------------------------------------------- control


@BOTH
def test_control_is_added_before_exactly_the_listed_blocks(config):
    network, cond = make(config), conditioning(config)
    x, t = latents(config)
    plain = walk(network, x, t, cond)[1]
    for listed in ({0}, {1, 3}, {4, 8, 10}):
        control = [torch.randn(3, plain[i].shape[1], 3, 2) if i in listed else None for i in range(max(listed) + 1)]
        out, inputs = walk(network, x, t, cond, control)
        assert_close(network(x, t, cond, control), out)
        first = min(listed)
        same = [torch.equal(a, b) for a, b in zip(plain, inputs, strict=True)]
        assert all(same[:first]) and not any(same[first:])


@BOTH
def test_no_control_changes_no_bit(config):
    network, cond = make(config), conditioning(config)
    plain, width = run(network, cond), config.widths[0]
    for control in ([], [None, None], [torch.zeros(3, width, 3, 2), None]):
        assert torch.equal(run(network, cond, control=control), plain)


def test_control_without_a_place_is_refused():
    network, cond = make(C), conditioning(C)
    with refused("there are 12 control tensors, but the network has 11 residual blocks"):
        run(network, cond, control=[None] * 12)
    with refused(r"shape \(3, 12, 2, 2\), but its residual block has 8 channels"):
        run(network, cond, control=[torch.zeros(3, 12, 2, 2)])
    run(network, cond, control=[None] * 11)


# ---------------------------------------------------------------------------------------------------- sizes of networks


@pytest.mark.parametrize(("sizes", "stage", "size"), [(STAGE_C_SIZES, StageC, 8), (STAGE_B_SIZES, StageB, 16)])
def test_tiny_sizes_fit_a_laptop(sizes, stage, size):
    """Parameters, FLOPs and memory, with captions that the text encoder reads itself where it has one."""
    config = sizes["tiny"]
    found = {}
    for on in (False, True):
        one = replace(config, use_checkpoint=on)
        with torch.device("meta"):
            cond, (x, t) = conditioning(one, 2), latents(one, 2, (size, size))
            network = stage(one, 100)

            def call(network, a=x, b=t, c=cond):
                return network(a, b, c)

            found[on] = count_flops(network, call) // 2, peak_bytes(network, call)
    parameters = sum(parameter.numel() for parameter in network.parameters())
    assert 5e5 < parameters < 3e6 and 2e7 < found[False][0] < 1e9
    assert found[True][1] < 0.6 * found[False][1]


# ------------------------------------------------------------------------------------------------------- initial values


@BOTH_TEXTS
def test_the_output_is_0_at_the_start_and_moves(config):
    """The zero-initialized output layer alone gets gradients at first."""
    torch.manual_seed(0)
    network = (StageB if isinstance(config, StageBConfig) else StageC)(config, VOCABULARY)
    out = run(network, conditioning(config))
    assert torch.equal(out, torch.zeros_like(out)) and out.dtype == torch.float32
    (out - 1).square().mean().backward()
    assert {name for name, p in network.named_parameters() if p.grad.any()} == {"out_conv.weight", "out_conv.bias"}


def test_initial_scales():
    torch.manual_seed(0)
    config = replace(B, widths=(64, 128), cond_width=96, pooled_width=300, heads=(2, 4))
    network = StageB(config)
    assert network.in_conv.weight.abs().max() <= 0.02 * math.sqrt(6 / (64 + 16))
    mappers = [network.condition_tokens.pooled, network.semantic_mapper.layer_in, network.semantic_mapper.layer_out]
    mappers += [network.pixel_mapper.layer_in, network.pixel_mapper.layer_out]
    for layer in mappers:
        assert 0.015 < layer.weight.std() < 0.025 and not layer.bias.any()
    ups = [module.linear_out for module in network.modules() if isinstance(module, ResponseMlp)]
    assert len(ups) == 2 * (2 + 2)
    for layer in ups:  # three encoder blocks
        bound = math.sqrt(6 / sum(layer.weight.shape) / 3)
        assert 0.95 * bound < layer.weight.abs().max() <= bound
    tokens = StageC(replace(C, cond_width=200, text_width=300, image_width=300)).condition_tokens
    for layer in (tokens.text, tokens.image):
        assert 0.015 < layer.weight.std() < 0.025


# ----------------------------------------------------------------------------------------------------------- conditions


@BOTH
def test_every_condition_acts(config):
    network, cond = make(config), conditioning(config)
    cond = replace(cond, mask=torch.ones(3, 8, dtype=torch.bool))
    out = run(network, cond)
    given = {"semantic", "low_res", "text_pooled"} if config is B else {"text_states", "text_pooled", "image_embedding"}
    for name in given:
        changed = replace(cond, **{name: getattr(cond, name) * 2 + 1})
        assert (run(network, changed) - out).flatten(1).norm(dim=1).min() > 1e-3, name
    for name in config.micro_conditions:
        changed = replace(cond, extra={**cond.extra, name: cond.extra[name] + 0.05})
        assert (run(network, changed) - out).flatten(1).norm(dim=1).min() > 1e-3, name
    zero = replace(cond, extra=dict.fromkeys(config.micro_conditions, torch.zeros(3)))
    assert torch.equal(run(network, zero), run(network, replace(cond, extra={})))
    x, t = latents(config)
    assert (network(x, t + 0.05, cond) - out).flatten(1).norm(dim=1).min() > 1e-3


@pytest.mark.parametrize(
    ("config", "name", "needed"),
    [(B, "semantic", True), (B, "text_pooled", True), (B, "low_res", False), (C, "text_states", True),
     (C, "text_pooled", True), (C, "image_embedding", False)],
)  # fmt: skip
def test_a_missing_condition_is_named_or_stands_for_its_absence(config, name, needed):
    network, cond = make(config), conditioning(config)
    missing = replace(cond, **{name: None})
    if needed:
        with refused(f"cond has no {name}"):
            run(network, missing)
    else:  # an embedding of zeros, a black picture
        none = getattr(cond, name) * 0 - float(name == "low_res")
        assert_close(run(network, missing), run(network, replace(cond, **{name: none})))


@pytest.mark.parametrize(
    ("config", "name", "message"),
    [
        (B, "semantic", "must have 3 channels .semantic_channels"),
        (B, "low_res", "must have 2 channels .pixel_channels"),
        (B, "text_pooled", "pooled text has the shape .3, 4., but pooled_width is 5"),
        (C, "image_embedding", "image embedding has the shape .3, 5., but image_width is 6"),
        (C, "text_states", "width 6, but text_width is 7"),
    ],
)
def test_a_condition_of_another_width_is_refused(config, name, message):
    cond = conditioning(config)
    value = getattr(cond, name)
    value = value[..., :-1] if value.dim() < 4 else value[:, :-1]
    with refused(message):
        run(make(config), replace(cond, **{name: value}))


def test_condition_tokens():
    """Of text states, pooled text and image embedding, in this order, each normalized; zeros after a text's end."""
    tokens, cond = make(C).condition_tokens, conditioning(C)
    states = F.pad(cond.text_states * cond.mask[:, :, None], (0, 0, 0, 1))
    parts = [states @ tokens.text.weight.T + tokens.text.bias]
    for layer, vector in ((tokens.pooled, cond.text_pooled), (tokens.image, cond.image_embedding)):
        parts.append((vector @ layer.weight.T + layer.bias).view(3, 2, 10))
    x = torch.cat(parts, 1)
    expected = (x - x.mean(2, keepdim=True)) / (x.var(2, correction=0, keepdim=True) + 1e-6).sqrt()
    assert_close(tokens(cond, 3), expected)
    assert expected.shape == (3, 9 + 2 + 2, 10)


def test_vectors_may_have_an_axis_of_one_token():
    network, cond = make(C), conditioning(C)
    other = replace(cond, text_pooled=cond.text_pooled[:, None], image_embedding=cond.image_embedding[:, None])
    assert torch.equal(run(network, other), run(network, cond))
    with refused(r"shape \(3, 2, 5\)"):
        run(network, replace(cond, text_pooled=cond.text_pooled[:, None].expand(3, 2, 5)))


@pytest.mark.parametrize("config", [C, own_text(C), own_text(B)], ids=["C", "C own text", "B own text"])
def test_padding_of_captions_has_no_effect(config):
    """Neither its length nor what is there."""
    network, cond = make(config), conditioning(config)
    out, hidden = run(network, cond), ~cond.mask
    if cond.tokens is None:
        junk = replace(cond, text_states=cond.text_states.masked_fill(hidden[:, :, None], 9.0))
        shorter = replace(cond, text_states=cond.text_states[:, :7], mask=cond.mask[:, :7])
    else:
        junk = replace(cond, tokens=cond.tokens.masked_fill(hidden, 0))
        shorter = replace(cond, tokens=cond.tokens[:, :7], mask=cond.mask[:, :7])
    assert_close(run(network, junk), out)
    assert_close(run(network, shorter), out)


def test_states_without_a_mask_all_count():
    network, cond = make(C), conditioning(C)
    full = replace(cond, mask=torch.ones_like(cond.mask))
    assert torch.equal(run(network, replace(cond, mask=None)), run(network, full))
    assert relative(run(network, full), run(network, cond)) > 1e-3


def test_longer_texts_are_refused():
    with refused("the texts have 10 tokens, but text_length is 9"):
        run(make(C), replace(conditioning(C), text_states=torch.zeros(3, 10, 7), mask=None))


@pytest.mark.parametrize("config", [own_text(B), own_text(C)], ids=["B", "C"])
def test_text_is_encoded_once_for_all_steps(config):
    network, cond = make(config), conditioning(config)
    encoded = network.encode_text(cond)
    assert network.encode_text(encoded) is encoded
    assert torch.equal(run(network, encoded), run(network, cond))
    with refused("captions are required"):
        network.encode_text(Conditioning())
    outside, cond = make(C), conditioning(C)
    assert outside.text_encoder is None and outside.encode_text(cond) is cond


@BOTH_TEXTS
def test_dropped_conditions(config):
    """Text as an empty caption or zeros, maps and embeddings as zeros; the other samples do not change."""
    network, cond, where = make(config), conditioning(config), torch.tensor([True, False, True])
    out, dropped = run(network, cond), run(network, cond.drop(where))
    assert_close(dropped[1], out[1])
    assert (dropped - out)[where].flatten(1).norm(dim=1).min() > 1e-3
    other = replace(conditioning(config, seed=5), extra=cond.extra, low_res=cond.low_res)
    if cond.tokens is not None:  # a dropped caption keeps its start token
        other = replace(other, tokens=torch.cat([cond.tokens[:, :1], other.tokens[:, 1:]], 1))
    assert_close(run(network, other.drop(where))[where], dropped[where])


def test_pooled_text_without_states_is_dropped():
    """Stage B reads nothing else of a caption, which then has no mask."""
    cond = Conditioning(text_pooled=torch.ones(2, 5))
    where = torch.tensor([True, False])
    assert cond.droppable and cond.drop(where).text_pooled.tolist() == [[0] * 5, [1] * 5]
    assert cond.drop_text(where).mask is None and Conditioning().drop_text(where).present() == {}


def test_a_network_without_conditions_needs_none():
    config = replace(C, text_width=0, pooled_width=0, image_width=0, micro_conditions=())
    network = make(config)
    out = run(network, Conditioning())
    assert torch.equal(out, run(network, conditioning(C))) and not config.has_tokens
    out.sum().backward()
    assert all(p.grad is not None for p in network.parameters())


# ------------------------------------------------------------------------------------------ samples, dropout, precision


@pytest.mark.parametrize("config", [C, own_text(C)], ids=["C", "C own text"])
def test_pooled_text_modulates_the_channels(config):
    """In every block T by a layer of its own, which is the identity at the start."""
    network, plain = make(replace(config, text_modulation=True)), make(config)
    layers = [block.text for block in network.modules() if isinstance(block, TimestepBlock)]
    fresh = StageC(network.config, VOCABULARY)
    assert layers and not any(m.text.weight.any() for m in fresh.modules() if isinstance(m, TimestepBlock))
    plain.load_state_dict({name: value for name, value in network.state_dict().items() if name in plain.state_dict()})
    cond = conditioning(config)
    found, expected = run(network, cond), run(plain, cond)
    assert relative(found, expected) > 1e-3
    for layer in layers:
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
    assert torch.equal(run(network, cond), expected)


def test_coordinates_are_those_of_the_patches():
    """x and y of each patch's center, of an input of any size, in the last two channels of the input layer."""
    network, seen = make(replace(C, coordinates=True)), []
    hook = network.in_conv.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    cond = conditioning(C)
    run(network, cond, (4, 6))
    hook.remove()
    x, y = seen[0][:, -2], seen[0][:, -1]
    height, width = x.shape[1:]
    assert torch.allclose(x, torch.linspace(1 / width - 1, 1 - 1 / width, width).expand_as(x), atol=1e-6)
    assert torch.allclose(y, torch.linspace(1 / height - 1, 1 - 1 / height, height)[:, None].expand_as(y), atol=1e-6)


@BOTH
@pytest.mark.parametrize("use_checkpoint", [False, True])
def test_dropout_follows_the_keys(config, use_checkpoint):
    config = replace(config, dropout=(0.5, 0.5), use_checkpoint=use_checkpoint)
    network, cond = make(config), conditioning(config)
    keyed = replace(cond, dropout_keys=torch.tensor([3, 4, 5]))
    out = run(network, keyed)
    assert torch.equal(run(network, keyed), out)
    other = run(network, replace(cond, dropout_keys=torch.tensor([3, 4, 6])))
    assert_close(other[:2], out[:2])
    assert relative(other[2], out[2]) > 1e-3
    salts = [module.salt.item() for module in network.modules() if isinstance(module, Dropout)]
    assert sorted(salts) == list(range(1, len(salts) + 1)) and len(salts) == 8
    network.eval()
    assert torch.equal(run(network, keyed), run(network, cond))


def test_each_pass_through_a_level_has_its_own_dropout_masks(monkeypatch):
    config = replace(C, levels=("CT", "CT"), down_repeats=(3, 1), up_repeats=(1, 1), dropout=(0.5, 0.0))
    network, seen = make(config), []
    first = network.down_blocks[0][0].mlp.dropout
    forward = first.forward
    monkeypatch.setattr(first, "forward", lambda x, keys: seen.append(keys.tolist()) or forward(x, keys))
    run(network, replace(conditioning(config), dropout_keys=torch.tensor([3, 40, 500])))
    assert len(seen) == 3 and len({tuple(keys) for keys in seen}) == 3


@BOTH
def test_the_layout_stays_channels_last(config):
    network, found = make(config), []
    for module in network.modules():
        if isinstance(module, (ConvBlock, AttentionBlock, TimestepBlock, FeedForward)):
            module.register_forward_hook(
                lambda module, inputs, out: found.append(out.is_contiguous(memory_format=torch.channels_last))
            )
    run(network, conditioning(config))
    assert len(found) > 20 and all(found)


# ------------------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (
            C,
            {"text_modulation": True, "pooled_width": 0},
            "text_modulation is True, but the network reads no pooled text",
        ),
        (B, {"heads": (2,)}, "heads has 1 value, but must have one for each of the 2 levels of widths"),
        (B, {"heads": (2, 5)}, "heads has 5, but must divide the 12 channels of level 1, CTA"),
        (B, {"heads": (2, 0)}, "heads has 0"),
        (B, {"levels": ("TC", "CTA")}, "levels has 'TC', but must begin with C above the deepest level"),
        (B, {"levels": ("CX", "CTA")}, "levels has 'CX', but must be made of the letters C, A, F, T"),
        (B, {"levels": ("C", "")}, "levels has ''"),
        (B, {"down_blocks": (0, 1)}, "down_blocks is 0, but must be at least 1"),
        (B, {"up_repeats": (1, 0)}, "up_repeats is 0"),
        (B, {"dropout": (0.0, 1.0)}, "dropout is 1, but must be at least 0 and below 1"),
        (B, {"kernel_size": 4}, "kernel_size is 4, but must be positive and odd"),
        (B, {"time_width": 1}, "time_width is 1"),
        (B, {"vector_tokens": 0}, "vector_tokens is 0, but must be at least 1"),
        (B, {"pooled_width": -1}, "pooled_width is -1"),
        (B, {"widths": ()}, "widths is empty"),
        (B, {"micro_conditions": ("a", "a")}, "micro_conditions is a, a, but must not repeat a name"),
        (B, {"semantic_channels": 0}, "semantic_channels is 0"),
        (B, {"pixel_channels": -1}, "pixel_channels is -1"),
        (C, {"switch_level": (True, True)}, "switch_level has 2 values, but must have 1"),
        (C, {"text_width": -1}, "text_width is -1"),
        (C, {"image_width": -1}, "image_width is -1"),
    ],
)
def test_impossible_settings_are_refused(config, change, message):
    with refused(message):
        replace(config, **change)


def test_impossible_image_sizes_are_refused():
    with refused(r"12×9 positions, but patch_size \(2\) must divide both"):
        run(make(B), conditioning(B), (9, 12))
    with refused("12×2 positions, but 2 levels need at least 4 on each side"):
        run(make(B), conditioning(B), (2, 12))
    with refused("1×12 positions, but 2 levels need at least 2"):
        run(make(C), conditioning(C), (12, 1))
