"""The optimizer, averages of the weights, and the loss scale, also of a session that continues another."""

import copy

import pytest
import torch
from torch import nn

from diff_dalle.config import InputError
from diff_dalle.training.ema import Ema
from diff_dalle.training.optim import LossScale, OptimConfig, build_optimizer, decayed, learning_rate
from diff_dalle.training.settings import TrainingConfig


def test_learning_rate_warms_up_and_anneals():
    linear = OptimConfig(lr=1.0, warmup_steps=10, lr_anneal_steps=110)
    assert learning_rate(linear, 0) == pytest.approx(0.1)
    assert learning_rate(linear, 9) == learning_rate(linear, 10) == 1.0
    assert learning_rate(linear, 60) == pytest.approx(0.5)
    assert learning_rate(linear, 110) == learning_rate(linear, 500) == 0.0
    cosine = OptimConfig(lr=1.0, lr_anneal_steps=100, lr_anneal="cosine")
    assert learning_rate(cosine, 50) == pytest.approx(0.5) and learning_rate(cosine, 25) > 0.8
    assert learning_rate(OptimConfig(lr=2.0), 10**6) == 2.0


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"lr": 0.0}, "lr is 0, but must be above 0"),
        ({"ema_rate": (1.0,)}, "ema_rate is 1, but must be at least 0 and below 1"),
        ({"grad_clip": -1.0}, "grad_clip is -1, but must be at least 0"),
        ({"warmup_steps": 5, "lr_anneal_steps": 5}, "warmup_steps is 5, but must be below lr_anneal_steps (5)"),
        ({"ema_start": -1}, "ema_start is -1, but must be at least 0"),
        ({"ema_every": 0}, "ema_every is 0, but must be at least 1"),
        *(
            (
                {"optimizer": "muon", "muon_momentum": value},
                f"muon_momentum is {value:g}, but must be at least 0 and below 1",
            )
            for value in (1.0, -0.1)
        ),
        ({"optimizer": "muon", "muon_lr": 0.0}, "muon_lr is 0, but must be above 0"),
    ],
)
def test_impossible_settings_are_refused(bad, message):
    with pytest.raises(InputError) as error:
        OptimConfig(**bad)
    assert str(error.value) == message


def test_only_weights_of_linear_and_convolution_layers_decay():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.Flatten(), nn.Linear(8, 2), nn.Embedding(3, 4))
    assert decayed(model) == {id(model[0].weight), id(model[3].weight)}
    optimizer = build_optimizer(OptimConfig(weight_decay=0.1), model)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))


def test_skipping_on_the_device_leaves_weights_and_moments():
    """AdamW with found_inf = 1 must be a no-op: a non-finite step is skipped this way without a device sync."""
    model = nn.Linear(3, 3)
    optimizer = build_optimizer(OptimConfig(lr=0.1), model)
    for flag in (0.0, 1.0):
        before = [p.detach().clone() for p in model.parameters()]
        for p in model.parameters():
            p.grad = torch.full_like(p, torch.nan if flag else 1.0)
        optimizer.grad_scale, optimizer.found_inf = None, torch.tensor(flag)
        optimizer.step()
        changed = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
        assert all(changed) if flag == 0 else not any(changed)
    assert {float(state["step"]) for state in optimizer.state.values()} == {1.0}


def test_updates_are_those_of_torch():
    """Also after a load of the state, and without a graph of what was updated."""
    models, optimizers = [], []
    for build in (build_optimizer, lambda config, model: torch.optim.AdamW(decay_groups(model), lr=0.1, fused=True)):
        torch.manual_seed(0)
        models.append(nn.Linear(3, 3))
        optimizers.append(build(OptimConfig(lr=0.1, weight_decay=0.2), models[-1]))
    for step in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            model(torch.ones(2, 3)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert all(p.grad is None and p.is_leaf for p in model.parameters())
        assert torch.equal(models[0].weight, models[1].weight) and torch.equal(models[0].bias, models[1].bias)
        if step == 1:
            optimizers[0].load_state_dict(copy.deepcopy(optimizers[1].state_dict()))
            optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))


def decay_groups(model):
    return [{"params": [model.weight], "weight_decay": 0.2}, {"params": [model.bias], "weight_decay": 0.0}]


