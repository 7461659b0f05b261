"""Several trainees, several optimizers, frozen parts, buffers and companions in one run."""

import dataclasses
import itertools
import json

import numpy as np
import pytest
import torch
from torch import nn
from toy import WORLD, ToyData, ToyTask, TwoOptimizers, run, weights

from diff_dalle.checkpoints.checkpoint import Identity, load_file, load_weights
from diff_dalle.checkpoints.run_folder import open_run
from diff_dalle.config import InputError
from diff_dalle.distributed import parallel
from diff_dalle.distributed.world import ProcessInfo, World
from diff_dalle.training.ema import Ema
from diff_dalle.training.loop import TrainLoop
from diff_dalle.training.optim import OptimConfig
from diff_dalle.training.settings import TrainingConfig
from diff_dalle.training.trainee import Trainee

OPTIM = OptimConfig(lr=1e-2, ema_rate=(0.9,), warmup_steps=3, weight_decay=0.1)


def make_loop(logdir, trainees, **settings):
    defaults = {"batch_size": 8, "iterations": 6, "save_interval": 3, "log_interval": 2, "precision": "fp32"}
    config = TrainingConfig(**{**defaults, **settings, "logdir": str(logdir)})
    run = open_run(str(logdir), Identity("toy", {}, None), TrainingConfig)
    return TrainLoop(config, trainees, ToyData(8), run, WORLD, ToyData(8))


# --------------------------------------------------------------------------------------------------- several trainees


def make_pair():
    torch.manual_seed(0)
    return [Trainee(ToyTask(), OPTIM, "fp32", WORLD, name) for name in ("base", "upsampler")]


def test_each_file_names_its_trainee_and_goes_to_no_other(tmp_path):
    tracker = run(make_loop(tmp_path, make_pair()))
    for name in ("base", "upsampler"):
        assert f"{name}/loss" in tracker.rows[0][1]
        for role in ("model", "ema_0.9_", "opt"):
            content = load_file(str(tmp_path / f"{name}_{role}000006.pt"), ("model", "ema", "optimizer"))
            assert content["trainee"] == name
    resumed = make_loop(tmp_path, make_pair())
    whole = make_pair()
    run(make_loop(tmp_path / "whole", whole))
    assert resumed.step == 6
    for mine, other in zip(resumed.trainees, whole, strict=True):
        assert torch.equal(weights(mine), weights(other))
    record = json.loads((tmp_path / "run.json").read_text())
    files = record["checkpoints"][-1]["files"]
    files["base/model"], files["upsampler/model"] = files["upsampler/model"], files["base/model"]
    (tmp_path / "run.json").write_text(json.dumps(record))
    with pytest.raises(InputError, match="belongs to the trainee 'upsampler', not to 'base'"):
        make_loop(tmp_path, make_pair())


def test_initial_weights_go_to_the_trainee_that_the_file_names(tmp_path):
    run(make_loop(tmp_path / "a", make_pair()))
    path = str(tmp_path / "a" / "upsampler_model000006.pt")
    fresh, started = make_pair(), make_loop(tmp_path / "b", make_pair(), init_checkpoint=(path,))
    base, upsampler = started.trainees
    assert torch.equal(weights(base), weights(fresh[0])) and not torch.equal(weights(upsampler), weights(fresh[1]))
    assert all(torch.equal(upsampler.emas[0].state()[n], v) for n, v in upsampler.task.model.state_dict().items())
    with pytest.raises(InputError, match="holds the trainee 'upsampler', but this run trains 'base', 'upsampler'"):
        make_loop(tmp_path / "c", make_pair(), init_checkpoint=(path, path))
    with pytest.raises(InputError, match=r"has 3 files \(.*\), but this run trains 2 networks: give at most one"):
        make_loop(tmp_path / "c", make_pair(), init_checkpoint=(path, path, path))
    with pytest.raises(InputError, match=r"has 2 files \(.*\), but this run trains 1 network: give at most one"):
        make_loop(tmp_path / "c", make_pair()[:1], init_checkpoint=(path, path))


