import weakref
from dataclasses import replace

import pytest
import torch
from network_making import UNET, make_generator, noisy, randomize, relative
from refusing import refused
from torch.nn import functional as F
from torch.testing import assert_close

from diff_dalle.batch import Conditioning
from diff_dalle.models.text_encoder import TextEncoderConfig
from diff_dalle.models.unet import UNet, UNetConfig, UNetEncoder
from diff_dalle.models.units import parts_of

PUBLISHED = {"attention_resolutions": (32, 16, 8), "resblock_updown": True}


def count(network):
    return sum(p.numel() for p in network.parameters())


# Millions of parameters, from the hyperparameter tables of Dhariwal & Nichol (2021).
@pytest.mark.parametrize(
    ("config", "millions"),
    [
        (UNetConfig(64, 192, 3, num_head_channels=64, num_classes=1000, **PUBLISHED), 296),
        (UNetConfig(128, 256, 2, num_heads=4, num_classes=1000, **PUBLISHED), 422),
        (UNetConfig(256, 256, 2, num_head_channels=64, num_classes=1000, **PUBLISHED), 554),
        (UNetConfig(512, 256, 2, num_head_channels=64, num_classes=1000, **PUBLISHED), 559),
    ],
)
def test_published_networks_have_their_published_size(config, millions):
    with torch.device("meta"):
        network = UNet(config, out_channels=6)
    without_null_class = count(network) - 4 * config.num_channels
    assert round(without_null_class / 1e6) == millions


def test_the_encoder_half_is_the_same_network():
    """The encoder's weights load into UNetEncoder and give the same features."""
    network = randomize(UNet(UNET))
    half = UNetEncoder(UNET)
    half.load_state_dict(network.encoder.state_dict())
    x, t = noisy()
    middle, skips, emb = half(x, t, Conditioning())
    expected, expected_skips, expected_emb = network.encoder(x, t, Conditioning())
    assert torch.equal(middle, expected) and torch.equal(emb, expected_emb)
    assert all(torch.equal(a, b) for a, b in zip(skips, expected_skips, strict=True))
    assert middle.shape == (3, half.channels, 8, 8) and [s.shape[1] for s in skips] == half.skip_channels


def test_the_output_is_zero_at_initialization():
    x, t = noisy()
    for config in (UNET, replace(UNET, patch_size=2, output_conv=4)):
        assert not UNet(config, out_channels=6)(x, t).any()


def test_the_output_layers_stay_in_full_precision():
    network = make_generator(patch_size=2, output_conv=4)
    spared = {id(p) for module in parts_of(network, torch.bfloat16).full for p in module.parameters(recurse=False)}
    for layer in (network.denoiser.out_conv, network.denoiser.pixel_conv):
        assert all(id(parameter) in spared for parameter in layer.parameters())


def test_the_output_convolution_sees_across_the_edges_of_patches():
    """The output is a 3×3 convolution of SiLU of the patches' channels, side by side."""
    network, seen = randomize(UNet(replace(UNET, patch_size=4, output_conv=5))), []
    network.out_conv.register_forward_hook(lambda module, inputs, output: seen.append(output))
    out = network(*noisy())
    pixels = seen[0].unflatten(1, (5, 4, 4)).permute(0, 1, 4, 2, 5, 3).reshape(3, 5, 16, 16)
    assert_close(
        out, F.conv2d(pixels * pixels.sigmoid(), network.pixel_conv.weight, network.pixel_conv.bias, padding=1)
    )


def test_classes_and_the_null_class_differ():
    network = make_generator(text=TextEncoderConfig(enc_attn_dim=0), num_classes=5)
    x, t = noisy(1)
    outs = [network(x, t, Conditioning(labels=torch.tensor([label]))) for label in (0, 1, 5)]
    assert min(relative(a, b) for a, b in ((outs[0], outs[1]), (outs[0], outs[2]), (outs[1], outs[2]))) > 1e-3
    with refused("num_classes"):
        network(x, t)