def test_ema_follows_its_recurrence_and_swaps_back():
    model = nn.Linear(1, 1, bias=False)
    ema = Ema(0.5, model)
    expected = model.weight.item()
    for step in range(1, 20):
        with torch.no_grad():
            model.weight += step
        ema.update(step)
        rate = min(0.5, (1 + step) / (10 + step))
        expected = rate * expected + (1 - rate) * model.weight.item()
    assert float(ema.averages["weight"]) == pytest.approx(expected, rel=1e-5)
    now = model.weight.item()
    with ema.in_place():
        assert model.weight.item() == pytest.approx(expected, rel=1e-5)
    assert model.weight.item() == now and float(ema.averages["weight"]) == pytest.approx(expected, rel=1e-5)


def test_loss_scale_halves_and_grows():
    scale = LossScale.create("fp16", torch.device("cpu"))
    scale.growth_interval = 3
    history = []
    for overflowed in (1, 1, 0, 0, 0, 0, 1, 0):
        scale.update(torch.tensor(float(overflowed)))
        history.append(float(scale.scale))
    start = 2.0**16
    assert history == [start / 2, start / 4, start / 4, start / 4, start / 2, start / 2, start / 4, start / 4]
    fixed = LossScale.create("bf16", torch.device("cpu"))
    fixed.update(torch.tensor(1.0))
    assert float(fixed.scale) == 1.0


def test_an_average_with_a_start_and_an_interval_follows_the_hand_formula():
    """Updates 3, 6, 9, …: a copy up to update 6, then decay 0.8."""
    model = nn.Linear(2, 2)
    ema, expected = Ema(0.8, model, start=6, every=3), model.weight.detach().clone()
    for step in range(1, 25):
        with torch.no_grad():
            model.weight += torch.randn(2, 2)
        ema.update(step)
        if step % 3 == 0:
            expected = model.weight.detach().clone() if step <= 6 else 0.8 * expected + 0.2 * model.weight.detach()
        if step == 6:
            assert torch.equal(ema.averages["weight"], model.weight)
        torch.testing.assert_close(ema.averages["weight"], expected)


def test_the_warm_up_of_an_average_counts_its_own_updates():
    ema = Ema(0.999, nn.Linear(1, 1, bias=False), every=10)
    with torch.no_grad():
        ema.averages["weight"].fill_(1.0)
        ema.model.weight.fill_(0.0)
    ema.update(5)
    assert ema.averages["weight"] == 1
    ema.update(20)
    assert ema.averages["weight"].item() == pytest.approx((1 + 2) / (10 + 2))


def test_checkpoints_are_written_at_both_intervals():
    config = TrainingConfig(save_interval=4, backup_interval=6)
    assert [step for step in range(1, 13) if config.saves_at(step)] == [4, 6, 8, 12]
    assert [step for step in range(1, 13) if config.backs_up_at(step)] == [6, 12]
    assert not any(TrainingConfig(save_interval=4).backs_up_at(step) for step in range(1, 13))


def scale_after(precision, overflows=()):
    scale = LossScale.create(precision, torch.device("cpu"))
    for overflowed in overflows:
        scale.update(torch.tensor(float(overflowed)))
    return scale


def continued(precision, saved):
    scale = LossScale.create(precision, torch.device("cpu"))
    scale.load_state(saved.state())
    return float(scale.scale), float(scale.good_steps)


@pytest.mark.parametrize("overflows", [(), (1,), (0, 0, 1, 0), (1,) * 20, (1,) * 20 + (0,)])
def test_the_scale_continues_in_fp16(overflows):
    saved = scale_after("fp16", overflows)
    expected = (2.0**16, 0.0) if len(overflows) == 20 else (float(saved.scale), float(saved.good_steps))
    assert continued("fp16", saved) == expected


@pytest.mark.parametrize("other", ["fp32", "bf16"])
def test_the_scale_begins_anew_where_the_precision_changes(other):
    assert continued("fp16", scale_after(other, (0, 0))) == (2.0**16, 0.0)
    assert continued(other, scale_after("fp16", (0, 0))) == (1.0, 0.0)