def test_a_pattern_of_excluded_weights_need_not_match_in_every_file(tmp_path):
    class Named(ToyTask):
        def __init__(self, name):
            super().__init__()
            self.model = nn.ModuleDict({name: nn.Linear(12, 1)})

        def losses(self, batch, draw):
            (layer,) = self.model.values()
            return {"loss": layer(batch.images.flatten(1))[:, 0].square()}

    def make():
        return [Trainee(Named(name), OPTIM, "fp32", WORLD, name) for name in ("base", "upsampler")]

    run(make_loop(tmp_path / "a", make()))
    paths = tuple(str(tmp_path / "a" / f"{name}_model000006.pt") for name in ("base", "upsampler"))
    trainees = make()
    before = [weights(trainee) for trainee in trainees]
    make_loop(tmp_path / "b", trainees, init_checkpoint=paths, init_exclude=("upsampler.*",))
    assert [torch.equal(weights(t), old) for t, old in zip(trainees, before, strict=True)] == [False, True]
    with pytest.raises(InputError, match=r"'head\.\*' of excluded weights matches none of .*base_.*, .*upsampler_"):
        make_loop(tmp_path / "c", make(), init_checkpoint=paths, init_exclude=("upsampler.*", "head.*"))


def test_held_out_values_and_previews_see_every_trainees_average(tmp_path):
    """A cascade is judged as a whole: the first network's average must be in place while the second is evaluated."""

    class Looking(ToyTask):
        def held_out(self, batch, draw):
            look()
            return self.losses(batch, draw)

        def previews(self):
            look()
            return {"grid": np.zeros((2, 2, 3), np.uint8)}

    def look():
        seen.append([task.model[0].weight.clone() for task in tasks])
        assert not any(task.training for task in tasks)

    seen, tasks = [], [Looking(), Looking()]
    trainees = [Trainee(task, OPTIM, "fp32", WORLD, name) for task, name in zip(tasks, ("a", "b"), strict=True)]
    loop = make_loop(tmp_path, trainees, eval_interval=6, eval_samples=8)
    loop.sample_interval = 6
    run(loop)
    averages = [trainee.emas[0].averages["0.weight"] for trainee in trainees]
    assert len(seen) == 4
    for found in seen:
        assert all(torch.equal(a, b) for a, b in zip(found, averages, strict=True))
    assert not torch.equal(trainees[0].task.model[0].weight, averages[0]) and tasks[0].training


@pytest.mark.parametrize("names", [("a", "a"), ("a", ""), ("", "")])
def test_several_trainees_need_names_of_their_own(tmp_path, names):
    with pytest.raises(ValueError, match="several need names of their own"):
        make_loop(tmp_path, [Trainee(ToyTask(), OPTIM, "fp32", WORLD, name) for name in names])


# -------------------------------------------------------------------------------------------------- several optimizers


CONFIGS = {"": OPTIM, "critic": OptimConfig(lr=3e-2, ema_rate=())}


def test_each_optimizer_updates_its_own_part(tmp_path):
    task = TwoOptimizers()
    trainee = Trainee(task, CONFIGS, "fp32", WORLD)
    before = {name: p.detach().clone() for name, p in task.named_parameters() if name.endswith("weight")}
    gradients = {}

    def record(part, losses):
        gradients[part] = {name for name, p in task.named_parameters() if p.grad is not None}
        return original[part](losses)

    original = {part: each.finish for part, each in trainee.optimizations.items()}
    for part, each in trainee.optimizations.items():
        each.finish = lambda losses, part=part: record(part, losses)
    loop = make_loop(tmp_path, [trainee], iterations=1, log_interval=1)
    row = run(loop).rows[0][1]
    assert {name.split(".")[0] for name in gradients[""]} == {"model"}
    assert {name.split(".")[0] for name in gradients["critic"]} >= {"critic"}
    now = dict(task.named_parameters())
    assert not any(torch.equal(value, now[name]) for name, value in before.items())
    assert row["critic_lr"] == 3e-2 and row["lr"] == pytest.approx(1e-2 / 3)
    assert {"loss", "critic_loss", "grad_norm", "critic_grad_norm"} <= row.keys()
    assert all(p.requires_grad for p in task.parameters())


