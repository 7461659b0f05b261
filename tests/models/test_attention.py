"""Attention in bfloat16 on a CPU: its dtype, values and gradients."""

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from diff_dalle.models.attention import FEW_KEYS, attend


def operands(keys, width=16, dtype=torch.bfloat16, gradients=True):
    torch.manual_seed(0)
    shapes = (2, 6, width), (2, keys, width), (2, keys, width)
    return [torch.randn(shape).to(dtype).requires_grad_(gradients) for shape in shapes]


def plain(q, k, v, heads, mask=None):
    """Softmax attention written out, in the operands' dtype."""
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, None], -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


@pytest.fixture
def dtypes(monkeypatch):
    """The dtypes in which torch's kernel is called, and whether autocast would convert its operands."""
    kernel, seen = F.scaled_dot_product_attention, []

    def watch(q, k, v, **options):
        seen.append((q.dtype, k.dtype, v.dtype, torch.is_autocast_enabled("cpu")))
        return kernel(q, k, v, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watch)
    return seen


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_few_keys_are_attended_to_in_fp32_and_rounded_once(dtypes, autocast, masked):
    inputs = operands(5)
    mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2]) if masked else None
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = attend(*inputs, heads=2, mask=mask)
    assert dtypes == [(torch.float32,) * 3 + (False,)] and out.dtype == torch.bfloat16
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = plain(*exact, 2, mask)
    upstream = torch.randn(out.shape).bfloat16()
    found = torch.autograd.grad(out, inputs, upstream)
    wanted = torch.autograd.grad(expected, exact, upstream.double())
    for own, other in zip((out, *found), (expected, *wanted), strict=True):
        assert_close(own.double(), other, rtol=2**-8, atol=1e-5)


def test_what_needs_no_gradient_or_has_many_keys_stays_in_bfloat16(dtypes):
    most = FEW_KEYS // 8
    attend(*operands(most), heads=2, mask=None)
    attend(*operands(most + 1), heads=2, mask=None)
    attend(*operands(5, gradients=False), heads=2, mask=None)
    with torch.no_grad():
        attend(*operands(5), heads=2, mask=None)
    attend(*operands(5, dtype=torch.float64), heads=2, mask=None)
    assert [seen[0] for seen in dtypes] == [torch.float32, *[torch.bfloat16] * 3, torch.float64]


@pytest.mark.parametrize("how", ["compiled", "checkpointed"])
def test_compiled_and_checkpointed_attention_equals_eager_attention(how):
    def run(q, k, v):
        return attend(q, k, v, 2, None)

    def checkpointed(q, k, v):
        return checkpoint(run, q, k, v, use_reentrant=False)

    other = checkpointed if how == "checkpointed" else torch.compile(run, backend="aot_eager", fullgraph=True)
    results = []
    for each in (run, other):
        inputs = operands(5)
        with torch.autocast("cpu", torch.bfloat16):
            out = each(*inputs)
        results.append([out, *torch.autograd.grad(out.float().square().sum(), inputs)])
    for own, expected in zip(*results, strict=True):
        assert_close(own, expected, rtol=2**-7, atol=1e-3)
