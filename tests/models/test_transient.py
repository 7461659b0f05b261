import weakref

import pytest
import torch
from network_making import randomize
from torch import nn

from diff_dalle.batch import Conditioning
from diff_dalle.models import norms
from diff_dalle.models.layers import Downsample, ResBlock, Transient, Upsample, to_channels_last

KEYS = torch.tensor([5, -7])
BLOCKS = {
    "equal": {},
    "wider": {"out_channels": 96},
    "added": {"use_scale_shift_norm": False},
    "down": {"resample": Downsample(64, learned=False)},
    "up": {"resample": Upsample(64, learned=False)},
    "dropout": {"dropout": 0.3},
    "dropout_up": {"dropout": 0.3, "resample": Upsample(64, learned=False)},
}


def block_of(name):
    torch.manual_seed(0)
    settings = {"out_channels": 64, "dropout": 0.0, "use_scale_shift_norm": True, **BLOCKS[name]}
    return to_channels_last(randomize(ResBlock(64, emb_width=16, use_checkpoint=False, **settings)))


def passed(block, keys, half):
    """A forward pass: output and inputs."""
    torch.manual_seed(1)
    dtype = torch.bfloat16 if half else torch.float32
    x = torch.randn(2, 64, 8, 8, dtype=dtype).to(memory_format=torch.channels_last).requires_grad_()
    emb = torch.randn(2, 16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        return block(x, emb, Conditioning(dropout_keys=keys)), x, emb


@pytest.mark.parametrize("native", [True, False], ids=["as_on_cpu", "as_on_cuda"])
@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("keys", [KEYS, None], ids=["keys", "no_keys"])
@pytest.mark.parametrize("name", BLOCKS)
def test_gradients_have_the_bits_of_those_from_kept_inputs(name, keys, half, native, monkeypatch):
    monkeypatch.setattr(norms, "native_keeps_layout", lambda device: native)
    results = []
    for kept in (True, False):
        block = block_of(name)
        block.keeps_conv_inputs = kept
        out, *inputs = passed(block, keys, half)
        gradients = torch.autograd.grad(out.float().square().sum(), [*inputs, *block.parameters()])
        results.append([out, *gradients])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", [name for name in BLOCKS if name != "dropout_up"])
def test_inputs_of_convolutions_are_not_kept(name, half):
    block, seen = block_of(name), []
    for module in (block.in_conv, block.out_conv):
        module.register_forward_pre_hook(lambda module, inputs: seen.append(weakref.ref(inputs[0].untyped_storage())))
    for kept in (False, True):
        block.keeps_conv_inputs |= kept
        seen.clear()
        out, *_ = passed(block, KEYS, half)
        assert [storage() is not None for storage in seen] == [kept, kept], (name, kept)
        out.sum().backward()


def test_without_gradients_nothing_is_computed_again():
    with torch.no_grad():
        assert norms.output_again(norms.GroupNorm32(64)(torch.randn(1, 64, 4, 4), silu=True)) is None


def doubled(x):
    """A transient 2 · x, and how often it has been computed again."""
    calls = []

    def again():
        calls.append(None)
        return x.detach() * 2

    return Transient(x * 2, again), calls


@pytest.mark.parametrize(
    ("function", "computed"),
    [
        (torch.sin, 1),
        (lambda y: y[1:].square(), 0),  # a part of it is kept
        (lambda y: y.t() @ torch.ones(3, 1), 0),  # needs no value
        (lambda y: (y + 1).square(), 0),  # another tensor
        (lambda y: y.sin() + y.cos(), 2),
    ],
)
def test_only_the_tensor_itself_is_computed_again(function, computed):
    x = torch.arange(6.0).reshape(3, 2).requires_grad_()
    (expected,) = torch.autograd.grad(function(x * 2).sum(), x)
    value, calls = doubled(x)
    (found,) = torch.autograd.grad(value.into(function).sum(), x)
    assert torch.equal(found, expected) and len(calls) == computed


def test_what_comes_of_it_is_computed_again_from_it():
    x = torch.randn(3, requires_grad=True)
    (expected,) = torch.autograd.grad((x * 2).sin().exp().sum(), x)
    value, calls = doubled(x)
    sine = value.through(torch.sin)
    own = weakref.ref(sine.value.untyped_storage())
    out = sine.into(torch.expm1).sum()  # whose backward pass needs its output alone
    product = sine.into(torch.square).sum()
    del sine
    assert own() is None and not calls
    (found,) = torch.autograd.grad(out + 0 * product, x)
    assert torch.allclose(found, expected) and len(calls) == 2  # for the square, and for the sine
    assert isinstance(Transient(x, None).through(nn.Identity()).again, type(None))