def test_integer_and_fractional_timesteps():
    network = randomize(UNet(UNET))
    x, _ = noisy(1)
    a, b, c = (network(x, torch.tensor([t])) for t in (500, 500.0, 500.5))
    assert torch.equal(a, b) and not torch.equal(b, c)


def test_a_network_can_be_built_on_the_meta_device():
    with torch.device("meta"):
        network = UNet(UNET)
        assert network(torch.empty(2, 3, 16, 16), torch.empty(2)).shape == (2, 3, 16, 16)
    real = randomize(UNet(UNET))
    network.to_empty(device="cpu").load_state_dict(real.state_dict())
    assert torch.equal(network(*noisy()), real(*noisy()))


def test_patch_size_is_pixel_unshuffle():
    """patch_size 2 equals a network without patches between pixel_unshuffle and pixel_shuffle."""
    network = randomize(UNet(replace(UNET, patch_size=2)))
    inner = UNet(replace(UNET, image_size=8), in_channels=12, out_channels=12)
    inner.load_state_dict(network.state_dict())
    x, t = noisy()
    expected = torch.nn.functional.pixel_shuffle(inner(torch.nn.functional.pixel_unshuffle(x, 2), t), 2)
    torch.testing.assert_close(network(x, t), expected)


def test_attention_is_at_the_listed_resolutions():
    """A value between two levels selects the lower one; a value below the lowest level selects none."""
    config = UNetConfig(image_size=96, channel_mult=(1, 1, 1, 1), attention_resolutions=(48, 16, 8))
    assert [config.has_attention(level) for level in range(4)] == [False, True, False, True]
    resolutions = [64, 32, 16, 8]
    config = UNetConfig(attention_resolutions=(32, 8))
    assert [resolution for level, resolution in enumerate(resolutions) if config.has_attention(level)] == [32, 8]


def test_activation_checkpointing_keeps_no_copy_of_skip_connections(monkeypatch):
    """Neither the two that are concatenated are a copy, nor is their concatenation kept."""
    cat, joined = torch.cat, []

    def watch(tensors, dim=0):
        out = cat(tensors, dim)
        if out.dim() == 4:
            joined.append(weakref.ref(out.untyped_storage()))
        return out

    monkeypatch.setattr(torch, "cat", watch)
    out = randomize(UNet(replace(UNET, use_checkpoint=True)))(*noisy())
    assert len(joined) == 4 and not any(storage() for storage in joined)
    out.sum().backward()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image_size": 60}, "image_size is 60.*multiple of 8"),
        ({"image_size": 36, "patch_size": 2, "channel_mult": (1, 2, 2)}, "image_size is 36.*multiple of 8"),
        ({"num_channels": 0}, "num_channels is 0"),
        ({"num_channels": 30}, "num_heads is 4.*divide"),
        ({"num_head_channels": 100}, "num_head_channels is 100"),
        ({"num_heads_upsample": 5}, "num_heads_upsample is 5"),
        ({"channel_mult": (0.3, 1)}, "channel_mult has 0.3"),
        ({"channel_mult": (0, 1)}, "channel_mult has 0"),
        ({"dropout": 1.0}, "dropout is 1"),
        ({"text_attention": "both"}, "text_attention is 'both'"),
        ({"num_classes": -1}, "num_classes is -1"),
    ],
)
def test_impossible_settings_are_refused(options, message):
    with refused(message):
        UNetConfig(**options)


def test_activations_stay_channels_last():
    network, seen = randomize(UNet(UNET)), []
    for name, module in network.named_modules():
        if name.count(".") in (2, 3) and "blocks" in name:
            module.register_forward_hook(lambda module, inputs, out: seen.append(out))
    network(*noisy())
    maps = [out for out in seen if out.dim() == 4]
    assert len(maps) > 8 and all(out.is_contiguous(memory_format=torch.channels_last) for out in maps)


def test_image_sizes_that_the_levels_do_not_divide_are_refused():
    with refused("image_size is 20×17.*multiple of 2"):
        UNet(UNET)(torch.zeros(1, 3, 17, 20), torch.zeros(1))
