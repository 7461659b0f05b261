"""Blocks of stages B and C against plain formulas on NCHW, and torch's own multi-head attention."""

import math

import pytest
import torch
from network_making import randomize, seeded
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from diff_dalle.models.dropout import number_dropouts
from diff_dalle.models.latent.blocks import (
    AttentionBlock,
    Context,
    ConvBlock,
    FeedForward,
    GlobalResponseNorm,
    TimestepBlock,
    Transition,
    noise_embedding,
    xavier,
)


def image(channels, n=2, size=(5, 4), seed=0):
    x = seeded(n, channels, *size, seed=seed)
    return x.contiguous(memory_format=torch.channels_last)


def context(n=2, conditions=1, tokens=None, keys=None):
    emb = torch.stack([noise_embedding(torch.linspace(0.2, 0.7, n) / (i + 1), 6) for i in range(conditions)], 1)
    return Context(emb, tokens, keys)


def normalized(x):
    """Over the channels of NCHW."""
    return (x - x.mean(1, keepdim=True)) / (x.var(1, correction=0, keepdim=True) + 1e-6).sqrt()


def mapped(layer, x):
    return torch.einsum("nchw,dc->ndhw", x, layer.weight) + layer.bias[:, None, None]


def response_mlp(mlp, x):
    h = mapped(mlp.linear_in, x)
    h = 0.5 * h * (1 + torch.erf(h / math.sqrt(2)))
    energy = h.square().sum((2, 3), keepdim=True).sqrt()
    gamma, beta = (p[:, None, None] for p in (mlp.response_norm.gamma, mlp.response_norm.beta))
    h = gamma * (h * (energy / (energy.mean(1, keepdim=True) + 1e-6))) + beta + h
    return mapped(mlp.linear_out, h)


