from dataclasses import replace

import pytest
import torch

from benchmarks import train_step
from diff_dalle.checkpoints.run_folder import RunFolder
from diff_dalle.models import precision
from diff_dalle.models.cost import count_flops
from diff_dalle.models.unet import UNet, UNetConfig
from diff_dalle.training.flight import FlightRecorder
from diff_dalle.training.loop import TrainLoop

# 64 channels: with one channel per group, biases before a norm would have no gradient to compare.
TINY = UNetConfig(
    image_size=8, num_channels=64, num_res_blocks=1, channel_mult=(1, 2), attention_resolutions=(4,), num_heads=4
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
    for use_checkpoint in (False, True) if change else (False,):
        for found, most in train_step.gate(use_checkpoint=use_checkpoint).values():
            assert 0 < found <= most


@pytest.mark.parametrize(("fast_bf16", "least", "most"), [(True, 1e-3, 0.02), (False, 0, 1e-5)])
def test_the_automatic_precision_is_that_of_the_cpu(fast_bf16, least, most, monkeypatch):
    """In the gate, whose errors are those of bf16, and in the timed loop."""
    monkeypatch.setattr(train_step, "NETWORK", TINY)
    monkeypatch.setattr(precision, "has_fast_bf16", lambda: fast_bf16)
    found = train_step.auto_gate()
    assert least < found["outputs"][0] < most and least < found["gradients"][0] < 2.5 * most
    loop, _ = train_step.training_loop(precision="auto")
    assert loop.trainees[0].precision == ("bf16" if fast_bf16 else "fp32")


def test_flops_count_each_product_of_the_model_once(monkeypatch):
    """A forward pass, and twice as much backward except at the inputs, which need no gradients. Both grow with width
    and batch size as convolutions do."""
    monkeypatch.setattr(train_step, "NETWORK", TINY)
    with torch.device("meta"):
        network = UNet(TINY)
    once = count_flops(
        network, lambda network: network(torch.empty(4, 3, 8, 8, device="meta"), torch.empty(4, device="meta"))
    )
    first = 2 * 4 * (8**2 * 9 * 3 * 64 + 64 * 256)  # of the input convolution and the timestep's first layer
    assert train_step.flops() == 3 * once - first
    assert train_step.flops(batch_size=8) == 2 * train_step.flops()
    assert 3.5 < train_step.flops(128) / train_step.flops() < 4


def test_both_sides_train(monkeypatch):
    """The timed steps lower the loss on both sides, so neither skips the work."""
    monkeypatch.setattr(train_step, "NETWORK", TINY)
    losses, updates = [], []
    losses_of, update = train_step.losses_of, TrainLoop.update

    def watched(*args):
        found, output = losses_of(*args)
        losses.append(found.mean().item())
        return found, output

    monkeypatch.setattr(train_step, "losses_of", watched)
    monkeypatch.setattr(TrainLoop, "update", lambda loop, batch: (updates.append(loop.step), update(loop, batch)))
    for side in (train_step.ours, train_step.baseline):
        torch.manual_seed(0)
        losses.clear()
        step = side()
        for _ in range(4):
            step()
        assert losses[3] < losses[0]
    assert updates == [0, 1, 2, 3]  # ours is the update of the training commands


def test_watching_a_step_does_not_change_it(monkeypatch):
    monkeypatch.setattr(train_step, "NETWORK", TINY)
    assert train_step.watching_gate() == {"weights": (0.0, 0.0)}
    records = []
    monkeypatch.setattr(FlightRecorder, "record", lambda *_: records.append(1))
    train_step.unwatched()()
    assert not records
    ends = train_step.watched()()
    assert records and not any(end.news for end in ends)
    for end in ends:
        end.close()


def test_saving_in_the_background_writes_the_same_and_leaves_the_writing_for_later(monkeypatch):
    monkeypatch.setattr(train_step, "NETWORK", TINY)
    assert train_step.saving_gate() == {"saved values": (0.0, 0.0)}
    save, done = RunFolder.save, []
    monkeypatch.setattr(RunFolder, "save", lambda *args: (done.append(args[1]), save(*args)))
    loop = train_step.waiting()()
    assert done == [2] and loop.saving.run.checkpoints[-1].step == 2
    result = train_step.in_background()()
    result.finish()
    assert done == [2, 2]
