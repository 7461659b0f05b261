"""Averages that begin late, are updated seldom, and checkpoints that are kept."""

import pytest
import torch
from torch import nn

from diff_dalle.config import InputError
from diff_dalle.training.ema import Ema
from diff_dalle.training.optim import OptimConfig
from diff_dalle.training.settings import TrainingConfig


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


@pytest.mark.parametrize(("name", "value"), [("ema_start", -1), ("ema_every", 0)])
def test_impossible_averages_are_refused(name, value):
    with pytest.raises(InputError, match=f"{name} is {value}, but must"):
        OptimConfig(**{name: value})


def test_checkpoints_are_written_at_both_intervals():
    config = TrainingConfig(save_interval=4, backup_interval=6)
    assert [step for step in range(1, 13) if config.saves_at(step)] == [4, 6, 8, 12]
    assert [step for step in range(1, 13) if config.backs_up_at(step)] == [6, 12]
    assert not any(TrainingConfig(save_interval=4).backs_up_at(step) for step in range(1, 13))
