from dataclasses import replace

import pytest
import torch
from network_making import pixels, randomize, relative, without_gradient
from refusing import refused
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from diff_dalle.models.latent.stage_a import STAGE_A_SIZES, GatedBlock, StageA, StageAConfig

TINY = StageAConfig(levels=2, width=12, bottleneck_blocks=2, latent_channels=3, codebook_size=20)


def make(config=TINY):
    torch.manual_seed(0)
    network = randomize(StageA(config))
    network.norm.running_mean.normal_()
    network.norm.running_var.uniform_(0.5, 2)
    return network


def images(n=3, size=(16, 24)):
    return pixels(n, 3, *size)


def count(*modules):
    return sum(p.numel() for module in modules for p in module.parameters())


def test_released_size():
    with torch.device("meta"):
        network = StageA(STAGE_A_SIZES["released"])
    encoder = count(network.in_conv, network.down_blocks, network.to_latents, network.norm)
    decoder = count(network.from_latents, network.up_blocks, network.out_conv)
    found = [round(number / 1e6, 2) for number in (count(network), encoder, decoder, count(network.quantizer))]
    assert found == [18.41, 2.67, 15.71, 0.03]
    assert count(StageA(STAGE_A_SIZES["tiny"])) == pytest.approx(0.19e6, rel=0.02)


def test_a_block_against_its_formula():
    torch.manual_seed(0)
    block, x = randomize(GatedBlock(6, False)), torch.randn(2, 6, 4, 5)

    def norm(x):
        return (x - x.mean(1, keepdim=True)) / (x.var(1, correction=0, keepdim=True) + 1e-6).sqrt()

    g = block.gates
    padded = F.pad(norm(x) * (1 + g[0]) + g[1], (1, 1, 1, 1), mode="replicate")
    y = x + g[2] * F.conv2d(padded, block.depthwise.weight, block.depthwise.bias, groups=6)
    h = (norm(y) * (1 + g[3]) + g[4]).permute(0, 2, 3, 1)
    h = F.gelu(h @ block.linear_in.weight.T + block.linear_in.bias) @ block.linear_out.weight.T + block.linear_out.bias
    out = block(x.contiguous(memory_format=torch.channels_last))
    assert_close(out, y + g[5] * h.permute(0, 3, 1, 2))
    assert out.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(GatedBlock(6, False)(x), x)


def test_the_layers_in_order():
    """Encoder: 2×2 patches, a block per level with a strided convolution between, normalized latents; the decoder has
    its extra blocks at the lowest resolution. The networks see [0, 1]."""
    network, x = make(), images()
    h = network.in_conv(F.pixel_unshuffle((x + 1) / 2, 2))
    kinds = [type(layer) for layer in network.down_blocks]
    assert kinds == [GatedBlock, nn.Conv2d, GatedBlock]
    kinds = [type(layer) for layer in network.up_blocks]
    assert kinds == [GatedBlock, GatedBlock, nn.ConvTranspose2d, GatedBlock]
    z = network.to_latents(nn.Sequential(*network.down_blocks)(h))
    norm = network.norm
    z = (z - norm.running_mean.view(1, 3, 1, 1)) / (norm.running_var + norm.eps).sqrt().view(1, 3, 1, 1)
    z = z * norm.weight.view(1, 3, 1, 1) + norm.bias.view(1, 3, 1, 1)
    latents = network.encode(x)
    assert_close(latents, z / 0.43)
    assert latents.shape == (3, 3, 4, 6)
    h = network.out_conv(nn.Sequential(*network.up_blocks)(network.from_latents(z)))
    assert_close(network.decode(latents), F.pixel_shuffle(h, 2) * 2 - 1)


def test_quantized_latents_are_entries_of_the_codebook():
    network, x = make(), images()
    latents, plain = network.encode(x, quantize=True), network.encode(x)
    entries = network.quantizer.codebook.weight[network.quantizer.nearest(plain * 0.43)]
    assert_close(latents * 0.43, entries.permute(0, 3, 1, 2))
    assert relative(latents, plain) > 0.01


def test_training_decodes_a_share_from_quantized_latents():
    network, x, share = make(), images(), torch.tensor([True, False, True])
    moments = []
    found = network(x, share, moments)
    assert_close(found.images[share], network.decode(network.encode(x, quantize=True))[share])
    assert_close(found.images[1], network.decode(network.encode(x))[1])
    assert_close(network(x).images, network.decode(network.encode(x)))
    assert_close(found.z, network.encode(x) * 0.43)
    assert moments[0].shape == (3, 6) and found.indices.shape == (3, 4, 6) and found.commitment.shape == (3,)
    total = found.images.square().mean() + found.codebook_loss.mean() + found.commitment.mean()
    total.backward()
    assert not without_gradient(network)


def test_the_latents_become_normal():
    """After the statistics have followed, latents have variance 1 / scale_factor²; calibration makes it 1, and no
    reconstruction changes."""
    network, x = StageA(TINY), images(8)
    for _ in range(3):
        moments = []
        network(x, moments=moments)
        network.norm.update(moments[0])
    latents = network.encode(x)
    assert latents.std().item() == pytest.approx(1 / 0.43, rel=0.02)
    before = network.decode(latents)
    network.calibrate(latents.std())
    assert network.encode(x).std().item() == pytest.approx(1, rel=1e-4)
    assert_close(network.decode(network.encode(x)), before)
    other = StageA(TINY)
    other.load_state_dict(network.state_dict())
    assert other.scale_factor == network.scale_factor != TINY.scale_factor


@pytest.mark.parametrize("name", ["levels", "width", "bottleneck_blocks", "latent_channels", "codebook_size"])
def test_impossible_settings_are_refused(name):
    with refused(f"{name} is 0, but must be at least 1"):
        replace(TINY, **{name: 0})


def test_impossible_sizes_are_refused():
    with refused(r"width is 13, but must be a multiple of 2 \(levels\)"):
        replace(TINY, width=13)
    with refused("scale_factor is 0, but must be above 0"):
        replace(TINY, scale_factor=0.0)
    with refused(r"24×18 pixels, but stage A takes multiples of 4"):
        make().encode(images(size=(18, 24)))


@pytest.mark.slow
def test_it_learns_to_reconstruct():
    """A few colors in a hundred steps: error below a quarter of that of a constant."""
    torch.manual_seed(0)
    network, generator = StageA(replace(TINY, width=16)), torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    errors = []
    for _ in range(100):
        x = (torch.rand(8, 3, 2, 2, generator=generator) * 2 - 1).repeat_interleave(8, 2).repeat_interleave(8, 3)
        moments = []
        errors.append((network(x, moments=moments).images - x).square().mean())
        errors[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
        network.norm.update(moments[0])
    assert torch.stack(errors[-10:]).mean() < 0.25 * x.var()
