"""The comparison of training times: its bookkeeping on made-up scores, and both sides in miniature."""

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
    Course,
    Ours,
    Point,
    Rules,
    comparison,
    plot,
    race,
    ratio,
    train_both,
)
from benchmarks.timing import TimingConfig, results
from diff_dalle.commands.command_line import parse
from diff_dalle.distributed.world import ALONE
from diff_dalle.recipes.generator import GeneratorRun
from diff_dalle.worlds.shapes.prompts import shape_prompts
from diff_dalle.worlds.shapes.scenes import ShapesConfig
from diff_dalle.worlds.shapes.shape_eval import Row
from diff_dalle.worlds.shapes.shards import write_shapes


def course(name, *scores, batch_size=10, seconds=10.0):
    """A point every ``seconds`` and 5 steps."""
    points = [Point(seconds * i, 5 * i, s, max(0.0, s - 0.05), min(1.0, s + 0.05)) for i, s in enumerate(scores, 1)]
    return Course(name, batch_size, "fp32", 5_900_000, points)


def test_crossings_are_interpolated_from_the_point_before():
    found = course("a", 0.25, 0.75, 0.4, 0.9)
    assert found.crossing(0.5) == pytest.approx((15.0, 7.5))  # the first one, although the score falls again
    assert found.crossing(0.1) == pytest.approx((4.0, 2.0))  # from 0 before training
    assert found.crossing(0.75) == pytest.approx((20.0, 10.0))
    assert found.crossing(0.95) is None and Course("b", 1, "fp32", 1).crossing(0.5) is None


def test_the_ratio_is_bounded_where_a_level_is_not_reached():
    reached, slow, never = course("a", 0.0, 1.0), course("b", 0.0, 0.0, 0.0, 1.0), course("c", 0.0, 0.1, 0.2, 0.2)
    assert ratio(reached, slow, 0.5) == "0.43"  # 15 / 35
    assert ratio(reached, never, 0.5) == "< 0.38"  # 15 / 40
    assert ratio(never, reached, 0.5) == "> 2.67"
    assert ratio(never, never, 0.5) == "not reached"


def test_table():
    ours, peer = course("ours", 0.0, 1.0), course("peer", 0.1, 0.6, batch_size=4)
    rows = {
        cells[0]: cells[1:]
        for cells in ([c.strip() for c in r.split("|")[1:-1]] for r in comparison(ours, peer).split("\n"))
    }
    assert rows[""] == ["ours", "peer", "ours / peer"]
    assert rows["images per second"] == ["5", "2", ""]
    assert rows["seconds to 0.5"] == ["15", "18", "0.83"] and rows["images to 0.5"] == ["75", "36", ""]
    assert rows["seconds to 0.85"] == ["18", "> 20", "< 0.93"] and rows["steps to 0.85"] == ["9", "> 10", ""]
    assert rows["last score"] == ["1.00 (0.95–1.00)", "0.60 (0.55–0.65)", ""]


def test_plot_shows_scores_with_intervals_and_levels(monkeypatch):
    ours, peer = course("ours", 0.0, 1.0), course("peer", 0.1)
    assert plot(ours, peer).size[0] > 500
    drawn = []
    monkeypatch.setattr(time_to_quality, "line_plot", lambda *given, references: drawn.extend([*given, references]))
    plot(ours, peer)
    assert drawn[0] == {
        "ours": [(10, 0.0, 0.0, 0.05), (20, 1.0, 0.95, 1.0)],
        "peer": [(10, 0.1, 0.05, pytest.approx(0.15))],
    }
    assert drawn[-1] == {"0.5": 0.5, "0.85": 0.85}


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
    log, now = [], [0.0]
    sides = Toy("a", log, now, gains[0], last), Toy("b", log, now, gains[1])

    def score(side):
        now[0] += 1000  # is not counted
        log.append(" ")
        value = min(1.0, side.gain * side.steps)
        return Row("", 1, value, value, value, 0.0, 1.0, 1.0)

    courses = race(*sides, score, rules, lambda: now[0])
    return "".join(log).split(), *courses


