"""A generator as an upsampler: conditioning on the low-resolution image, residual prediction, invalid settings."""

from dataclasses import replace

import pytest
import torch
from network_making import (
    TEXT,
    UNET,
    VOCABULARY,
    captions,
    make_generator,
    noisy,
    pixels,
    relative,
    without_gradient,
)
from refusing import refused
from torch.testing import assert_close

from diff_dalle.batch import Conditioning
from diff_dalle.commands.command_line import parse
from diff_dalle.models.generator import Generator, GeneratorConfig, LowResConfig, upsample_low_res
from diff_dalle.models.text_encoder import TextEncoderConfig
from diff_dalle.recipes.generator import GeneratorRun

NO_TEXT = TextEncoderConfig(enc_attn_dim=0)


def make_upsampler(small_size=4, text=TEXT, out_channels=3, skip=False, image_channels=3):
    learned_variance = out_channels == 2 * image_channels
    return make_generator(text, image_channels, learned_variance, LowResConfig(small_size, skip))


class RecordInput(torch.nn.Module):
    """Replaces the U-Net, records its input and returns 0."""

    def forward(self, x, t, cond, control=None):
        self.x = x
        return torch.zeros_like(x[:, :3])


def small(cond=None, size=(4, 4), n=3, seed=2, channels=3):
    """``cond`` with random low-resolution images, each with its own noise level and blur."""
    low_res = pixels(n, channels, *size, seed=seed)
    levels = {"low_res_level": torch.linspace(0, 0.3, n), "low_res_blur": torch.linspace(0.6, 0, n)}
    return replace(cond or Conditioning(), low_res=low_res, **levels)


def bilinear(image, size):
    """[C, h, w] → [C, *size]: linear interpolation between pixel centers, clamped at the border."""
    out = torch.empty(image.shape[0], *size)
    for y in range(size[0]):
        for x in range(size[1]):
            corners, weights = [], []
            for i, (position, old, new) in enumerate(((y, image.shape[1], size[0]), (x, image.shape[2], size[1]))):
                source = min(max((position + 0.5) * old / new - 0.5, 0.0), old - 1.0)
                corners.append((int(source), min(int(source) + 1, old - 1)))
                weights.append(source - corners[i][0])
            (top, bottom), (left, right), (down, across) = *corners, weights
            upper = (1 - across) * image[:, top, left] + across * image[:, top, right]
            lower = (1 - across) * image[:, bottom, left] + across * image[:, bottom, right]
            out[:, y, x] = (1 - down) * upper + down * lower
    return out


@pytest.mark.parametrize(
    ("low", "high"), [((4, 6), (8, 12)), ((3, 5), (12, 20)), ((2, 4), (16, 32)), ((5, 4), (8, 14)), ((1, 1), (4, 6))]
)
def test_the_low_resolution_image_is_upsampled_bilinearly(low, high):
    cond = small(size=low, n=2)
    images = upsample_low_res(cond, high)
    assert images.shape == (2, 3, *high)
    for i in range(2):
        assert_close(images[i], bilinear(cond.low_res[i], high), rtol=0, atol=1e-6)


def test_an_image_of_the_same_size_is_unchanged():
    cond = small(size=(8, 12), n=2)
    assert torch.equal(upsample_low_res(cond, (8, 12)), cond.low_res)


@pytest.mark.parametrize("name", ["low_res", "low_res_level", "low_res_blur"])
def test_a_missing_low_resolution_image_is_named(name):
    x, t = noisy()
    for call in (lambda cond: upsample_low_res(cond, (16, 16)), lambda cond: make_upsampler()(x, t, cond)):
        with refused("an upsampler requires a low-resolution image.*low_res"):
            call(replace(small(captions()), **{name: None}))


# ---------------------------------------------------------------------------------------------------------- the network


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_upsampled_image_is_concatenated_in_the_precision_of_the_noisy_one(dtype):
    network, (x, t), cond = make_upsampler(text=NO_TEXT), noisy(), small()
    network.unet, x = RecordInput(), x.to(dtype)
    network(x, t, cond)
    assert network.unet.x.dtype == dtype and torch.equal(network.unet.x[:, :3], x)
    assert torch.equal(network.unet.x[:, 3:], upsample_low_res(cond, (16, 16)).to(dtype))


@pytest.mark.parametrize("text", [TEXT, NO_TEXT], ids=["text", "no text"])
def test_image_level_and_blur_affect_the_output_of_their_own_sample_only(text):
    network, (x, t) = make_upsampler(text=text), noisy()
    cond = small(captions() if text.enc_attn_dim else None)
    out = network(x, t, cond)
    assert out.shape == x.shape
    for name in ("low_res", "low_res_level", "low_res_blur"):
        value = getattr(cond, name).clone()
        value[1] += 0.2
        other = network(x, t, replace(cond, **{name: value}))
        assert relative(other[1], out[1]) > 1e-3, name
        assert_close(other[[0, 2]], out[[0, 2]], rtol=0, atol=1e-6)


def test_level_and_blur_are_distinguished():
    network, (x, t) = make_upsampler(), noisy()
    cond = small(captions())
    swapped = replace(cond, low_res_level=cond.low_res_blur, low_res_blur=cond.low_res_level)
    assert relative(network(x, t, swapped), network(x, t, cond)) > 1e-3


