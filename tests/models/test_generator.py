from dataclasses import replace

import pytest
import torch
from network_making import (
    TEXT,
    TRANSFORMER,
    VOCABULARY,
    captions,
    gradient,
    make_generator,
    noisy,
    relative,
    without_gradient,
)
from refusing import refused
from torch.testing import assert_close

from diff_dalle.batch import Conditioning
from diff_dalle.models.generator import Generator, GeneratorConfig
from diff_dalle.models.text_encoder import TextEncoder, TextEncoderConfig
from diff_dalle.models.transformer import DenoiserConfig

TINY = DenoiserConfig(image_size=8, num_channels=8, num_res_blocks=1, channel_mult=(1,), attention_resolutions=())
NETWORKS = {"cross": {}, "joint": {"text_attention": "joint"}, "transformer": TRANSFORMER}
BOTH = pytest.mark.parametrize("unet", NETWORKS.values(), ids=NETWORKS)


def run(network, cond):
    """Output and the gradients of all parameters."""
    network.zero_grad()
    x, t = noisy()
    out = network(x, t, cond)
    out.square().mean().backward()
    return out, [p.grad.clone() for p in network.parameters()]


@pytest.mark.parametrize("conv", [0, 3])
@BOTH
def test_padding_never_leaks(unet, conv):
    """Other padding tokens, or more of them, change neither the output nor any gradient."""
    network = make_generator(replace(TEXT, enc_conv=conv), **unet)
    cond = captions(total=8)
    out, gradients = run(network, cond)
    scrambled = torch.where(cond.mask, cond.tokens, (cond.tokens + 17) % VOCABULARY)
    for same in (replace(cond, tokens=scrambled), captions(total=10)):
        other, other_gradients = run(network, same)
        assert_close(other, out, rtol=0, atol=1e-6)
        for a, b in zip(other_gradients, gradients, strict=True):
            assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("padding", ["learned", "zeros"])
def test_padding_is_read(padding):
    """Captions of any padded length are one caption, tokens in padded places do not count, and the embeddings there do:
    learned ones, where the start token is cut, or that of token 0."""
    network, (x, t), everywhere = make_generator(replace(TEXT, text_padding=padding)), noisy(), torch.ones(3).bool()
    cond, learned = captions(total=8), padding == "learned"
    out = network(x, t, cond)
    scrambled = torch.where(cond.mask, cond.tokens, (cond.tokens + 17) % VOCABULARY)
    if learned:
        scrambled[:, 0] = (scrambled[:, 0] + 1) % VOCABULARY
    for same in (replace(cond, tokens=scrambled), captions(total=10)):
        assert_close(network(x, t, same), out)
    encoded = network.encode_text(cond)
    assert encoded.text_states.shape == (3, 10 - learned, 12) and encoded.states_mask.all()
    with torch.no_grad():
        table = network.text_encoder.padding_emb[-1] if learned else network.text_encoder.token_emb.weight[0]
        table[0] += 1
    assert relative(network(x, t, cond), out) > 1e-4
    words = network.encode_text(cond).text_states[:2, 0]  # of real tokens, which attend to the padding
    assert relative(words, encoded.text_states[:2, 0]) > 1e-5
    if learned:
        assert encoded.mask is cond.mask and torch.equal(encoded.text_pooled, encoded.text_states[:, -1])
        assert encoded.drop_text(everywhere).text_mask is None
        dropped = network(x, t, cond.drop(everywhere))
        assert relative(dropped[:2], network(x, t, cond)[:2]) > 1e-4
        assert_close(dropped[2:], network(x, t, cond)[2:])  # its caption is the start token alone


def test_states_without_a_norm():
    torch.manual_seed(0)
    encoder = TextEncoder(replace(TEXT, enc_depth=1), VOCABULARY)
    torch.manual_seed(0)
    plain = TextEncoder(replace(TEXT, enc_depth=1, enc_norm=False), VOCABULARY)
    cond = captions(lengths=(8,))
    states = plain(*cond.caption)[0]
    assert not any(name.startswith("norm.") for name in plain.state_dict())
    assert_close(encoder.norm(states), encoder(*cond.caption)[0])


def test_the_summary_of_a_caption_is_the_sum_of_its_states_over_the_root_of_their_number():
    encoder, cond = TextEncoder(TEXT, VOCABULARY), captions(total=8)
    encoder.pool = torch.nn.Identity()
    states, summary = encoder(*cond.caption)
    for row, pooled, real in zip(states, summary, cond.mask, strict=True):
        assert_close(pooled, row[real].sum(0) / real.sum() ** 0.5)


def test_a_convolution_joins_neighboring_words():
    """Without attention, the state of a token depends on the tokens next to it and on no others."""
    torch.manual_seed(0)
    encoder = TextEncoder(replace(TEXT, enc_depth=1, enc_conv=3), VOCABULARY)
    torch.nn.init.zeros_(encoder.blocks[0].attention.proj.weight)
    cond = captions(lengths=(8,))
    states, _ = encoder(*cond.caption)
    other = cond.tokens.clone()
    other[0, 4] = (other[0, 4] + 1) % VOCABULARY
    changed = (encoder(other, cond.mask)[0] - states).abs().amax(2)[0] > 1e-6
    assert changed.tolist() == [False, False, False, True, True, True, False, False]


@pytest.mark.parametrize(
    ("name", "value"),
    [("enc_conv", 2), ("enc_conv", -1), ("text_padding", "x"), ("enc_attn_dim", 13), ("enc_depth", 0),
     ("dropout_text", -0.1)],
)  # fmt: skip
def test_impossible_settings_of_the_text_encoder_are_refused(name, value):
    with refused(f"{name} is '?{value}"):
        replace(TEXT, **{name: value})