def test_slices_alternate_until_both_have_reached_the_last_level():
    turns, ours, peer = toy_race((0.1, 0.05), Rules(4, 0.0, 4.0))
    assert turns == ["aaaa", "bbbb", "aaaa", "bbbb", "aaaa", "bbbb", "bbbb", "bbbb"]
    assert [p.seconds for p in ours.points] == [p.steps for p in ours.points] == [4, 8, 12]
    assert peer.last.seconds == 20 and peer.crossing(0.85)[0] == pytest.approx(17)


def test_the_peer_may_be_first():
    turns, _, peer = toy_race((0.05, 0.5), Rules(4, 0.0, 4.0))
    assert turns == ["aaaa", "bbbb", *["aaaa"] * 4] and peer.last.seconds == 4


def test_the_peer_stops_at_a_multiple_of_our_seconds():
    turns, ours, peer = toy_race((0.1, 0.0), Rules(4, 0.0, 2.0))
    assert ours.crossing(0.85)[0] == pytest.approx(9) and ours.last.seconds == 12
    assert peer.last.seconds == 18 and turns[-2:] == ["bbbb", "bb"]


def test_our_schedule_ends():
    turns, ours, _ = toy_race((0.01, 0.0), Rules(4, 0.0, 2.0), last=6)
    assert turns == ["aaaa", "bbbb", "aa", "bbbb", "bbbb"] and ours.last.steps == 6


def test_slices_grow():
    turns, *_ = toy_race((0.02, 0.02), Rules(4, 0.5, 4.0))
    assert [len(turn) for turn in turns[::2]] == [4, 4, 4, 6, 9, 14, 21]


def test_it_is_run_only_when_asked_for():
    assert "time_to_quality" in LONG and set(LONG) < set(BENCHMARKS)
    assert set(BENCHMARKS) - set(LONG) == set(load_yaml(run_script("benchmark.py", "--dry_run").stdout)["benchmarks"])


def test_it_is_skipped_without_diffusers(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert list(results(BENCHMARKS["time_to_quality"], TimingConfig())) == [
        "skipped: the package diffusers is not installed"
    ]


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
    return parse(GeneratorRun, [*FLAGS, *TINY, "--data_dir", str(folder / "train")])


def test_both_sides_in_miniature(diffusers, capsys):
    flags = (*FLAGS, *TINY, "--iterations", "2")
    ours, peer = train_both(Rules(slice_seconds=0.01, limit=1.0, prompts=2), SHAPES, flags, widths=(32, 32))
    assert ours.last.steps == 2 and peer.last.seconds >= ours.last.seconds and peer.precision in ("fp32", "bf16")
    assert "seconds to 0.85 | > " in comparison(ours, peer) and "diffusers: " in capsys.readouterr().err


def test_parameters_are_alike(diffusers, run):
    full = parse(GeneratorRun, [*FLAGS, "--data_dir", *run.data.data_dir])
    assert Peer(full, ALONE, "fp32").parameters == pytest.approx(Ours(full, ALONE).parameters, rel=0.1)


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
    began = torch.cat([weight.flatten() for weight in first])
    for found, expected in ((peer.weights, weights), (peer.ema.shadow_params, averages)):
        ends, should = (torch.cat([value.detach().flatten() for value in each]) for each in (found, expected))
        assert (ends - should).norm() < 2e-3 * (should - began).norm()  # AdamW amplifies rounding


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
    ours = Ours(replace(run, training=replace(run.training, iterations=2)), ALONE)
    captions = [prompt.text for prompt in shape_prompts(2, config=SHAPES, tasks=("attributes",))]
    start = ours.sample(captions, seed=3)
    ours.step()
    assert not ours.finished and ours.loop.samples == 4
    ours.step()
    assert ours.finished and start.shape == (2, 16, 16, 3)
    assert not np.array_equal(start, ours.sample(captions, seed=3))


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
