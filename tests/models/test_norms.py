"""Group norm with what follows it: it must equal torch's own operations and keep the channels-last layout."""

import pytest
import torch
from network_making import captions, make_generator, noisy
from operation_counting import operations
from torch.nn import functional as F
from torch.testing import assert_close
from waiting import needs_cuda

from diff_dalle.models import norms
from diff_dalle.models.norms import FusedGroupNorm, GroupNorm32

LAYOUT = {"memory_format": torch.channels_last}


def example(dtype=torch.float64, shape=(2, 12, 5, 7)):
    """An image with a mean far from 0, where cancellation would show, and the norm's weights."""
    torch.manual_seed(0)
    image = (5 + torch.randn(shape, dtype=dtype)).to(**LAYOUT)
    return [each.requires_grad_() for each in (image, *torch.randn(2, shape[1], dtype=dtype))]


def norm(image, weight, bias, scale_shift=None, silu=False):
    return FusedGroupNorm.apply(image, weight, bias, scale_shift, 4, 1e-5, silu)


def plain(image, weight, bias, scale_shift=None, silu=False):
    out = F.group_norm(image, 4, weight, bias, 1e-5)
    if scale_shift is not None:
        scale, shift = scale_shift[:, :, None, None].chunk(2, dim=1)
        out = out * (1 + scale) + shift
    return F.silu(out) if silu else out


@pytest.fixture(params=[True, False], ids=["cpu", "cuda"])
def native(request, monkeypatch):
    """Both ways to the statistics: that of the CPU, and that of CUDA on the CPU."""
    monkeypatch.setattr(norms, "native_keeps_layout", lambda device: request.param)
    return request.param


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_values_and_gradients_are_exact(native, scaled, silu, layout):
    inputs = example()
    inputs[0] = inputs[0].detach().contiguous(memory_format=layout).requires_grad_()
    if scaled:
        inputs.append(torch.randn(2, 24, dtype=torch.float64, requires_grad=True))
    signal = inputs[3] if scaled else None

    def fused(*inputs):
        return norm(*inputs[:3], *(inputs[3:] or [None]), silu)

    expected = plain(*inputs[:3], signal, silu)
    assert_close(fused(*inputs), expected, rtol=1e-12, atol=1e-12)
    upstream = torch.randn_like(expected)
    pairs = zip(
        torch.autograd.grad(fused(*inputs), inputs, upstream),
        torch.autograd.grad(expected, inputs, upstream),
        strict=True,
    )
    for found, wanted in pairs:
        assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    assert torch.autograd.gradcheck(fused, inputs, fast_mode=True)


@pytest.mark.parametrize("half", [False, True])
def test_the_compiled_layer_equals_the_eager_one(half):
    """In one graph, with everything that follows the norm, also under autocast."""
    layer = GroupNorm32(12, 4)
    x, signal = (5 + torch.randn(2, 12, 4, 4)).to(**LAYOUT), torch.randn(2, 24)
    x = x.bfloat16() if half else x
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    results = []
    for each in (layer, compiled):
        inputs = x.clone().requires_grad_(), signal.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            out = each(*inputs, silu=True)
        out.float().square().sum().backward()
        results.append([out.detach(), *(each.grad for each in inputs), layer.weight.grad.clone()])
        layer.zero_grad()
    for found, wanted in zip(*results, strict=True):
        assert found.dtype == wanted.dtype
        assert (found.float() - wanted.float()).norm() <= (1e-2 if half else 1e-5) * wanted.float().norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("silu", [False, True])
def test_half_precision_loses_its_last_digit_only(native, silu, dtype):
    """Forward and backward equal the fp32 computation on the same half-precision tensors, rounded at the end."""
    image, weight, bias = example(torch.float32)
    scale_shift = torch.randn(2, 24)
    half = image.detach().to(dtype).requires_grad_()
    upstream = torch.randn(image.shape).to(**LAYOUT).to(dtype)
    out = norm(half, weight, bias, scale_shift, silu)
    found = torch.autograd.grad(out, (half, weight, bias), upstream)
    exact = half.detach().float().requires_grad_()
    expected = plain(exact, weight, bias, scale_shift, silu)
    wanted = torch.autograd.grad(expected, (exact, weight, bias), upstream.float())
    assert out.dtype == found[0].dtype == dtype and found[1].dtype == found[2].dtype == torch.float32
    for a, b in zip((out, *found), (expected.to(dtype), wanted[0].to(dtype), *wanted[1:]), strict=True):
        assert_close(a.float(), b.float(), rtol=torch.finfo(dtype).eps, atol=1e-4)


