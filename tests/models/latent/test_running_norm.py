import torch
from network_making import seeded
from torch import nn
from torch.testing import assert_close

from diff_dalle.models.norms import MOMENTUM, RunningNorm


def batch(n=6, seed=0, channels=4):
    return 3 * seeded(n, channels, 5, 3, seed=seed) + 2


def moments_of(norm, x):
    found = []
    norm(x, found)
    (moments,) = found
    return moments


def test_it_normalizes_by_the_running_statistics_in_training_too():
    norm = RunningNorm(4)
    reference = nn.BatchNorm2d(4).eval()
    reference.load_state_dict(norm.state_dict())
    x = batch().requires_grad_()
    out = norm(x)
    assert norm.training and torch.equal(out, reference(x))
    assert_close(norm(x[:1]), out[:1])
    out.sum().backward()
    assert all(p.grad is not None for p in norm.parameters())


def test_the_statistics_are_those_of_the_whole_batch():
    """Of all samples together, in any cut; the first batches count alike, later ones with the momentum."""
    one, cut, batches = RunningNorm(4), RunningNorm(4), [batch(seed=i) + i for i in range(14)]
    for i, x in enumerate(batches):
        before = one.running_var.clone()
        one.update(moments_of(one, x))
        cut.update(torch.cat([moments_of(cut, part) for part in x.split(4)]))
        assert_close(cut.state_dict(), one.state_dict())
        if i == 9:
            first = torch.stack(batches[:10])
            assert_close(one.running_mean, first.mean((0, 1, 3, 4)))
            variances = first.var((1, 3, 4), correction=0)
            assert_close(one.running_var, variances.mean(0))
        if i > 9:
            moved = torch.lerp(before, x.var((0, 2, 3), correction=0), MOMENTUM)
            assert_close(one.running_var, moved)
    assert one.num_batches_tracked == 14


def test_the_moments_of_outputs_follow_from_those_of_inputs():
    for affine in (True, False):
        norm, x = RunningNorm(4, affine=affine), batch(seed=3)
        norm.update(moments_of(norm, batch(seed=1) * 2 - 1))
        if affine:
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)
        mean, variance = norm.of_outputs(moments_of(norm, x))
        out = norm(x)
        assert_close(mean, out.mean((0, 2, 3)), rtol=1e-5, atol=1e-5)
        assert_close(variance, out.var((0, 2, 3), correction=0))


def test_moments_have_no_gradient_and_are_fp32():
    x = batch().half().requires_grad_()
    moments = moments_of(RunningNorm(4), x.float())
    assert moments.dtype == torch.float32 and not moments.requires_grad and moments.shape == (6, 8)
