"""The contrastive task: loss by hand, exact gradients with gradient caching, held-out retrieval."""

import contextlib
import itertools
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from clip_making import make_batch, make_task, with_draws
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from diff_dalle.batch import Batch, Conditioning
from diff_dalle.diffusion import GaussianDiffusion, LossType, ModelMeanType, ModelVarType
from diff_dalle.randomness import Draw

BATCH, DRAW = make_batch(range(8)), Draw(0, torch.arange(8))
LOSS_AWARE = {"schedule_sampler": "loss-second-moment"}
# Nearly without noise, so that a model can be right at every step.
CLEAR = GaussianDiffusion(
    betas=np.full(20, 1e-9),
    model_mean_type=ModelMeanType.EPSILON,
    model_var_type=ModelVarType.FIXED_SMALL,
    loss_type=LossType.MSE,
)


def make_loss_aware(task):
    """Fill the history, so that steps have different probabilities and weights."""
    steps = torch.arange(8).repeat(10)
    task.observe({"t": steps, "unweighted_loss": 1.0 + steps})
    return task


def backward(task, pieces, autocast=contextlib.nullcontext):
    """Reported values, gradients by name, and the calls of the network as (samples, sync, with gradient)."""
    calls = []

    def forward(batch, draw, sync):
        calls.append((len(batch), sync, torch.is_grad_enabled()))
        with autocast():
            return task(batch, draw)

    task.zero_grad()
    (values,) = task.backward(with_draws(pieces), forward, 3.0)
    return values, {name: p.grad.clone() for name, p in task.model.named_parameters()}, calls


def flat(gradients):
    return torch.cat([gradient.flatten() for gradient in gradients.values()])


def relative(a, b):
    return ((a - b).norm() / b.norm()).item()


def test_the_loss_is_the_cross_entropy_of_the_whole_matrix():
    task = make_loss_aware(make_task(**LOSS_AWARE))
    found, features = task.losses(BATCH, DRAW), task(BATCH, DRAW)
    logits, own = task.model.scale * features["image"] @ features["text"].T, torch.arange(8)
    both = (F.cross_entropy(logits, own, reduction="none") + F.cross_entropy(logits.T, own, reduction="none")) / 2
    assert_close(found["unweighted_loss"], both)
    weight = task.schedule_sampler.sample_at(DRAW.uniform("timestep"))[1]
    assert weight.min() < 0.9 and weight.max() > 1.1
    assert_close(found["loss"], both * weight)
    assert_close(found["logit_scale"], task.model.scale.detach().expand(8))


def test_the_images_are_noised_at_the_steps_drawn():
    task = make_task()
    t = (DRAW.uniform("timestep") * 8).long()
    assert len(t.unique()) > 3
    noisy = task.process.q_sample(BATCH.images, t, DRAW.normal("noise", (3, 8, 8)))
    assert_close(task(BATCH, DRAW)["image"], task.model.encode_image(noisy, t, DRAW.keys("dropout")))


