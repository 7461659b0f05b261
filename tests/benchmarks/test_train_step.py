from dataclasses import replace

import pytest
import torch

from diff_dalle.benchmarks import train_step
from diff_dalle.models.unet import UNetConfig

# 64 channels: with one channel per group, biases before a norm would have no gradient to compare.
TINY = UNetConfig(
    image_size=16, num_channels=64, num_res_blocks=1, channel_mult=(1, 2), attention_resolutions=(8,), num_heads=4
)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"num_head_channels": 16, "resblock_updown": True},
        {"use_scale_shift_norm": False, "conv_resample": False, "num_heads_upsample": 2},
    ],
)
def test_baseline_and_our_network_are_the_same_function(change, monkeypatch):
    """With equal weights: outputs to 1e-5 and every parameter's gradient to 1e-4."""
    monkeypatch.setattr(train_step, "NETWORK", replace(TINY, **change))
    for found, most in train_step.gate().values():
        assert 0 < found <= most


def test_both_sides_train(monkeypatch):
    """The timed steps lower the loss on both sides, so neither skips the work."""
    monkeypatch.setattr(train_step, "NETWORK", TINY)
    losses = []
    loss_of = train_step.loss_of

    def watched(*args):
        loss, output = loss_of(*args)
        losses.append(loss.item())
        return loss, output

    monkeypatch.setattr(train_step, "loss_of", watched)
    for side in (train_step.ours, train_step.baseline):
        torch.manual_seed(0)
        losses.clear()
        step = side()
        for _ in range(4):
            step()
        assert losses[3] < losses[0]
