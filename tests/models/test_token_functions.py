"""Functions with gradients of their own: against plain formulas, in value, gradient, dtype and what is kept."""

import pytest
import torch
from network_making import seeded
from torch.nn import functional as F
from torch.testing import assert_close

from diff_dalle.models.transformer_blocks import EPS, modulated_norm, swiglu, turned_norm, turns

TURN = turns(seeded(5, 2, seed=7), 8)


def rms(x):
    return x / (x.float().square().mean(-1, keepdim=True) + EPS).sqrt()


def plain_modulated(x, scale, shift):
    return rms(x) * (1 + scale) + shift


def plain_turned(x, weight):
    """By complex numbers."""
    first, second = (rms(x) * weight).chunk(2, -1)
    angles = torch.complex(TURN[0], TURN[1])[None, :, None]
    product = torch.complex(first.contiguous(), second.contiguous()) * angles
    return torch.cat([product.real, product.imag], -1)


def plain_swiglu(x):
    gate, value = x.chunk(2, -1)
    return gate * torch.sigmoid(gate) * value


def given(*shapes):
    return [seeded(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]


CASES = {
    "modulated": (modulated_norm, plain_modulated, ((2, 5, 8), (2, 1, 8), (2, 1, 8))),
    "turned": (lambda x, weight: turned_norm(x, weight, TURN), plain_turned, ((2, 5, 3, 8), (8,))),
    "swiglu": (swiglu, plain_swiglu, ((2, 5, 8),)),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_the_plain_formula(name):
    function, plain, shapes = CASES[name]
    inputs, others = given(*shapes), given(*shapes)
    out, expected = function(*inputs), plain(*others)
    assert_close(out, expected)
    weights = seeded(*out.shape, seed=9)
    found = torch.autograd.grad((out * weights).sum(), inputs)
    assert_close(found, torch.autograd.grad((expected * weights).sum(), others), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_half_precision_has_fp32_statistics_and_comes_back(name):
    """Tokens whose squares overflow fp16."""
    function, plain, shapes = CASES[name]
    x, *others = given(*shapes)
    x = (x.detach() * (1 if name == "swiglu" else 1000)).half().requires_grad_()
    out = function(x, *others)
    assert out.dtype == torch.float16
    assert_close(out.float(), plain(x.detach().float(), *others), rtol=5e-3, atol=5e-3)
    out.float().sum().backward()
    assert x.grad.dtype == torch.float16 and x.grad.isfinite().all()


@pytest.mark.parametrize("name", CASES)
def test_a_backward_pass_within_autocast_stays_in_fp32(name):
    function, _, shapes = CASES[name]
    inputs, others = given(*shapes), given(*shapes)
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.autograd.grad(function(*inputs).square().sum(), inputs)
    assert_close(found, torch.autograd.grad(function(*others).square().sum(), others))


@pytest.mark.parametrize("name", CASES)
def test_tokens_of_zeros_are_finite_with_finite_gradients(name):
    function, _, shapes = CASES[name]
    x, *others = given(*shapes)
    x = torch.zeros_like(x, requires_grad=True)
    out = function(x, *others)
    assert out.isfinite().all() and torch.autograd.grad(out.sum(), x)[0].isfinite().all()


@pytest.mark.parametrize("name", CASES)
def test_of_the_tokens_only_the_input_is_kept(name):
    function, _, shapes = CASES[name]
    inputs, kept = given(*shapes), []
    with torch.autograd.graph.saved_tensors_hooks(lambda value: kept.append(value) or value, lambda value: value):
        function(*inputs)
    large = [value for value in kept if value.shape == inputs[0].shape]
    assert len(large) == 1 and large[0].data_ptr() == inputs[0].data_ptr()


@pytest.mark.parametrize("name", CASES)
def test_a_compiler_sees_the_plain_formula(name):
    function, plain, shapes = CASES[name]
    inputs = given(*shapes)
    torch._dynamo.reset()
    assert_close(torch.compile(function, backend="eager", fullgraph=True)(*inputs), plain(*inputs))


def test_products_of_turned_tokens_depend_on_the_distance_alone():
    x, ones = seeded(1, 1, 1, 8).expand(1, 2, 1, 8), torch.ones(8)

    def product(*positions):
        turned = turned_norm(x, ones, turns(torch.tensor(positions, dtype=torch.float32), 8))
        return (turned[:, 0] * turned[:, 1]).sum()

    assert_close(product((0, 0), (3, 5)), product((2, -4), (5, 1)))
    assert abs(product((0, 0), (3, 5)) - product((0, 0), (5, 3))) > 1e-2  # rows and columns differ
    assert abs(product((0, 0), (0, 1)) - product((0, 0), (0, 2))) > 1e-2
    assert_close(product((1, 1), (1, 1)), F.mse_loss(x[:, 0], 0 * x[:, 0], reduction="sum") / x[:, 0].square().mean())