@pytest.fixture
def in_double(monkeypatch):
    """Lets networks compute in float64 where they disable autocast, so that differences are not rounding."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


@pytest.mark.parametrize(("size", "config"), [(2, {}), (3, LOSS_AWARE), (1, LOSS_AWARE), (3, {"noised": False})])
def test_pieces_give_the_value_and_every_gradient_of_the_whole(in_double, size, config):
    """With dropout in both towers. 3 leaves an uneven last piece."""
    task, batch = make_task(**config).double(), replace(BATCH, images=BATCH.images.double())
    if task.observed:
        make_loss_aware(task)
    whole, expected, calls = backward(task, [batch])
    assert calls == [(8, True, True)] and whole["loss"].dtype == torch.float64
    values, gradients, calls = backward(task, batch.split(size))
    sizes = [len(piece) for piece in batch.split(size)]
    assert calls[: len(sizes)] == [(n, False, False) for n in sizes]
    assert calls[len(sizes) :] == [(n, i == len(sizes) - 1, True) for i, n in enumerate(sizes)]
    assert values.keys() == whole.keys()
    assert all(torch.allclose(values[name], whole[name], rtol=1e-13) for name in whole)
    assert len(expected) == len(list(task.model.parameters()))
    for name, gradient in expected.items():
        assert gradient.norm() > 0 and relative(gradients[name], gradient) < 1e-13, name


def test_the_gradient_is_that_of_the_mean_loss_times_the_scale():
    task = make_task()
    task.losses(BATCH, DRAW)["loss"].mean().mul(3.0).backward()
    plain = flat({name: p.grad.clone() for name, p in task.model.named_parameters()})
    for pieces in ([BATCH], BATCH.split(4)):
        assert relative(flat(backward(task, pieces)[1]), plain) <= 1e-6


def test_pieces_under_autocast_are_close():
    """bf16 has 8 bits: features of a smaller batch may round to a neighboring value, 0.4 % away."""
    task = make_task()

    def half():
        return torch.autocast("cpu", torch.bfloat16)

    whole, expected, _ = backward(task, [BATCH], half)
    values, gradients, _ = backward(task, BATCH.split(2), half)
    assert relative(values["loss"], whole["loss"]) < 1e-2
    assert relative(flat(gradients), flat(expected)) < 3e-2


def test_a_samples_features_depend_on_its_position_only():
    task = make_task()
    whole = task(BATCH, DRAW)
    order = [5, 2, 7, 0, 1, 3, 6, 4]
    for pieces in (BATCH.split(1), BATCH.split(3)):
        parts = [task(*pair) for pair in with_draws(pieces)]
        for name in ("image", "text", "t", "weight"):
            assert_close(torch.cat([part[name] for part in parts]), whole[name])
    shuffled = BATCH.select(torch.tensor(order))
    assert_close(task(shuffled, Draw(0, shuffled.index))["image"], whole["image"][order])
    other = Draw(1, BATCH.index)
    assert (task(BATCH, other)["text"] - whole["text"]).norm(dim=1).min() > 1e-3  # dropout is keyed by the seed too


class Pixels(nn.Module):
    """A model whose image features are the pixels, and whose text features are the caption's second token, one-hot."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(20.0))
        self.seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def encode_image(self, x, t, keys=None):
        self.seen.append((x, t))
        return F.normalize(x.flatten(1), dim=1)

    def encode_text(self, tokens, mask, keys=None):
        return F.one_hot(tokens[:, 1], 64).float()


def numbered(numbers, captions=None):
    """Images with one bright pixel each, and captions that name it."""
    numbers = torch.tensor(numbers)
    tokens = torch.stack([torch.zeros_like(numbers), numbers if captions is None else torch.tensor(captions)], 1)
    images = F.one_hot(numbers, 64).float().view(-1, 1, 8, 8)
    return Batch(images, Conditioning(tokens=tokens, mask=torch.ones_like(tokens).bool()), torch.arange(len(numbers)))


def held_out(task, batch):
    with torch.no_grad():
        return {name: value.mean().item() for name, value in task.held_out(batch, Draw(7, batch.index)).items()}


def retrieved(values, depth):
    return [value for name, value in values.items() if f"_at_{depth}_t" in name]


def test_an_ordinary_clip_sees_clean_images_at_step_0():
    task, batch = make_task(Pixels(), noised=False), numbered([3, 1, 2])
    task.losses(batch, Draw(0, batch.index))
    held_out(task, batch)
    assert len(task.model.seen) == 3
    assert all(torch.equal(x, batch.images) and t.eq(0).all() for x, t in task.model.seen)


def test_perfect_features_find_everything_and_wrong_captions_nothing():
    task, order = make_task(Pixels(), process=CLEAR), list(range(64))
    right = held_out(task, numbered(order))
    assert len(retrieved(right, 1)) == len(retrieved(right, 5)) == 22
    assert set(retrieved(right, 1) + retrieved(right, 5)) == {1.0} and right["loss"] < 1e-5
    wrong = held_out(task, numbered(order, [*order[9:], *order[:9]]))
    assert set(retrieved(wrong, 1)) == {0.0} and wrong["loss"] > 10


