"""Layers of the decoder's U-Nets against references of plain torch, written as their papers state them."""

import math

import pytest
import torch
from network_making import randomize, seeded
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from diff_dalle.models.cost import count_flops
from diff_dalle.models.decoder.blocks import (
    ConvNorm,
    CrossEmbed,
    LinearAttention,
    MultiQueryAttention,
    OverPositions,
    PixelShuffle,
    ResidualBlock,
    StandardizedConv2d,
    TokenAttention,
)
from diff_dalle.models.decoder.config import DecoderUnetConfig
from diff_dalle.models.decoder.unet import _Builder


def images(channels, n=2, size=(6, 4), seed=0):
    x = seeded(n, channels, *size, seed=seed)
    return x.contiguous(memory_format=torch.channels_last)


def normalized(x, gain):
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt() * gain


def reference_attention(layer, x, context, cosine, kv_heads):
    """Head by head, with an explicit softmax."""
    heads, width = layer.heads, layer.head_width
    x = normalized(x, layer.norm.weight)
    q, kv = x @ layer.q.weight.T, (x if context is None else context) @ layer.kv.weight.T
    out = []
    for head in range(heads):
        own = head if kv_heads > 1 else 0
        k, v = (kv[..., (half * kv_heads + own) * width :][..., :width] for half in (0, 1))
        k, v = (
            torch.cat([null.expand(len(x), 1, width), each], 1)
            for null, each in ((layer.null_kv[0], k), (layer.null_kv[1], v))
        )
        each, scale = q[..., head * width :][..., :width], 1 / math.sqrt(width)
        if cosine:
            each, k, scale = each / each.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True), 16
        out.append((scale * each @ k.transpose(1, 2)).softmax(-1) @ v)
    return normalized(torch.cat(out, -1) @ layer.proj.weight.T, layer.out_norm.weight)


@pytest.mark.parametrize("cosine", [False, True])
def test_multi_query_attention(cosine):
    """All heads of queries share one head of keys and values; the scale is 1/√(channels per head), once."""
    torch.manual_seed(0)
    layer, x = randomize(MultiQueryAttention(12, heads=3, head_width=5, cosine=cosine)), torch.randn(2, 7, 12)
    assert layer.kv.weight.shape == (10, 12)
    assert_close(layer(x), reference_attention(layer, x, None, cosine, 1))


@pytest.mark.parametrize("count", [3, 62, 63, 70])
@pytest.mark.parametrize("cosine", [False, True])
def test_attention_to_tokens(cosine, count):
    """8 heads of 64 channels, whatever the width."""
    torch.manual_seed(0)
    layer, x, tokens = randomize(TokenAttention(12, 6, cosine)), torch.randn(2, 7, 12), torch.randn(2, count, 6)
    assert layer.q.weight.shape == (512, 12) and layer.kv.weight.shape == (1024, 6)
    assert_close(layer(x, tokens), reference_attention(layer, x, tokens, cosine, 8))


def test_attention_to_few_tokens_is_cheaper_than_its_projections():
    """FLOPs, against a multiply-add for each weight of queries and output, for each token."""
    with torch.device("meta"):
        layer = TokenAttention(256, 64, cosine=False)
        projections = 2 * 2 * 1024 * 256 * 512
        found = [
            count_flops(layer, lambda layer, n=n: layer(torch.empty(1, 1024, 256), torch.empty(1, n, 64)))
            for n in (6, 63)
        ]
    assert found[0] < 0.2 * projections and projections < found[1] < 1.3 * projections


def test_linear_attention():
    """Softmax of queries over channels and of keys over positions, values of length 1; the sum over pairs."""
    torch.manual_seed(0)
    layer, x = randomize(LinearAttention(12, heads=2, head_width=5)), torch.randn(2, 7, 12)
    q, k, v = (normalized(x, layer.norm.weight) @ layer.qkv.weight.T).split(10, dim=-1)
    out = []
    for head in range(2):
        qh, kh, vh = (each[..., 5 * head : 5 * head + 5] for each in (q, k, v))
        weights = qh.softmax(-1) @ kh.softmax(1).transpose(1, 2)  # tokens × tokens
        out.append(weights @ (vh / vh.norm(dim=-1, keepdim=True)))
    expected = normalized(F.gelu(torch.cat(out, -1)) @ layer.proj.weight.T, layer.out_norm.weight)
    assert_close(layer(x), expected)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_attention_over_positions_is_residual(checkpointed):
    layer = randomize(LinearAttention(8, 2, 3))
    x = images(8)
    tokens = x.flatten(2).transpose(1, 2)
    expected = x + layer(tokens).transpose(1, 2).unflatten(2, (6, 4))
    assert_close(OverPositions(layer, checkpointed)(x), expected)