@pytest.mark.parametrize("skip_channels", [0, 3])
@pytest.mark.parametrize("kernel_size", [3, 5])
def test_convolution_block(kernel_size, skip_channels):
    torch.manual_seed(0)
    block = randomize(ConvBlock(8, skip_channels, kernel_size, 0.0, 2, use_checkpoint=False))
    x, skip = image(8), image(3, seed=1) if skip_channels else None
    h = normalized(F.conv2d(x, block.depthwise.weight, block.depthwise.bias, padding=kernel_size // 2, groups=8))
    h = h if skip is None else torch.cat([h, skip], 1)
    out = block(x, context(), skip)
    assert_close(out, x + response_mlp(block.mlp, h))
    assert out.is_contiguous(memory_format=torch.channels_last)


def test_feed_forward_block():
    torch.manual_seed(0)
    block, x = randomize(FeedForward(8, 0.0, 2, use_checkpoint=False)), image(8)
    assert_close(block(x, context()), x + response_mlp(block.mlp, normalized(x)))


@pytest.mark.parametrize("cond_width", [0, 6])
def test_attention_block(cond_width):
    """Keys and values are the positions' own and those of the condition tokens."""
    torch.manual_seed(0)
    block, x = randomize(AttentionBlock(8, 2, cond_width, use_checkpoint=False)), image(8)
    reference = nn.MultiheadAttention(8, 2, batch_first=True)
    with torch.no_grad():
        reference.in_proj_weight.copy_(block.attn.in_proj.weight)
        reference.in_proj_bias.copy_(block.attn.in_proj.bias)
        reference.out_proj.load_state_dict(block.attn.out_proj.state_dict())
    q, tokens = normalized(x).flatten(2).transpose(1, 2), torch.randn(2, 3, 6) if cond_width else None
    kv = q if tokens is None else torch.cat([q, tokens @ block.kv_mapper.weight.T + block.kv_mapper.bias], 1)
    expected = x + reference(q, kv, kv)[0].transpose(1, 2).reshape(x.shape)
    assert_close(block(x, context(tokens=tokens)), expected)


@pytest.mark.parametrize("conditions", [1, 3])
def test_timestep_block(conditions):
    torch.manual_seed(0)
    block, x, given = randomize(TimestepBlock(8, 6, conditions)), image(8), context(conditions=conditions)
    signal = sum(given.emb[:, i] @ block.mappers[i].weight.T + block.mappers[i].bias for i in range(conditions))
    expected = x * (1 + signal[:, :8, None, None]) + signal[:, 8:, None, None]
    assert_close(block(x, given), expected)


def test_noise_embedding():
    """Sines of 10000 · t at frequencies from 1 to 1/10000, both included, then the cosines."""
    t = torch.tensor([0.0, 1e-4, 0.5])
    out = noise_embedding(t, 7)
    for n, value in enumerate(t.tolist()):
        angles = [value * 10000 * 10000 ** (-i / 2) for i in range(3)]
        expected = [*map(math.sin, angles), *map(math.cos, angles), 0.0]
        assert_close(out[n], torch.tensor(expected), atol=1e-4, rtol=0)
    assert out.shape == (3, 7) and out[0].tolist() == [0, 0, 0, 1, 1, 1, 0]


@pytest.mark.parametrize(
    ("kind", "up", "out"),
    [("same", False, (5, 4)), ("same", True, (5, 4)), ("strided", False, (2, 2)), ("strided", True, (10, 8)),
     ("resized", False, (2, 2)), ("resized", True, (10, 8))],
)  # fmt: skip
def test_transitions(kind, up, out):
    torch.manual_seed(0)
    layer, x = randomize(Transition(8, 6, kind, up)), image(8)
    h, (weight, bias) = normalized(x), layer.conv.parameters()
    if kind == "strided":
        convolve = F.conv_transpose2d if up else F.conv2d
        expected = convolve(h, weight, bias, stride=2)
    else:
        expected = F.conv2d(h, weight, bias)
        if kind == "resized":
            expected = F.interpolate(expected, scale_factor=2.0 if up else 0.5, mode="bilinear", align_corners=True)
    assert_close(layer(x), expected)
    assert layer(x).shape == (2, 6, *out)


def test_initial_values():
    """T is the identity; global response normalization too; the last layer of C and F shrinks with the depth; biases
    are 0 and the others uniform after Glorot & Bengio."""
    torch.manual_seed(0)
    x = image(8)
    assert torch.equal(TimestepBlock(8, 6, 2)(x, context(conditions=2)), x)
    tokens = torch.randn(2, 5, 8)
    assert torch.equal(GlobalResponseNorm(8)(tokens), tokens)
    for branches in (1, 16):
        for block in (ConvBlock(64, 32, 3, 0.0, branches, False), FeedForward(64, 0.0, branches, False)):
            inner, last = block.mlp.linear_in, block.mlp.linear_out
            for layer, gain in ((inner, 1), (last, branches**-0.5)):
                bound = gain * math.sqrt(6 / sum(layer.weight.shape))
                assert 0.95 * bound < layer.weight.abs().max() <= bound
                assert not layer.bias.any()
    attention = AttentionBlock(64, 2, 32, False)
    for layer in (attention.attn.in_proj, attention.attn.out_proj, attention.kv_mapper):
        bound = math.sqrt(6 / sum(layer.weight.shape))
        assert 0.95 * bound < layer.weight.abs().max() <= bound and not layer.bias.any()
    assert xavier(nn.Linear(64, 64), 0.02).weight.abs().max() < 0.02 * math.sqrt(6 / 128)


def test_statistics_of_the_response_norm_are_in_fp32():
    """In half precision a norm over many positions would overflow."""
    norm = randomize(GlobalResponseNorm(4))
    x = 60 * torch.rand(1, 2000, 4, generator=torch.Generator().manual_seed(0)).half() + 2000
    assert_close(norm(x).float(), norm(x.float()), rtol=2e-3, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_the_response_norm(dtype):
    """Those of the formula by torch's norm, also where a channel is 0 everywhere."""
    norm = randomize(GlobalResponseNorm(4))
    draw = torch.Generator().manual_seed(0)
    x, upstream = torch.randn(2, 30, 4, generator=draw), torch.randn(2, 30, 4, generator=draw)
    x[0, :, 2] = 0

    def plain(x):
        energy = torch.linalg.vector_norm(x, dim=1, keepdim=True)
        return norm.gamma * x * energy / (energy.mean(-1, keepdim=True) + 1e-6) + norm.beta + x

    inputs = (x.to(dtype).requires_grad_(), norm.gamma, norm.beta)
    found = torch.autograd.grad(norm(inputs[0]), inputs, upstream.to(dtype))
    inputs = (x.to(dtype).float().requires_grad_(), norm.gamma, norm.beta)
    expected = torch.autograd.grad(plain(inputs[0]), inputs, upstream)
    for ours, theirs in zip(found, expected, strict=True):
        error = (ours.float() - theirs).norm() / theirs.norm()
        assert error < (1e-6 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("make", [
    lambda on: ConvBlock(8, 0, 3, 0.3, 1, on), lambda on: FeedForward(8, 0.3, 1, on),
    lambda on: AttentionBlock(8, 2, 6, on),
], ids=["C", "F", "A"])  # fmt: skip
@pytest.mark.parametrize("keyed", [True, False])
def test_checkpointing_keeps_nothing_but_the_input_of_a_block_for_the_backward_pass(make, keyed):
    kept = []
    for on in (False, True):
        given = context(tokens=torch.ones(2, 3, 6), keys=torch.tensor([3, 4]) if keyed else None)
        saved, block = [], make(on)
        number_dropouts(block)
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t) or t, lambda t: t):
            block(image(8).requires_grad_(), given)
        kept.append(len(saved))
    assert kept[1] < kept[0] / 2
