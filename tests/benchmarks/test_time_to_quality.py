"""The comparison of training times: its bookkeeping on made-up scores, and its sides in miniature."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from script_running import run as run_script
from yaml import safe_load as load_yaml

from benchmarks import time_to_quality
from benchmarks.peer_diffusers import Peer, faster_precision
from benchmarks.registry import BENCHMARKS, LONG
from benchmarks.time_to_quality import (
    FLAGS,
    LEVELS,
    RECIPES,
    Course,
    Ours,
    Point,
    Recipe,
    Rules,
    comparison,
    plot,
    race,
    train_all,
)
from diff_dalle.commands.command_line import parse
from diff_dalle.distributed.world import ALONE
from diff_dalle.recipes.generator import GeneratorRun
from diff_dalle.worlds.shapes.prompts import shape_prompts
from diff_dalle.worlds.shapes.scenes import ShapesConfig
from diff_dalle.worlds.shapes.shape_eval import Row
from diff_dalle.worlds.shapes.shards import write_shapes

ALL, PAIRS = "all attributes", "held-out pairs"


def rows(score, pairs=None):
    """pairs: the score of held-out pairs, None = the same."""
    values = {ALL: score, PAIRS: score if pairs is None else pairs}
    return {
        name: Row(name, 1, value, max(0.0, value - 0.05), min(1.0, value + 0.05), 0.0, 1.0, 1.0)
        for name, value in values.items()
    }


def course(name, *scores, batch_size=10, seconds=10.0):
    """A point every ``seconds`` and 5 steps."""
    points = [Point(seconds * i, 5 * i, rows(score)) for i, score in enumerate(scores, 1)]
    return Course(name, batch_size, "fp32", 5_900_000, points)


def test_crossings_are_interpolated_from_the_point_before():
    found = course("a", 0.25, 0.75, 0.4, 0.9)
    assert found.crossing((ALL, 0.5)) == pytest.approx((15.0, 7.5))  # the first one, although the score falls again
    assert found.crossing((ALL, 0.1)) == pytest.approx((4.0, 2.0))  # from 0 before training
    assert found.crossing((ALL, 0.75)) == pytest.approx((20.0, 10.0))
    assert found.crossing((ALL, 0.95)) is None and Course("b", 1, "fp32", 1).crossing((ALL, 0.5)) is None


def test_levels_are_of_the_score_that_they_name():
    found = Course("a", 1, "fp32", 1, [Point(10.0, 5, rows(1.0, pairs=0.5))])
    assert found.crossing((ALL, 0.5)) == (5.0, 2.5) and found.crossing((PAIRS, 0.5)) == (10.0, 5.0)
    assert not found.has_all and {name for name, _ in LEVELS} == {ALL, PAIRS}
    found.points.append(Point(20.0, 10, rows(0.0, pairs=1.0)))
    assert found.has_all


def test_the_ratio_is_bounded_where_a_level_is_not_reached():
    courses = course("a", 0.0, 1.0), course("b", 0.0, 0.0, 0.0, 1.0), course("c", 0.0, 0.1, 0.2, 0.2)
    (reached, slow, never), level = Recipe.of(courses), (ALL, 0.5)
    assert reached.ratio(slow, level) == "0.43"  # 15 / 35
    assert reached.ratio(never, level) == "< 0.38"  # 15 / 40
    assert never.ratio(reached, level) == "> 2.67"  # 40 / 15
    assert never.ratio(never, level) == "not reached"


def test_half_of_the_seeds_have_not_reached_a_level():
    half, other = Recipe([course("a", 0.0, 0.0, 1.0), course("a", 0.1, 0.2, 0.3, 0.4)]), Recipe([course("b", 0.0, 1.0)])
    assert half.ratio(other, (ALL, 0.5)) == "> 2.33" and half.reached((ALL, 0.5))[0] == "> 40 (25 to > 40)"
    assert half.last(ALL) == "0.70 (0.40–1.00)"  # not the better one


TABLE = """
|  | a | b | c |
| --- | --- | --- | --- |
| parameters, M | 5.9 | 5.9 | 5.9 |
| precision | fp32 | fp32 | fp32 |
| images per step | 10 | 4 | 10 |
| images per second | 5 | 2 | 5 |
| seconds to all attributes 0.85 | 28 (8 to > 40) | 19 | > 40 |
| steps to all attributes 0.85 | 14 (4 to > 20) | 10 | > 20 |
| images to all attributes 0.85 | 142 (42 to > 200) | 39 | > 200 |
| seconds / a |  | 0.68 | > 1.40 |
| seconds to all attributes 0.95 | 30 (10 to > 40) | > 20 | > 40 |
| steps to all attributes 0.95 | 15 (5 to > 20) | > 10 | > 20 |
| images to all attributes 0.95 | 148 (48 to > 200) | > 40 | > 200 |
| seconds / a |  | > 0.68 | > 1.36 |
"""


def test_the_table_has_medians_and_ranges_of_seeds_and_what_was_not_reached():
    seeds = course("a", 1.0), course("a", 0.0, 0.0, 1.0), course("a", 0.1, 0.2, 0.3, 0.4)
    table = comparison([*seeds, course("b", 0.0, 0.9, batch_size=4), course("c", 0.0, 0.1, 0.2, 0.2)])
    assert table.startswith(TABLE.strip())
    assert table.endswith("| last held-out pairs | 1.00 (0.40–1.00) | 0.90 (0.85–0.95) | 0.20 (0.15–0.25) |")


def test_plot_shows_a_score_with_intervals_and_its_levels(monkeypatch):
    courses = [course("ours", 0.0, 1.0), course("peer", 0.1)]
    assert plot(courses, ALL).size[0] > 500
    drawn = []
    monkeypatch.setattr(time_to_quality, "line_plot", lambda *given, references: drawn.extend([*given, references]))
    plot(courses, ALL)
    assert drawn[0] == {
        "ours": [(10, 0.0, 0.0, 0.05), (20, 1.0, 0.95, 1.0)],
        "peer": [(10, 0.1, 0.05, pytest.approx(0.15))],
    }
    assert drawn[-1] == {"0.85": 0.85, "0.95": 0.95}
    plot([course("seeds", 0.5, 0.6), course("seeds", 0.1, 0.3, 0.4), course("seeds", 0.9)], ALL)
    assert drawn[4]["seeds"] == [(10, 0.5, 0.1, 0.9), (20, 0.6, 0.3, 0.9), (30, 0.6, 0.4, 0.9)]


class Toy:
    """A side whose score grows with its steps, of a second each."""

    batch_size, precision, parameters = 1, "fp32", 1

    def __init__(self, name, log, now, gain, last=10**9):
        self.name, self.log, self.now, self.gain, self.last, self.steps = name, log, now, gain, last, 0

    @property
    def finished(self):
        return self.steps == self.last

    def step(self):
        self.steps += 1
        self.now[0] += 1
        self.log.append(self.name)


def toy_race(gains, rules, last=10**9):
    """Sides a, b, …, of which the last one is the peer; last: steps of the first."""
    log, now = [], [0.0]
    lasts = [last, *[10**9] * (len(gains) - 1)]
    *ours, peer = (Toy(name, log, now, gain, end) for name, gain, end in zip("abc", gains, lasts, strict=False))

    def score(side):
        now[0] += 1000  # is not counted
        log.append(" ")
        return rows(min(1.0, side.gain * side.steps))

    courses = race(ours, peer, score, rules, lambda: now[0])
    return "".join(log).split(), *courses


@pytest.mark.parametrize(
    ("gains", "limit", "last", "turns", "seconds"),
    [
        ((0.1, 0.05), 4.0, None, "aaaa bbbb aaaa bbbb aaaa bbbb bbbb bbbb", (12, 20)),
        ((0.25, 0.1, 0.25), 4.0, None, "aaaa bbbb cccc bbbb bbbb", (4, 12, 4)),  # each recipe ends at its own time
        ((0.05, 0.5), 4.0, None, "aaaa bbbb aaaa aaaa aaaa aaaa", (20, 4)),  # the peer may be first
        ((0.1, 0.05, 0.0), 1.5, None, "aaaa bbbb cccc aaaa bbbb cccc aaaa bbbb cccc bbbb cccc bbbb cc", (12, 20, 18)),
        ((0.01, 0.0), 2.0, 6, "aaaa bbbb aa bbbb bbbb", (6, 12)),  # our schedule ends
    ],
)
def test_slices_alternate_until_each_has_all_levels_or_its_end(gains, limit, last, turns, seconds):
    """That of the peer is a multiple of the seconds of the first."""
    found, *courses = toy_race(gains, Rules(4, 0.0, limit), last or 10**9)
    assert found == turns.split() and tuple(course.last.seconds for course in courses) == seconds
    assert all([p.seconds for p in course.points] == [p.steps for p in course.points] for course in courses)


def test_slices_grow():
    turns, *_ = toy_race((0.02, 0.02), Rules(4, 0.5, 4.0))
    assert [len(turn) for turn in turns[::2]] == [4, 4, 4, 6, 9, 14, 21]


def test_it_is_run_only_when_asked_for():
    assert "time_to_quality" in LONG and set(LONG) < set(BENCHMARKS)
    assert set(BENCHMARKS) - set(LONG) == set(load_yaml(run_script("benchmark.py", "--dry_run").stdout)["benchmarks"])


# -------------------------------------------------------------------------------------------------------- in miniature

SHAPES = ShapesConfig(image_size=16, train_samples=64, val_samples=0, samples_per_shard=32)
TINY = (
    "--image_size",
    "16",
    "--num_channels",
    "32",
    "--enc_attn_dim",
    "16",
    "--batch_size",
    "4",
    "--precision",
    "fp32",
)


@pytest.fixture(scope="module")
def diffusers():
    return pytest.importorskip("diffusers")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shapes")
    write_shapes(SHAPES, str(folder))
    return parse(GeneratorRun, [*RECIPES["shapes_32"], *FLAGS, *TINY, "--data_dir", str(folder / "train")])


@pytest.mark.slow
def test_all_sides_in_miniature(diffusers, capsys):
    flags = (*FLAGS, *TINY, "--iterations", "2")
    rules = Rules(slice_seconds=0.01, limit=1.0, prompts=2)
    recipes = {"first": RECIPES["shapes_32"], "other": (*RECIPES["shapes_32"], "--num_res_blocks", "2")}
    *ours, peer = train_all(rules, SHAPES, recipes, flags, widths=(32, 32), seeds=(0, 1))
    assert [(each.name, each.last.steps) for each in ours] == [("first", 2)] * 2 + [("other", 2)] * 2
    assert ours[0].parameters < ours[2].parameters
    assert peer.last.seconds >= ours[0].last.seconds and peer.precision in ("fp32", "bf16")
    assert "held-out pairs 0.85 | > " in comparison([*ours, peer]) and "diffusers: " in capsys.readouterr().err


@pytest.mark.parametrize("name", ["patches of 2", "shapes_32"])
def test_parameters_are_alike(diffusers, run, name):
    full = parse(GeneratorRun, [*RECIPES[name], *FLAGS, "--data_dir", *run.data.data_dir])
    assert Peer(full, ALONE, "fp32").parameters == pytest.approx(Ours(name, full, ALONE).parameters, rel=0.1)


@pytest.mark.slow
def test_the_peer_is_trained_as_in_its_example(diffusers, run):
    """Against the formulas: AdamW with a warm-up from 0, whose second and third steps change the weights, and EMA."""
    peer, plain = Peer(run, ALONE, "fp32", (32, 32)), Peer(run, ALONE, "fp32", (32, 32))
    assert [peer.schedule.base_lrs[0] * peer.schedule.lr_lambdas[0](step) for step in (0, 250, 500, 9000)] == [
        pytest.approx(lr) for lr in (0.0, 5e-5, 1e-4, 1e-4)
    ]
    peer.schedule.base_lrs = [1.0]  # makes effects of weight decay exceed those of rounding
    weights, adam = [w.detach().clone() for w in plain.weights], [(0.0, 0.0)] * len(plain.weights)
    alphas = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000), 0)
    first, averages = list(weights), list(weights)
    for step in range(1, 4):
        batch = next(plain.batches)
        noise = torch.randn(batch.images.shape, generator=plain.generator)
        t = torch.randint(1000, (16,), generator=plain.generator)
        level = alphas[t].view(-1, 1, 1, 1)
        x = level.sqrt() * batch.images + (1 - level).sqrt() * noise
        with torch.no_grad():
            for own, value in zip(plain.weights, weights, strict=True):
                own.copy_(value)
        tokens, mask = batch.cond.caption
        states = plain.text_encoder(tokens, mask)[0]
        predicted = plain.unet(x, t, states, encoder_attention_mask=mask).sample
        gradients = torch.autograd.grad((predicted - noise).square().mean(), plain.weights, allow_unused=True)
        norm = torch.stack([g.norm() for g in gradients if g is not None]).norm()
        lr = (step - 1) / 500
        for i, gradient in enumerate(gradients):
            if gradient is None:  # the text's pooled vector, which the peer has no use for
                continue
            gradient = gradient / max(1.0, norm.item())
            m, v = (b * a + (1 - b) * g for b, a, g in zip((0.9, 0.999), adam[i], (gradient, gradient**2), strict=True))
            adam[i] = m, v
            update = (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-8)
            weights[i] = weights[i] * (1 - lr * 1e-2) - lr * update
        decay = 1 - step**-0.75 if step > 1 else 0.0
        averages = [decay * a + (1 - decay) * w for a, w in zip(averages, weights, strict=True)]
        peer.step()
    assert all(weight.grad is None for weight in peer.weights) and peer.ema.optimization_step == 3
    began = torch.cat([weight.flatten() for weight in first])
    for found, expected in ((peer.weights, weights), (peer.ema.shadow_params, averages)):
        ends, should = (torch.cat([value.detach().flatten() for value in each]) for each in (found, expected))
        assert (ends - should).norm() < 2e-3 * (should - began).norm()  # AdamW amplifies rounding


@pytest.mark.slow
def test_the_peer_samples_by_its_averaged_weights(diffusers, run):
    peer = Peer(run, ALONE, "fp32", (32, 32))
    captions = [prompt.text for prompt in shape_prompts(2, config=SHAPES, tasks=("attributes",))]
    before = peer.sample(captions, seed=3)
    tokens, mask = peer.tokenizer(captions, run.model.text.text_length)
    x, t = torch.randn(2, 3, 16, 16), torch.tensor([10, 900])
    padded = peer._predict(x, t, tokens.where(mask, 7), mask)
    assert not mask.all() and torch.equal(padded, peer._predict(x, t, tokens, mask))
    assert before.shape == (2, 16, 16, 3) and np.array_equal(before, peer.sample(captions, seed=3))
    assert not np.array_equal(before, peer.sample(captions, seed=4))
    assert not np.array_equal(before, peer.sample(captions[::-1], seed=3))
    with torch.no_grad():
        for weight in peer.weights:
            weight.add_(0.1)
    changed = [weight.detach().clone() for weight in peer.weights]
    assert np.array_equal(before, peer.sample(captions, seed=3))
    assert all(torch.equal(a, b) for a, b in zip(changed, peer.weights, strict=True))


def test_the_peer_samples_what_its_network_predicts(diffusers, run, monkeypatch):
    """With the exact prediction of the noise, the image itself."""
    peer = Peer(run, ALONE, "fp32", (32, 32))
    image = torch.rand(3, 16, 16) * 2 - 1
    alphas = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000), 0)

    def predict(x, t, tokens, mask):
        return (x - alphas[t].sqrt() * image) / (1 - alphas[t]).sqrt()

    monkeypatch.setattr(peer, "_predict", predict)
    expected = run.signal.to_pixels(image[None]).astype(int)
    assert np.abs(peer.sample(["a red circle"] * 2, seed=0) - expected).max() <= 1


def test_our_side_is_the_run(run):
    optim = replace(run.optim, warmup_steps=0, ema_rate=(0.5,))  # so that two steps can be seen in pixels
    ours = Ours("ours", replace(run, optim=optim, training=replace(run.training, iterations=2)), ALONE)
    captions = [prompt.text for prompt in shape_prompts(2, config=SHAPES, tasks=("attributes",))]
    start = ours.sample(captions, seed=3)
    ours.step()
    assert not ours.finished and ours.loop.samples == 4
    ours.step()
    assert ours.finished and start.shape == (2, 16, 16, 3)
    trained = ours.sample(captions, seed=3)
    assert not np.array_equal(start, trained)
    guidance = replace(run.preview.guidance, guidance_scale=50.0)
    ours.run = replace(run, preview=replace(run.preview, guidance=guidance))
    assert not np.array_equal(trained, ours.sample(captions, seed=3))


def test_the_faster_precision_is_chosen(monkeypatch):
    now, cost = [0.0], {"fp32": 3.0, "bf16": 2.0}

    class Timed:
        def __init__(self, precision):
            self.precision, self.first = precision, True

        def step(self):
            now[0] += 100 if self.first and self.precision == "bf16" else cost[self.precision]
            self.first = False

    monkeypatch.setattr("time.process_time", lambda: now[0])
    assert faster_precision(Timed) == "bf16"
    cost["bf16"] = 4.0
    assert faster_precision(Timed) == "fp32"