def test_features_that_say_nothing_are_at_chance():
    class Same(Pixels):
        def encode_text(self, tokens, mask, keys=None):
            return torch.ones(len(tokens), 64) / 8

        def encode_image(self, x, t, keys=None):
            return torch.ones(len(x), 64) / 8

    values = held_out(make_task(Same(), process=CLEAR), numbered(list(range(64))))
    assert set(retrieved(values, 1)) == {1 / 64} and set(retrieved(values, 5)) == {5 / 64}


def test_equal_captions_are_both_right():
    """Pairs of equal images with equal captions: either of the two is correct."""
    pairs = [i // 2 for i in range(32)]
    assert set(retrieved(held_out(make_task(Pixels(), process=CLEAR), numbered(pairs)), 1)) == {1.0}


def test_retrieval_is_measured_at_its_level_of_noise():
    task = make_task(Pixels())  # of 8 steps
    held_out(task, numbered([1, 2, 3]))
    assert task.levels == [0, 1, 2, 3, 4, 5, 6, 7]
    assert [t.unique().tolist() for _, t in task.model.seen[1:]] == [[t] for t in task.levels]
    noise = [(x - F.one_hot(torch.tensor([1, 2, 3]), 64).view(-1, 1, 8, 8)).std() for x, _ in task.model.seen[1:]]
    assert all(less < more for less, more in itertools.pairwise(noise))


def test_held_out_values_are_those_of_fixed_draws_whatever_was_observed():
    task = make_task(**LOSS_AWARE).eval()
    before = held_out(task, BATCH)
    assert before == held_out(task, BATCH)
    make_loss_aware(task)
    assert before == held_out(task, BATCH)
    assert before.keys() == held_out(task, make_batch(range(3))).keys()


def test_findings_are_a_table_and_a_plot():
    task = make_task(Pixels(), process=CLEAR)
    text, figures = task.findings(held_out(task, numbered(list(range(16)))))
    lines = text.splitlines()
    assert "among 16" in lines[0] and len(lines) == 1 + 2 + 11 + 1
    assert [cell.strip() for cell in lines[-2].split("|")[1:-1]] == ["19", "1.000", "1.000", "1.000", "1.000"]
    assert [cell.strip() for cell in lines[-1].split("|")[1:-1]] == ["chance", "0.062", "0.312", "0.062", "0.312"]
    assert figures.keys() == {"retrieval"}
    assert figures["retrieval"].dtype == np.uint8 and figures["retrieval"].shape[2] == 3


def test_without_matplotlib_the_table_remains_and_the_missing_plot_is_named_once(monkeypatch):
    task = make_task(Pixels(), process=CLEAR)
    values = held_out(task, numbered(list(range(16))))
    table, _ = task.findings(values)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    text, images = task.findings(values)
    assert text.startswith(table) and "retrieval.png is omitted" in text and "diff_dalle[plot]" in text
    assert images == {} and task.findings(values) == (table, {})


def test_loss_aware_timesteps_observe_and_survive_a_checkpoint():
    assert make_task().observed == ()
    task = make_task(**LOSS_AWARE)
    values, _, _ = backward(task, BATCH.split(4))
    assert task.observed == ("t", "unweighted_loss")
    assert torch.equal(values["t"], (DRAW.uniform("timestep") * 8).long())
    make_loss_aware(task)
    again, u = make_task(**LOSS_AWARE), DRAW.uniform("timestep")
    again.load_extra_state(task.extra_state())
    for mine, other in zip(task.schedule_sampler.sample_at(u), again.schedule_sampler.sample_at(u), strict=True):
        assert torch.equal(mine, other)
    assert not torch.equal(again.schedule_sampler.sample_at(u)[1], torch.ones(8))