@BOTH
def test_tokens_act_through_attention_and_through_the_summary(unet):
    """A changed token changes the output through text_states alone and through text_pooled alone."""
    network = make_generator(**unet)
    cond, (x, t) = captions(lengths=(6, 6, 6)), noisy()
    other = replace(cond, tokens=torch.where(torch.arange(8) == 2, (cond.tokens + 1) % VOCABULARY, cond.tokens))
    cond, other = network.encode_text(cond), network.encode_text(other)
    out = network(x, t, cond)
    assert relative(network(x, t, replace(cond, text_states=other.text_states)), out) > 1e-4
    assert relative(network(x, t, replace(cond, text_pooled=other.text_pooled)), out) > 1e-4


@BOTH
def test_a_dropped_caption_has_no_effect(unet):
    """The null condition does not depend on the caption, and its output differs from the caption's."""
    network, (x, t) = make_generator(**unet), noisy()
    everywhere = torch.ones(3, dtype=torch.bool)
    cond, other = captions(seed=0), captions(seed=1)
    other = replace(other, tokens=torch.cat([cond.tokens[:, :1], other.tokens[:, 1:]], 1))
    assert_close(network(x, t, cond.drop(everywhere)), network(x, t, other.drop(everywhere)))
    assert relative(network(x, t, cond)[:2], network(x, t, cond.drop(everywhere))[:2]) > 1e-3


def test_text_can_be_encoded_in_advance():
    network, (x, t) = make_generator(), noisy()
    encoded = network.encode_text(captions())
    assert encoded.text_states.shape == (3, 8, 12) and encoded.text_pooled.shape == (3, 12)
    assert torch.equal(network(x, t, encoded), network(x, t, captions()))
    assert network.encode_text(encoded) is encoded


@pytest.mark.parametrize("unet", [{}, TRANSFORMER], ids=["unet", "transformer"])
def test_after_two_updates_a_new_network_depends_on_the_text(unet):
    """All residual branches start at 0, so that the first update changes the output convolution only."""
    torch.manual_seed(0)
    network = Generator(GeneratorConfig(replace(TINY, **unet), TEXT), VOCABULARY)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    x, t, cond, other = *noisy(size=(8, 8)), captions(), captions(seed=1)
    for _ in range(2):
        assert torch.equal(network(x, t, cond), network(x, t, other))
        optimizer.zero_grad()
        (network(x, t, cond) - 1).square().mean().backward()
        optimizer.step()
    assert not torch.allclose(network(x, t, cond), network(x, t, other))


def test_conditions_that_the_network_was_not_built_for_are_ignored():
    """So that one Conditioning can serve several networks."""
    network, (x, t) = make_generator(text=TextEncoderConfig(enc_attn_dim=0)), noisy()
    others = replace(captions(), labels=torch.tensor([1, 2, 3]), image_embedding=torch.randn(3, 5))
    others = replace(others, low_res=torch.randn(3, 3, 4, 4), low_res_level=t, low_res_blur=t)
    assert network.config.factor == 1 and not network.config.is_upsampler
    assert torch.equal(network(x, t), network(x, t, others))


def test_text_states_from_an_external_encoder_replace_the_tokens():
    network, (x, t) = make_generator(), noisy()
    states, mask = torch.randn(3, 20, 12), captions(total=20).mask
    cond = Conditioning(mask=mask, text_states=states, text_pooled=torch.randn(3, 12))
    out = network(x, t, cond)
    assert relative(network(x, t, replace(cond, text_states=states.flip(1))), out) > 1e-4
    with refused("expects encoded text.*text_pooled"):
        network(x, t, replace(cond, text_pooled=None))


@pytest.mark.parametrize("learned_variance", [False, True])
@BOTH
def test_grayscale_images(unet, learned_variance):
    network = make_generator(None, 1, learned_variance, **unet)
    assert network.config.channels == 1
    x, t = noisy(size=(16, 32), channels=1)
    out = network(x, t, captions())
    assert out.shape == (3, 1 + learned_variance, 16, 32) and out.dtype == torch.float32
    out.square().mean().backward()
    assert not without_gradient(network)


@pytest.mark.parametrize("image_channels", [0, 2, 4])
def test_other_numbers_of_image_channels_are_refused(image_channels):
    with refused(f"image_channels is {image_channels}, but must be 3 .RGB. or 1 .grayscale."):
        GeneratorConfig(image_channels=image_channels)


def test_missing_captions_are_named():
    network, (x, t) = make_generator(), noisy()
    for cond in (None, Conditioning(tokens=captions().tokens)):
        with refused("captions are required.*tokens or mask"):
            network(x, t, cond)
    with refused("11 tokens, but text_length is 10"):
        network(x, t, captions(total=11))


@BOTH
def test_keyed_dropout_does_not_depend_on_the_batch(unet):
    """The gradient of a batch is the sum of its samples' gradients, each with the sample's own masks."""
    network = make_generator(text=replace(TEXT, dropout_text=0.2), dropout=0.2, **unet)
    x, t = noisy()
    cond = replace(captions(), dropout_keys=torch.tensor([3, 2**50, -9]))
    network(x, t, cond).square().sum().backward()
    whole = gradient(network)
    network.zero_grad()
    for i, piece in enumerate(cond.split(1)):
        network(x[i : i + 1], t[i : i + 1], piece).square().sum().backward()
    assert relative(gradient(network), whole) < 1e-5
