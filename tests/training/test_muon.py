"""Muon against its definition by singular values, and torch's own."""

import pytest
import torch
from torch import nn

from diff_dalle.distributed.world import ALONE, SINGLE, World
from diff_dalle.training import muon
from diff_dalle.training.muon import orthogonalized
from diff_dalle.training.optim import OptimConfig, Optimization, build_optimizer


def with_singular_values(values, columns=96):
    torch.manual_seed(0)
    u, _, v = torch.linalg.svd(torch.randn(len(values), columns, dtype=torch.float64), full_matrices=False)
    return u, torch.tensor(values, dtype=torch.float64), v


def reference(matrix):
    """The quintic on the singular values themselves, in float64."""
    u, values, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    a, b, c = muon.QUINTIC
    values = values / values.pow(4).sum().pow(0.25)
    for _ in range(muon.ITERATIONS):
        values = a * values + b * values**3 + c * values**5
    return u @ values.diag() @ v


@pytest.mark.parametrize("size", [1e-16, 1e-11, 1.0, 1e10])
def test_the_iteration_on_grams_is_that_on_singular_values(size):
    u, values, v = with_singular_values([1.0, 0.9, 0.5, 0.1, 0.03, 0.01, 0.001, 0.0])
    matrix = u @ values.diag() @ v
    found = orthogonalized((size * matrix)[None].float())[0]
    torch.testing.assert_close(found.double(), reference(matrix), atol=1e-4, rtol=1e-3)
    spread = torch.linalg.svdvals(found)[:6]
    assert spread.min() > 0.65 and spread.max() < 1.25


def test_matrices_of_a_batch_do_not_mix_and_zeros_stay():
    torch.manual_seed(1)
    matrices = torch.randn(3, 8, 20) * torch.tensor([1.0, 1e-6, 0.0])[:, None, None]
    together = orthogonalized(matrices)
    for matrix, update in zip(matrices, together, strict=True):
        torch.testing.assert_close(orthogonalized(matrix[None])[0], update, atol=1e-5, rtol=1e-4)
    assert not together[2].any()


@pytest.mark.parametrize("columns", [64, 256])
@pytest.mark.parametrize("values", ["even", "one", "falling", "lost"])
def test_in_half_precision_it_stays_close_whatever_the_singular_values(values, columns):
    """Gram matrices in bf16 have negative eigenvalues of the size of their rounding, which must not grow."""
    spectra = {
        "even": torch.linspace(1, 0.05, 64),
        "one": torch.tensor([1.0] + [0.02] * 63),
        "falling": 1 / torch.arange(1.0, 65),
        "lost": torch.logspace(0, -6, 64),
    }
    u, spectrum, v = with_singular_values(spectra[values].tolist(), columns)
    matrix = 1e-8 * u @ spectrum.diag() @ v
    found = orthogonalized(matrix[None].bfloat16())[0]
    assert found.dtype == torch.bfloat16
    expected = reference(matrix)
    assert (found.double() - expected).norm() <= 0.07 * expected.norm()
    assert torch.linalg.svdvals(found.float())[0] < 1.25
    assert not orthogonalized(torch.zeros(1, 4, 6, dtype=torch.bfloat16)).any()


def test_half_precision_is_for_gpus_that_have_it(monkeypatch):
    def dtype(device):
        world = World(SINGLE, torch.device(device))
        return build_optimizer(OptimConfig(optimizer="muon"), network(), world=world).dtype

    for supported, expected in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda supported=supported, **_: supported)
        assert (dtype("cuda"), dtype("cpu")) == (expected, torch.float32)


def test_half_precision_learns_as_much():
    """A network of two layers that fits a random one."""
    torch.manual_seed(3)
    teacher = nn.Sequential(nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 24)).requires_grad_(False)
    losses = {}
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(4)
        model = nn.Sequential(nn.Linear(24, 64), nn.Tanh(), nn.Linear(64, 24))
        optimizer = build_optimizer(OptimConfig(optimizer="muon", lr=2e-2), model)
        optimizer.dtype = dtype
        kept = []
        for _ in range(60):
            x = torch.randn(32, 24)
            loss = (model(x) - 3 * teacher(x)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            kept.append(loss.detach())
        losses[dtype] = torch.stack(kept)
    exact, half = losses.values()
    assert exact[-10:].mean() < 0.3 * exact[0] and not torch.equal(exact, half)
    assert (half[-10:].mean() / exact[-10:].mean() - 1).abs() <= 0.02


def network():
    torch.manual_seed(2)
    layers = [nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.Flatten(), nn.Linear(8 * 4, 5), nn.Embedding(3, 4)]
    return nn.Sequential(*layers)


def with_gradients(model, seed, factor=1.0):
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = factor * torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_updates_follow_the_definition(layout):
    """Nesterov momentum, orthogonal update, its root mean square, decay; also of tall matrices and any layout."""
    model, plain = network().to(memory_format=layout), network()
    config = OptimConfig(optimizer="muon", lr=0.1, weight_decay=0.2, muon_momentum=0.9)
    optimizer = build_optimizer(config, model)
    others = [plain[1].weight, plain[1].bias, plain[0].bias, plain[3].bias, plain[4].weight]
    adam = torch.optim.AdamW(others, lr=0.1, weight_decay=0.0)
    matrices, momenta = [plain[0].weight, plain[3].weight], {}
    for step in range(3):
        for each in (model, plain):
            with_gradients(each, step)
        optimizer.step()
        adam.step()
        for number, weight in enumerate(matrices):
            old = momenta.get(number, torch.zeros_like(weight))
            momenta[number] = 0.9 * old + 0.1 * weight.grad
            direction = (0.1 * weight.grad + 0.9 * momenta[number]).flatten(1)
            update = reference(direction).float() * 0.2 * max(direction.shape) ** 0.5
            weight.data = weight.data * (1 - 0.1 * 0.2) - 0.1 * update.view(weight.shape)
        for own, expected in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(own, expected, atol=2e-4, rtol=1e-3)


def test_a_step_that_is_not_finite_leaves_no_trace():
    model = network()
    optimizer = build_optimizer(OptimConfig(optimizer="muon", lr=0.1, weight_decay=0.2), model)
    for step, found in enumerate((1.0, 0.0, 1.0)):
        before = [p.detach().clone() for p in model.parameters()]
        kept = [state["momentum"].clone() for state in optimizer.state.values() if "momentum" in state]
        with_gradients(model, step, torch.nan if found else 1.0)
        optimizer.grad_scale, optimizer.found_inf = None, torch.tensor(found)
        optimizer.step()
        same = [torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
        assert all(same) if found else not any(same)
        if found and kept:
            now = [state["momentum"] for state in optimizer.state.values() if "momentum" in state]
            assert all(map(torch.equal, kept, now))
    assert all(p.isfinite().all() for p in model.parameters())


def test_both_parts_have_their_own_peak_and_one_schedule():
    model = network()
    config = OptimConfig(optimizer="muon", lr=0.1, muon_lr=0.4, warmup_steps=2)
    optimization = Optimization(config, {"model": model}, "fp32", ALONE)
    for step, share in ((0, 0.5), (5, 1.0)):
        optimization.begin(step)
        rates = [group["lr"] for group in optimization.optimizer.param_groups]
        assert rates == pytest.approx([0.4 * share, 0.1 * share])