@pytest.mark.parametrize("factor", [2, 4, 8, 16])
def test_factors_and_aspect_ratios(factor):
    network = make_upsampler(16 // factor, out_channels=6)
    assert network.config.factor == factor
    for size in ((16, 16), (16, 32), (48, 16)):
        x, t = noisy(size=size)
        out = network(x, t, small(captions(), (size[0] // factor, size[1] // factor)))
        assert out.shape == (3, 6, *size) and out.dtype == torch.float32 and out.isfinite().all()


def test_close_levels_differ_in_half_precision():
    """The levels 0.5 and 0.501 are embedded like the timesteps 500 and 501, which are equal in bfloat16."""
    encoder = make_upsampler(text=NO_TEXT).unet.encoder
    t, levels = torch.tensor([3.0, 3.0]), torch.tensor([0.5, 0.501])
    cond = replace(small(n=2), low_res_level=levels, low_res_blur=torch.zeros(2))
    expected = encoder.embed(t, cond)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(encoder.embed(t, cond), expected)
    assert relative(expected[0], expected[1]) > 1e-3


def test_a_new_upsampler_depends_on_the_image_after_one_update_and_on_the_levels_after_two():
    """All residual branches start at 0, so that the first update changes the output convolution only."""
    torch.manual_seed(0)
    network = Generator(GeneratorConfig(UNET, NO_TEXT, LowResConfig(4)), 0)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    x, t = noisy()
    cond, other = small(), small(seed=3)
    degraded = replace(cond, low_res_level=cond.low_res_level + 0.3, low_res_blur=cond.low_res_blur + 0.1)
    affected = []
    for _ in range(3):
        out = network(x, t, cond)
        affected.append([not torch.equal(out, network(x, t, changed)) for changed in (other, degraded)])
        optimizer.zero_grad()
        (out - 1).square().mean().backward()
        optimizer.step()
    assert affected == [[False, False], [True, False], [True, True]]


def test_dropping_the_caption_keeps_the_low_resolution_image():
    network, (x, t) = make_upsampler(), noisy()
    everywhere = torch.ones(3, dtype=torch.bool)
    null, other = small(captions()).drop(everywhere), small(captions(), seed=3).drop(everywhere)
    assert relative(network(x, t, null), network(x, t, other)) > 1e-3


@pytest.mark.parametrize(("out_channels", "skip"), [(1, False), (2, False), (1, True), (2, True)])
def test_grayscale_images(out_channels, skip):
    network = make_upsampler(image_channels=1, out_channels=out_channels, skip=skip)
    (x, t), cond = noisy(size=(16, 32), channels=1), small(captions(), (4, 8), channels=1)
    out = network(x, t, cond)
    assert out.shape == (3, out_channels, 16, 32) and out.dtype == torch.float32
    brighter = replace(cond, low_res=cond.low_res + 0.2)
    assert relative(network(x, t, brighter)[:, :1], out[:, :1]) > 1e-3
    out.square().mean().backward()
    assert not without_gradient(network)


# --------------------------------------------------------------------------------------------------------- the residual


@pytest.mark.parametrize("out_channels", [3, 6])
@pytest.mark.parametrize("size", [(16, 16), (16, 32)])
def test_a_new_residual_network_returns_the_bilinearly_upsampled_image(out_channels, size):
    """Exactly, also in half precision, with a variance output of 0, halfway between the two bounds."""
    config, (x, t) = make_upsampler(skip=True).config, noisy(size=size)
    network = Generator(config, VOCABULARY, learned_variance=out_channels == 6)
    cond = small(captions(), (size[0] // 4, size[1] // 4))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = network(x, t, cond)
    for out in (network(x, t, cond), half):
        assert out.dtype == torch.float32 and out.shape == (3, out_channels, *size)
        assert torch.equal(out[:, :3], upsample_low_res(cond, size)) and not out[:, 3:].any()


@pytest.mark.parametrize("out_channels", [3, 6])
def test_the_upsampled_image_is_added_to_the_output(out_channels):
    plain, skip = (make_upsampler(out_channels=out_channels, skip=skip) for skip in (False, True))
    (x, t), cond = noisy(), small(captions())
    assert plain.state_dict().keys() == skip.state_dict().keys()
    expected = plain(x, t, cond)
    expected[:, :3] += upsample_low_res(cond, (16, 16))
    assert_close(skip(x, t, cond), expected, rtol=0, atol=1e-6)


# ------------------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("small_size", "words"),
    [
        (16, r"small_size is 16, but must be smaller than unet.image_size \(16\) and divide it"),
        (32, "small_size is 32, but must be smaller"),
        (5, "small_size is 5, but must be .* and divide it"),
        (-4, "small_size is -4, but must be at least 0"),
    ],
)
def test_impossible_small_sizes_are_refused(small_size, words):
    with refused(words):
        GeneratorConfig(UNET, TEXT, LowResConfig(small_size))


def make_run(**changed):
    flags = {"image_size": 16, "num_channels": 8, "channel_mult": "1,2", "attention_resolutions": 8, **changed}
    return parse(GeneratorRun, [str(part) for name, value in flags.items() for part in (f"--{name}", value)])


def test_the_residual_is_for_upsamplers_that_predict_x_start():
    with refused("low_res_skip is for upsamplers, .* set small_size, or low_res_skip False"):
        LowResConfig(low_res_skip=True)
    with refused("low_res_skip is for upsamplers, .*small_size, or .*low_res_skip False"):
        make_run(low_res_skip=True, prediction="x_start")
    for prediction in ("eps", "v", "previous_x"):
        with refused(f"but prediction is {prediction}: set --prediction x_start"):
            make_run(low_res_skip=True, small_size=4, prediction=prediction)
    run = make_run(low_res_skip=True, small_size=4, prediction="x_start")
    assert run.model.low_res == LowResConfig(4, True)
    assert not make_run(small_size=4).model.low_res.low_res_skip