@pytest.fixture
def as_on_cuda(monkeypatch):
    monkeypatch.setattr(norms, "native_keeps_layout", lambda device: False)


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("autocast", [True, False])
def test_few_operations_touch_the_image_and_each_tensor_is_converted_once(as_on_cuda, autocast, silu):
    image, weight, bias = example(torch.bfloat16, (2, 64, 8, 8))
    weight, bias = weight.detach().float().requires_grad_(), bias.detach().float().requires_grad_()
    outs, scale_shift = [], torch.randn(2, 128)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        forward = operations(lambda: outs.append(norm(image, weight, bias, scale_shift, silu)), least=image.numel())
        upstream = torch.ones_like(outs[0])
        backward = operations(
            lambda: torch.autograd.grad(outs[0], (image, weight, bias), upstream), least=image.numel()
        )
    activated = {"silu_": 1} if silu else {}
    assert forward == {"_to_copy": 2, "var_mean": 1, "addcmul": 1, **activated}, forward
    activated = {"_to_copy": 2, "addcmul": 3, "silu_backward": 1} if silu else {}
    assert backward == {"_to_copy": 1, "addcmul": 2, "addcmul_": 1, "sum": 2, **activated}, backward


def test_autocast_is_off_inside(as_on_cuda, monkeypatch):
    """On CUDA it converts every operand of these operations to fp32 first."""
    image, weight, bias = example(torch.bfloat16, (2, 64, 8, 8))
    addcmul, enabled = torch.addcmul, []

    def watch(*arguments, **options):
        enabled.append(torch.is_autocast_enabled("cpu"))
        return addcmul(*arguments, **options)

    monkeypatch.setattr(torch, "addcmul", watch)
    with torch.autocast("cpu", torch.bfloat16):
        norm(image, weight.float(), bias.float()).sum().backward()
    assert len(enabled) == 6 and not any(enabled)


def test_it_saves_the_image_alone_for_the_backward_pass(native):
    image, weight, bias = example(torch.bfloat16, (2, 64, 8, 8))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        norm(image, weight.float(), bias.float(), torch.randn(2, 128), True)
    large = [x for x in saved if x.numel() >= image.numel()]
    assert len(large) == 1 and large[0].data_ptr() == image.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_network_keeps_channels_last_and_its_values(monkeypatch, dtype):
    """Activations after every norm, and their gradients; with checkpointing, cross-attention and autocast."""
    (x, t), layouts = noisy(), []

    def watch(module, inputs, out):
        layouts.append(out.is_contiguous(**LAYOUT))
        out.register_hook(lambda gradient: layouts.append(gradient.is_contiguous(**LAYOUT)))

    results = []
    for native in (True, False):
        monkeypatch.setattr(norms, "native_keeps_layout", lambda device, native=native: native)
        network = make_generator(use_checkpoint=True)
        if not native:
            for module in network.modules():
                if isinstance(module, GroupNorm32):
                    module.register_forward_hook(watch)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            out = network(x, t, captions())
        out.square().mean().backward()
        results.append([out.detach(), *(p.grad for p in network.parameters())])
    assert len(layouts) > 20 and all(layouts)
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    # That of a bias before a norm nearly cancels: in bfloat16 its error is that of its terms.
    floor = torch.stack([expected.norm() for expected in results[0][1:]]).median()
    for own, expected in zip(results[1], results[0], strict=True):
        assert (own - expected).norm() <= tolerance * max(expected.norm(), floor)


def test_only_cuda_needs_it():
    assert [norms.native_keeps_layout(torch.device(name)) for name in ("cpu", "meta", "cuda")] == [True, False, False]
    x = torch.randn(2, 64, 4, 4).to(**LAYOUT)
    assert GroupNorm32(64)(x).is_contiguous(**LAYOUT)


@needs_cuda
def test_on_a_gpu():
    layer = GroupNorm32(64).cuda()
    x = (5 + torch.randn(2, 64, 8, 8, device="cuda")).to(**LAYOUT)
    out = layer(x)
    assert out.is_contiguous(**LAYOUT)
    expected = F.group_norm(x, layer.num_groups, layer.weight, layer.bias, layer.eps)
    assert_close(out, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("shape", [(1, 12, 5, 7), (2, 12, 1, 7), (2, 12, 1, 1), (1, 4, 1, 1), (2, 4, 3, 1)])
def test_dimensions_of_length_one_may_have_any_stride(shape, silu):
    image, weight, bias = example(torch.float32, shape)
    odd = [length * 1000 if size == 1 else length for length, size in zip(image.stride(), shape, strict=True)]
    strange = torch.empty_strided(shape, odd).copy_(image.detach()).requires_grad_()
    found, expected = norm(strange, weight, bias, silu=silu), norm(image, weight, bias, silu=silu)
    assert torch.equal(found, expected)
    for out, given in ((found, strange), (expected, image)):
        out.square().sum().backward(inputs=[given])
    assert torch.equal(strange.grad, image.grad)