def test_weight_standardization():
    """Neither scale nor mean of a filter's weights matters; a standardized filter has mean 0 and variance 1."""
    torch.manual_seed(0)
    conv, x = StandardizedConv2d(3, 4, 3, padding=1), images(3)
    weight = conv.weight.detach()
    flat = weight.flatten(1)
    unit = (flat - flat.mean(1, keepdim=True)) / (flat.var(1, correction=0, keepdim=True) + 1e-5).sqrt()
    expected = F.conv2d(x, unit.view_as(weight), conv.bias, padding=1)
    assert_close(conv(x), expected)
    with torch.no_grad():
        conv.weight.mul_(torch.tensor([3.0, 5.0, 9.0, 30.0]).view(4, 1, 1, 1)).add_(7)
    assert_close(conv(x), expected, atol=1e-2, rtol=0)  # up to the constant in the root


@pytest.mark.parametrize("standardized", [False, True])
def test_residual_block(standardized):
    torch.manual_seed(0)
    options = {"token_width": 5, "standardized": standardized, "skip_scale": 0.5}
    block = randomize(ResidualBlock(8, 12, 6, groups=4, **options))
    x, skip, emb, tokens = images(5), images(3, seed=1), torch.randn(2, 6), torch.randn(2, 4, 5)
    joined = torch.cat([x, skip / 2], 1)
    scale, shift = (emb @ block.emb.weight.T + block.emb.bias)[:, :, None, None].split(12, 1)
    h = F.group_norm(block.first.conv(joined), 4, block.first.norm.weight, block.first.norm.bias)
    h = F.silu(h * (1 + scale) + shift)
    h = h + block.attention(h.flatten(2).transpose(1, 2), tokens).transpose(1, 2).unflatten(2, (6, 4))
    h = F.silu(F.group_norm(block.second.conv(h), 4, block.second.norm.weight, block.second.norm.bias))
    expected = h + F.conv2d(joined, block.shortcut.weight[:, :, None, None], block.shortcut.bias)
    assert_close(block(x, emb, tokens, skip), expected)
    assert isinstance(block.first.conv, StandardizedConv2d) == isinstance(block.second.conv, StandardizedConv2d)
    assert isinstance(block.first.conv, StandardizedConv2d) == standardized


@pytest.mark.parametrize(("sizes", "stride"), [((15, 3, 7), 1), ((4, 2), 2), ((5,), 1)])
def test_cross_embedding(sizes, stride):
    """One convolution with the largest kernel, into the middle of which the others' kernels are put, is the same."""
    torch.manual_seed(0)
    layer, x, largest = CrossEmbed(3, 10, sizes, stride), images(3, size=(8, 12)), max(sizes)
    assert [conv.out_channels for conv in layer.convs] == {3: [5, 2, 3], 2: [5, 5], 1: [10]}[len(sizes)]
    assert [conv.kernel_size[0] for conv in layer.convs] == sorted(sizes)
    weight = torch.cat([F.pad(conv.weight, [(largest - conv.kernel_size[0]) // 2] * 4) for conv in layer.convs])
    bias = torch.cat([conv.bias for conv in layer.convs])
    expected = F.conv2d(x, weight, bias, stride, (largest - stride) // 2)
    out = layer(x)
    assert out.shape == (2, 10, 8 // stride, 12 // stride)
    assert_close(out, expected)


def test_pixel_shuffle():
    """The four maps start equal, so that the output is constant on each 2×2 patch; it is torch's pixel shuffle."""
    torch.manual_seed(0)
    layer, x = PixelShuffle(6, 5), images(6)
    out = layer(x)
    assert out.shape == (2, 5, 12, 8) and out.is_contiguous(memory_format=torch.channels_last)
    assert_close(out, F.interpolate(out[:, :, ::2, ::2], scale_factor=2.0))
    assert layer.linear.weight[:5].std() > 0.1 and out.std() > 0.05
    randomize(layer)
    weight, bias = (p.unflatten(0, (4, 5)).transpose(0, 1).flatten(0, 1) for p in layer.linear.parameters())
    expected = F.pixel_shuffle(F.silu(F.conv2d(x, weight[:, :, None, None], bias)), 2)
    assert_close(layer(x), expected)
    assert not torch.equal(layer(x)[:, :, ::2], layer(x)[:, :, 1::2])


def test_downsampling_is_space_to_depth_and_a_linear_map():
    torch.manual_seed(0)
    layer, x = _Builder(DecoderUnetConfig()).downsample(3, 5), images(3)
    expected = F.conv2d(F.pixel_unshuffle(x, 2), layer.weight.flatten(1)[:, :, None, None], layer.bias)
    assert_close(layer(x), expected)


def test_nearest_neighbor_upsampling():
    layer, x = _Builder(DecoderUnetConfig(pixel_shuffle_upsample=False)).upsample(3, 5), images(3)
    large = x.repeat_interleave(2, 2).repeat_interleave(2, 3)
    assert_close(layer(x), F.conv2d(large, layer[1].weight, layer[1].bias, padding=1))


def test_norms_have_the_asked_number_of_groups():
    block = ConvNorm(4, 12, 6)
    assert isinstance(block.norm, nn.GroupNorm) and block.norm.num_groups == 6