def test_two_optimizers_resume_exactly(tmp_path):
    def make(folder, **settings):
        return make_loop(folder, [Trainee(TwoOptimizers(), CONFIGS, "fp32", WORLD)], **settings)

    run(make(tmp_path / "whole"))
    run(make(tmp_path / "parts", iterations=3))
    resumed = make(tmp_path / "parts")
    assert resumed.step == 3
    run(resumed)
    for name in ("model000006.pt", "ema_0.9_000006.pt", "opt000006.pt"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "parts" / name).read_bytes(), name
    state = load_file(str(tmp_path / "whole" / "opt000006.pt"), ("optimizer",))["state"]
    assert list(state["modules"]) == ["critic"] and list(state["parts"]) == ["critic"]
    assert "critic.weight" not in load_file(str(tmp_path / "whole" / "model000006.pt"))["state"]


class SharedModel(ToyTask):
    """Two optimizers of the same parameters, with losses of their own."""

    parts = ("", "more")

    def part_losses(self, part, batch, draw):
        return {"loss": self.losses(batch, draw)["loss"] * (2 if part else 1)}


def test_parts_may_share_parameters(tmp_path):
    torch.manual_seed(0)
    trainee = Trainee(SharedModel(), OPTIM, "fp32", WORLD)
    row = run(make_loop(tmp_path, [trainee], iterations=1, log_interval=1)).rows[0][1]
    assert row["grad_norm"] > 0 and row["more_grad_norm"] > 0
    assert all(len(each.optimizer.state) == 4 for each in trainee.optimizations.values())
    assert all(p.requires_grad for p in trainee.task.parameters())


def test_a_loss_that_is_not_finite_is_logged_for_every_part(tmp_path):
    class Broken(TwoOptimizers):
        def part_losses(self, part, batch, draw):
            losses = super().part_losses(part, batch, draw)
            return {"loss": losses["loss"] * (torch.nan if part else 1)}

    rows = run(make_loop(tmp_path, [Trainee(Broken(), CONFIGS, "fp32", WORLD)], max_bad_steps=99)).rows
    row = next(row for _, row in rows if "critic_lr" in row)
    assert np.isnan(row["critic_loss"]) and np.isfinite(row["loss"])


def test_averages_are_those_of_the_first_optimizer():
    for rates in ((), OPTIM.ema_rate, OptimConfig.ema_rate):
        trainee = Trainee(TwoOptimizers(), {"": OPTIM, "critic": OptimConfig(ema_rate=rates)}, "fp32", WORLD)
        assert [ema.rate for ema in trainee.emas] == [0.9]
    with pytest.raises(InputError, match=r"ema_rate of the optimizer 'critic' is \(0\.5,\)"):
        Trainee(TwoOptimizers(), {"": OPTIM, "critic": OptimConfig(ema_rate=(0.5,))}, "fp32", WORLD)


def test_the_initial_values_are_sent_once(monkeypatch):
    """Not for each optimizer."""
    sent = []

    class Recorder(nn.Module):
        def __init__(self, module, init_sync, **options):
            super().__init__()
            sent.append(init_sync)

    monkeypatch.setattr(nn.parallel, "DistributedDataParallel", Recorder)
    monkeypatch.setattr(parallel, "_arrange_buckets", lambda recorder: None)
    Trainee(TwoOptimizers(), CONFIGS, "fp32", World(ProcessInfo("mpi", 0, 2), torch.device("cpu")))
    assert sent == [True, False]


# ------------------------------------------------------------------------------------ frozen parts, buffers, companions


