"""Triton's kernels equal the plain forms: on a GPU if there is one, else in Triton's interpreter."""

from importlib.util import find_spec

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close
from waiting import DEVICE, GPU, on_gpu

from diff_dalle.models import kernels
from diff_dalle.models.dropout import Dropout, number_dropouts
from diff_dalle.models.norms import FusedGroupNorm, GroupNorm32, output_again

pytestmark = [on_gpu, pytest.mark.skipif(find_spec("triton") is None, reason="Triton has no wheel for this platform")]


@pytest.fixture
def used(monkeypatch):
    monkeypatch.setattr(kernels, "run_on", lambda device: True)


def plain(image, weight, bias, scale_shift, groups, silu):
    out = F.group_norm(image, groups, weight, bias, 1e-5)
    if scale_shift is not None:
        scale, shift = scale_shift[:, :, None, None].chunk(2, 1)
        out = out * (1 + scale) + shift
    return F.silu(out) if silu else out


# Several tiles of rows and of channels, incomplete ones, a group of one channel, and one value a group.
SHAPES = [((2, 12, 5, 7), 4), ((1, 96, 7, 20), 32), ((2, 8, 3, 1), 8), ((2, 4, 1, 1), 1)]


@pytest.mark.parametrize(
    ("shape", "groups", "scaled", "silu"),
    [
        *((*shape, scaled, not scaled) for shape in SHAPES for scaled in (False, True)),
        *((*SHAPES[0], both, both) for both in (False, True)),
    ],
)
def test_group_norm(used, shape, groups, scaled, silu):
    torch.manual_seed(0)
    image = 3 + torch.randn(shape, device=DEVICE)
    weight, bias = torch.randn(2, shape[1], device=DEVICE)
    scale_shift = torch.randn(shape[0], 2 * shape[1], device=DEVICE) if scaled else None
    gradient = torch.randn(shape, device=DEVICE)
    given = [image.contiguous(memory_format=torch.channels_last), weight, bias, scale_shift]
    given = [each if each is None else each.detach().clone().requires_grad_() for each in given]
    exact = [each if each is None else each.detach().double().requires_grad_() for each in given]
    out = FusedGroupNorm.apply(*given, groups, 1e-5, silu)
    expected = plain(*exact, groups, silu)
    assert out.is_contiguous(memory_format=torch.channels_last)
    assert_close(out, expected.float(), rtol=1e-5, atol=1e-5)
    assert torch.equal(output_again(out)(), out)
    out.backward(gradient)
    expected.backward(gradient.double())
    for own, theirs in zip(given, exact, strict=True):
        if own is not None:
            assert (own.grad - theirs.grad).norm() <= 1e-5 * theirs.grad.norm().clamp_min(1e-3)


def test_half_precision_rounds_once(used):
    torch.manual_seed(0)
    layer = GroupNorm32(64).to(DEVICE)
    image = torch.randn(2, 64, 5, 3, device=DEVICE).bfloat16().contiguous(memory_format=torch.channels_last)
    out = layer(image.requires_grad_(), silu=True)
    expected = plain(image.double(), layer.weight.double(), layer.bias.double(), None, 32, True)
    assert out.dtype == torch.bfloat16
    assert_close(out, expected.bfloat16(), rtol=2**-7, atol=1e-6)
    out.sum().backward()
    assert image.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("shape", [(3, 5, 7), (2, 300, 11)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout(monkeypatch, shape, dtype):
    layer = Dropout(0.3)
    number_dropouts(torch.nn.Sequential(layer))
    x = torch.randn(shape, device=DEVICE).to(dtype)
    keys = torch.tensor([5, -7, 2**40])[: shape[0]].to(DEVICE)
    results = []
    for kernel in (False, True):
        monkeypatch.setattr(kernels, "run_on", lambda device, kernel=kernel: kernel)
        given = x.clone().requires_grad_()
        out = layer(given, keys)
        out.backward(x)
        results.append((out, given.grad))
    rounding = 0 if GPU else torch.finfo(dtype).eps  # the interpreter cuts bfloat16 off
    for own, expected in zip(*results, strict=True):
        assert torch.equal(own == 0, expected == 0) and (own == 0).any() and (own != 0).any()
        assert_close(own, expected, rtol=rounding, atol=0)
