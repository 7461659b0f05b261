"""The loss scale of a session that continues another, in the same precision or not."""

import pytest
import torch

from diff_dalle.training.optim import LossScale

CPU = torch.device("cpu")


def scale_after(precision, overflows=()):
    scale = LossScale.create(precision, CPU)
    for overflowed in overflows:
        scale.update(torch.tensor(float(overflowed)))
    return scale


def continued(precision, saved):
    scale = LossScale.create(precision, CPU)
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