class PartlyFrozen(ToyTask):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(12, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.model[0].requires_grad_(False)


def test_what_is_frozen_has_no_gradient_no_state_and_no_average(tmp_path):
    """Parts of the model, and companions. The file of an average is a complete state dict all the same: what is not
    averaged has the model's values."""

    class Accompanied(PartlyFrozen):
        def losses(self, batch, draw):
            with torch.no_grad():
                target = self.companions["encoder"](batch.images.flatten(1))[:, 0]
            return {"loss": (self.model(batch.images.flatten(1))[:, 0] - target).square()}

    torch.manual_seed(0)
    task, encoder = Accompanied(), nn.Sequential(nn.Linear(12, 1), nn.Dropout(0.5))
    task.add_companion("encoder", encoder)
    model, kept = task.model, [task.model[0].weight, encoder[0].weight]
    before = [weight.detach().clone() for weight in kept]
    trainee = Trainee(task, OPTIM, "fp32", WORLD)
    run(make_loop(tmp_path, [trainee]))
    assert all(map(torch.equal, kept, before)) and not any(weight.requires_grad for weight in kept)
    assert all(weight.grad is None for weight in kept) and not encoder.training
    assert not any("encoder" in name for name, _ in task.named_parameters())
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    assert {id(p) for p in trainee.optimizations[""].optimizer.state} == trained
    statistics = {"1.running_mean", "1.running_var"}
    assert set(trainee.emas[0].averages) == {"1.weight", "1.bias", "2.weight", "2.bias"} | statistics
    content = load_file(str(tmp_path / "ema_0.9_000006.pt"))
    state = content["state"]
    assert list(state) == list(model.state_dict())
    assert state["1.num_batches_tracked"] == model[1].num_batches_tracked == 6
    assert torch.equal(state["0.weight"], model[0].weight) and not torch.equal(state["2.weight"], model[2].weight)
    load_weights(PartlyFrozen().model, content, "ema")


class Observing(PartlyFrozen):
    """Sets the statistics to the mean of each batch after the step, as autoencoders do."""

    observed = ("mean",)

    def losses(self, batch, draw):
        return {**super().losses(batch, draw), "mean": batch.images.flatten(1).mean(1)}

    def observe(self, values):
        self.model[1].eval()
        self.model[1].running_mean.fill_(values["mean"].mean())


def test_statistics_are_averaged_as_the_weights_of_the_same_step_are(tmp_path):
    """By hand: what a task observes after a step belongs to that step's average, also while that is a copy."""
    torch.manual_seed(0)
    trainee = Trainee(Observing(), dataclasses.replace(OPTIM, ema_rate=(0.5,), ema_start=2), "fp32", WORLD)
    loop, (ema,) = make_loop(tmp_path, [trainee]), trainee.emas
    expected = torch.zeros(4)
    for step, batch in enumerate(itertools.islice(ToyData(8).batches(0), 5)):
        loop.update(batch)
        now = trainee.task.model[1].running_mean.clone()
        expected = now if step < 2 else (expected + now) / 2
        torch.testing.assert_close(ema.state()["1.running_mean"], expected)
    with ema.in_place():
        torch.testing.assert_close(trainee.task.model[1].running_mean, expected)
    assert torch.equal(trainee.task.model[1].running_mean, now) and not torch.equal(now, expected)


def test_nothing_left_to_train_is_refused():
    task = ToyTask()
    task.model.requires_grad_(False)
    with pytest.raises(InputError, match="all parameters are frozen"):
        Trainee(task, OPTIM, "fp32", WORLD)


def test_the_average_of_a_model_without_buffers_is_its_parameters_in_order():
    model = ToyTask().model
    assert list(Ema(0.9, model).state()) == [name for name, _ in model.named_parameters()]


# ----------------------------------------------------------------------------------------------------- partial weights


def test_excluded_weights_are_left_out_and_listed(tmp_path, capsys):
    run(make_loop(tmp_path / "a", make_pair()[:1]))
    path = str(tmp_path / "a" / "base_model000006.pt")

    class NewHead(ToyTask):
        def __init__(self):
            super().__init__()
            self.model[2] = nn.Linear(4, 3)

    with pytest.raises(InputError, match=r"has 2.weight of shape \(1, 4\) where \(3, 4\) is required"):
        make_loop(tmp_path / "b", [Trainee(NewHead(), OPTIM, "fp32", WORLD)], init_checkpoint=(path,))
    task = NewHead()
    head = task.model[2].weight.detach().clone()
    trainee = Trainee(task, OPTIM, "fp32", WORLD)
    make_loop(tmp_path / "c", [trainee], init_checkpoint=(path,), init_exclude=("2.*",))
    state = load_file(path)["state"]
    assert torch.equal(task.model[0].weight, state["0.weight"]) and torch.equal(task.model[2].weight, head)
    assert torch.equal(trainee.emas[0].averages["0.weight"], state["0.weight"])
    assert torch.equal(trainee.emas[0].averages["2.weight"], head)
    assert "2 tensors loaded; 2 left at initial values: 2.weight, 2.bias" in capsys.readouterr().out
    with pytest.raises(InputError, match="the pattern 'head.*' of excluded weights matches none"):
        make_loop(tmp_path / "d", [trainee], init_checkpoint=(path,), init_exclude=("head.*",))
    with pytest.raises(InputError, match="init_exclude is given without init_checkpoint"):
        TrainingConfig(init_exclude=("2.*",))


def test_weights_that_only_the_file_has_are_excluded_too(tmp_path):
    whole = nn.ModuleDict({"body": nn.Linear(2, 2), "head": nn.Linear(2, 1)})
    content = {"state": whole.state_dict()}
    part = nn.ModuleDict({"body": nn.Linear(2, 2)})
    loaded = load_weights(part, content, "file", ["head.*"])
    assert loaded.taken == ["body.weight", "body.bias"] and loaded.unused == ["head.weight", "head.bias"]
    assert torch.equal(part["body"].weight, whole["body"].weight) and not loaded.excluded
    assert str(loaded) == "2 tensors loaded; 2 of the file not used: head.weight, head.bias"


# ------------------------------------------------------------------------------------------- the arithmetic of a step


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_the_network_computes_in_the_precision_that_is_set(tmp_path, precision, dtype):
    task, seen = ToyTask(), []
    task.model[0].register_forward_hook(lambda _, __, output: seen.append(output.dtype))
    run(make_loop(tmp_path, [Trainee(task, OPTIM, precision, WORLD)], eval_interval=6, eval_samples=8))
    assert set(seen) == {dtype} and len(seen) == 7  # in evaluation too
    assert all(p.dtype == torch.float32 for p in task.parameters())


def test_rate_and_averages_belong_to_their_step(tmp_path):
    """The first update has the first rate of the warm-up, and moves the averages as update number 1."""
    torch.manual_seed(0)
    optim = OptimConfig(lr=1e-2, ema_rate=(0.9,), warmup_steps=3, lr_anneal_steps=6)
    trainee = Trainee(ToyTask(), optim, "fp32", WORLD)
    start = weights(trainee)
    rows = run(make_loop(tmp_path, [trainee], iterations=1, log_interval=1)).rows
    average = torch.cat([value.flatten() for value in trainee.emas[0].averages.values()])
    torch.testing.assert_close(average, torch.lerp(start, weights(trainee), 1 - 2 / 11))
    assert rows[0][1]["lr"] == pytest.approx(1e-2 / 3)
    assert (weights(trainee) - start).abs().max() == pytest.approx(1e-2 / 3, rel=1e-3)  # AdamW's first step
    rows = run(make_loop(tmp_path, [trainee], log_interval=1)).rows
    rates = [row["lr"] for _, row in rows if "lr" in row]
    assert rates == pytest.approx([2e-2 / 3, 1e-2, 1e-2, 2e-2 / 3, 1e-2 / 3])


def test_the_loss_scale_changes_and_is_restored(tmp_path):
    def make(**settings):
        torch.manual_seed(0)
        trainee = Trainee(ToyTask(poison={1, 9}), OPTIM, "fp16", WORLD)
        return make_loop(tmp_path, [trainee], save_interval=5, precision="fp16", **settings)

    rows = run(make(iterations=5, log_interval=1)).rows
    scales = [row["loss_scale"] for _, row in rows if "loss_scale" in row]
    assert scales == [2.0**15, *[2.0**14] * 4]
    resumed = make().trainees[0].optimizations[""].loss_scale
    assert (float(resumed.scale), float(resumed.good_steps)) == (2.0**14, 3)


@pytest.mark.parametrize("scale", [1.0, 2.0**16])
def test_gradients_are_clipped_to_their_norm_together(scale):
    def finished(clip):
        torch.manual_seed(0)
        trainee = Trainee(ToyTask(), OptimConfig(grad_clip=clip), "fp16", WORLD)
        optimization = trainee.optimizations[""]
        optimization.loss_scale.scale.fill_(scale)
        for parameter in optimization.parameters:
            parameter.grad = torch.full_like(parameter, 2 * scale)
        norm, _ = optimization.finish(torch.ones(1))
        return norm, torch.cat([p.grad.flatten() for p in optimization.parameters])

    whole, plain = finished(0.0)
    norm, clipped = finished(0.5)
    assert norm == whole == pytest.approx(2 * len(plain) ** 0.5) and torch.equal(plain, torch.full_like(plain, 2.0))
    assert clipped.norm() == pytest.approx(0.5, rel=1e-4)
    torch.testing.assert_close(clipped, plain * (0.5 / norm))
    _, small = finished(1e6)
    assert torch.equal(small, plain)
