"""The loop with a toy task: exact resuming, micro-batches, non-finite steps, signals, checkpoints."""

import itertools
import json
import os
import signal
from dataclasses import replace

import pytest
import torch
from operation_counting import operations
from script_running import hashes
from toy import WORLD, ListTracker, ToyData, ToyTask, run, weights

from diff_dalle.checkpoints.checkpoint import Identity, load_file
from diff_dalle.checkpoints.run_folder import open_run
from diff_dalle.config import InputError
from diff_dalle.distributed.launch import JobEnd
from diff_dalle.randomness import Draw
from diff_dalle.tracking.tracker import Table
from diff_dalle.training.loop import SIGNAL, Diverged, TrainLoop, stop_on_signals
from diff_dalle.training.optim import OptimConfig
from diff_dalle.training.settings import TrainingConfig
from diff_dalle.training.trainee import Trainee

OPTIM = OptimConfig(lr=1e-2, ema_rate=(0.9, 0.99), warmup_steps=3, grad_clip=0.5)


def make_loop(logdir, task=None, optim=OPTIM, data=None, val_data=None, name="", kind="toy", **settings):
    torch.manual_seed(0)
    defaults = {"batch_size": 8, "iterations": 10, "save_interval": 4, "log_interval": 2, "precision": "fp32"}
    config = TrainingConfig(**{**defaults, **settings, "logdir": str(logdir)})
    identity = Identity(kind, {"lr": optim.lr, "iterations": config.iterations}, None)
    run = open_run(str(logdir), identity, OptimConfig)
    trainee = Trainee(task or ToyTask(), optim, config.precision, WORLD, name)
    return TrainLoop(config, [trainee], data or ToyData(config.batch_size), run, WORLD, val_data)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_resumed_run_equals_uninterrupted_run_bit_for_bit(optimizer, tmp_path):
    optim = replace(OPTIM, optimizer=optimizer)
    run(make_loop(tmp_path / "whole", optim=optim))
    run(make_loop(tmp_path / "parts", optim=optim, iterations=4))
    resumed = make_loop(tmp_path / "parts", optim=optim)
    assert (resumed.step, resumed.samples) == (4, 32)
    run(resumed)
    whole, parts = hashes(tmp_path / "whole"), hashes(tmp_path / "parts")
    assert set(whole) == {
        f"{role}0000{step}.pt" for step in ("04", "08", "10") for role in ("model", "opt", "ema_0.9_", "ema_0.99_")
    }
    latest = [name for name in whole if name.endswith("10.pt") and not name.startswith("model")]
    for name in ["model000010.pt", *latest]:
        assert whole[name] == parts[name], name


def test_kill_between_files_continues_from_the_last_complete_set(tmp_path):
    """A set that is not named in run.json does not exist, whatever files are in the folder."""
    run(make_loop(tmp_path, iterations=8))
    record = json.loads((tmp_path / "run.json").read_text())
    record["checkpoints"].pop()
    (tmp_path / "run.json").write_text(json.dumps(record))
    (tmp_path / "opt000008.pt").write_bytes(b"half")
    assert make_loop(tmp_path).step == 4


@pytest.mark.parametrize("microbatch", [1, 3, 8])
def test_microbatches_do_not_change_the_result(tmp_path, microbatch):
    plain, pieces = make_loop(tmp_path / "a"), make_loop(tmp_path / "b", microbatch=microbatch)
    run(plain), run(pieces)
    assert torch.allclose(weights(plain.trainees[0]), weights(pieces.trainees[0]), atol=1e-6)


def test_reported_means_are_exact_and_leave_out_what_does_not_apply(tmp_path):
    task = ToyTask()
    loop = make_loop(tmp_path, task=task, optim=OptimConfig(lr=1e-9), iterations=2)
    with torch.no_grad():
        batch = loop.data.batch_at(range(16))
        expected = task.losses(batch, Draw(0, batch.index))
    row = run(loop).rows[0][1]
    assert row["loss"] == pytest.approx(expected["loss"].mean().item(), rel=1e-4)
    assert row["even"] == pytest.approx(expected["loss"][::2].mean().item(), rel=1e-4)
    assert row["samples"] == 16 and row["lr"] == 1e-9 and row["skipped_steps"] == 0
    assert not (tmp_path / "flight.jsonl").exists()


def test_non_finite_steps_are_skipped_and_counted(tmp_path):
    """Batch 1 (samples 8–15) holds a NaN: the weights must be those of a run that never saw it."""
    torch.manual_seed(0)  # as make_loop does before it makes the task
    poisoned = make_loop(tmp_path / "a", task=ToyTask(poison={9}), iterations=2)
    tracker = run(poisoned)
    clean = make_loop(tmp_path / "b", iterations=1)
    run(clean)
    assert torch.equal(weights(poisoned.trainees[0]), weights(clean.trainees[0]))
    assert tracker.rows[-1][1]["skipped_steps"] == 1


def test_divergence_stops_the_run_without_a_save_and_names_the_samples(tmp_path):
    for name, interval in (("a", 1), ("b", 20)):
        task = ToyTask(poison=set(range(40, 400)))
        with pytest.raises(Diverged, match=r"not finite in 3 consecutive steps.*the samples .*flight.jsonl") as end:
            run(make_loop(tmp_path / name, task=task, iterations=40, max_bad_steps=3, log_interval=interval))
        assert make_loop(tmp_path / name).step == 4  # the checkpoint before is intact
        assert interval > 1 or "the samples sample-56, " in str(end.value)
    assert [each["step"] for each in flight_of(tmp_path / "a")] == [6, 7, 8]


def test_observed_values_arrive_in_order_and_are_not_logged(tmp_path):
    task = ToyTask(observed=("position",))
    tracker = run(make_loop(tmp_path, task=task, iterations=2, microbatch=3))
    assert task.seen == [list(range(8)), list(range(8, 16))]
    assert all("position" not in scalars for _, scalars in tracker.rows)


def test_evaluation_uses_the_average_and_fixed_draws(tmp_path):
    data = ToyData(8)
    loop = make_loop(tmp_path, val_data=data, eval_interval=5, eval_samples=20, microbatch=8)
    tracker = run(loop)
    rows = [scalars for _, scalars in tracker.rows if "held_out/loss" in scalars]
    assert len(rows) == 2
    again = loop.evaluate()
    assert {f"held_out/{name}": value for name, value in again[""].items()} == pytest.approx(rows[-1])
    assert loop.evaluate() == again
    assert loop.trainees[0].task.training


@pytest.mark.parametrize(("microbatch", "batch_size"), [(1, 8), (3, 8), (0, 5)])
def test_evaluation_depends_neither_on_microbatch_nor_on_batch_size(tmp_path, microbatch, batch_size):
    """It takes whole blocks of the task's size, in order; an incomplete last block is dropped."""

    class Blocks(ToyTask):
        def held_out(self, batch, draw):
            blocks.append(batch.index.tolist())
            return self.losses(batch, draw)

    blocks, task, settings = [], Blocks(), {"val_data": ToyData(8), "eval_samples": 20}
    expected = make_loop(tmp_path / "a", task, **settings).evaluate()
    other = make_loop(tmp_path / "b", task, microbatch=microbatch, batch_size=batch_size, **settings)
    assert other.evaluate() == expected
    assert blocks == [list(range(8)), list(range(8, 16))] * 2


def test_evaluation_with_fewer_samples_than_a_block(tmp_path):
    loop = make_loop(tmp_path, val_data=ToyData(8), eval_samples=3)
    assert loop.evaluate()[""]["position"] == 1.0  # of 0, 1 and 2


class ScriptedTask(ToyTask):
    """Its held-out loss is looked up by the number of updates, which checkpoints save."""

    def __init__(self, table):
        super().__init__(observed=("position",))
        self.table, self.updates = table, 0

    def observe(self, values):
        self.updates += 1

    def extra_state(self):
        return {"updates": torch.tensor(self.updates)}

    def load_extra_state(self, state):
        self.updates = int(state["updates"])

    def held_out(self, batch, draw):
        return {"loss": torch.full((len(batch),), self.table[self.updates])}


def make_scripted(folder, table, **settings):
    defaults = {"eval_interval": 2, "save_interval": 2, "keep_best": True, "val_data": ToyData(8)}
    return make_loop(folder, task=ScriptedTask(table), **{**defaults, **settings})


@pytest.mark.parametrize(
    ("losses", "best"),
    [
        ((5, 3, 4, 2, 6), 8),
        ((1, 3, 4, 2, 6), 2),
        ((5, 3, 3, 3, 3), 4),
        ((5, 4, 3, 2, 1), 10),
        ((torch.nan, 3, torch.nan, 4, 5), 4),
    ],
)
def test_the_best_weights_are_kept(tmp_path, losses, best):
    """best.pt holds the EMA weights of the first evaluation with the lowest loss."""
    table = dict(zip((2, 4, 6, 8, 10), losses, strict=True))
    run(make_scripted(tmp_path, table))
    content = load_file(str(tmp_path / "best.pt"))
    assert (content["role"], content["step"], content["samples"], content["kind"]) == ("ema", best, 8 * best, "toy")
    assert content["config"]["lr"] == 1e-2
    average = load_file(str(tmp_path / f"ema_0.9_{best:06d}.pt"))
    assert all(torch.equal(content["state"][name], value) for name, value in average["state"].items())
    assert json.loads((tmp_path / "run.json").read_text())["best"][""] == {"step": best, "loss": table[best]}


def test_the_best_weights_are_kept_only_when_asked_and_never_without_a_loss(tmp_path):
    run(make_scripted(tmp_path / "a", dict.fromkeys(range(11), 1.0), keep_best=False))
    run(make_scripted(tmp_path / "b", dict.fromkeys(range(11), torch.nan)))
    assert not (tmp_path / "a" / "best.pt").exists() and not (tmp_path / "b" / "best.pt").exists()


def test_without_averages_the_best_weights_are_the_models(tmp_path):
    run(make_scripted(tmp_path, {2: 2.0, 4: 1.0}, iterations=4, optim=OptimConfig(lr=1e-2, ema_rate=())))
    best, model = (load_file(str(tmp_path / name)) for name in ("best.pt", "model000004.pt"))
    assert best["role"] == "model"
    assert all(torch.equal(best["state"][name], value) for name, value in model["state"].items())


@pytest.mark.parametrize("losses", [(5, 3, 4, 2, 6), (5, 1, 4, 2, 6), (5, 3, 2, 4, 6)])
def test_the_best_weights_survive_a_kill(tmp_path, losses):
    """Killed in step 7, the run repeats steps 5 to 7 and an evaluation: best.pt ends up equal, bit for bit."""

    class Killed(ToyData):
        def batches(self, position, should_stop=None):
            yield from itertools.islice(super().batches(position), 6)
            raise RuntimeError("killed")

    table = dict(zip((2, 4, 6, 8, 10), losses, strict=True))
    run(make_scripted(tmp_path / "whole", table, save_interval=4))
    with pytest.raises(RuntimeError, match="killed"):
        run(make_scripted(tmp_path / "parts", table, save_interval=4, data=Killed(8)))
    assert (tmp_path / "parts" / "best.pt").exists()
    resumed = make_scripted(tmp_path / "parts", table, save_interval=4)
    assert resumed.step == 4
    run(resumed)
    assert hashes(tmp_path / "parts") == hashes(tmp_path / "whole")


def test_findings_are_noted_and_drawn_beside_the_checkpoints(tmp_path):
    class Telling(ToyTask):
        def findings(self, values):
            return f"mean position {values['position']}", {"curve": torch.zeros(2, 3, 3).numpy()}

    class Listening(ListTracker):
        said, drawn = [], []

        def note(self, text):
            self.said.append(text)

        def figure(self, step, name, image):
            self.drawn.append((step, name, image.shape))

    settings = {"val_data": ToyData(8), "eval_samples": 8, "eval_interval": 5, "iterations": 7}  # the last step is, too
    tracker = run(make_loop(tmp_path, task=Telling(), name="base", **settings), Listening())
    assert tracker.said == ["Step 5, base: mean position 3.5", "Step 7, base: mean position 3.5"]
    assert tracker.drawn == [(5, "base/curve", (2, 3, 3)), (7, "base/curve", (2, 3, 3))]


def test_previews_are_told_with_what_training_has_found(tmp_path):
    grid, table = torch.zeros(2, 3, 3).numpy(), Table({"caption": ["a"]})

    class Showing(ToyTask):
        def previews(self):
            return {"grid": grid, "rows": table}

        def training_findings(self):
            return "", {"curve": torch.zeros(4, 3, 3).numpy()}

    class Listening(ListTracker):
        def table(self, step, name, given):
            self.rows.append((step, {name: given}))

        def figure(self, step, name, image):
            self.rows.append((step, {name: image.shape}))

    loop, tracker = make_loop(tmp_path, task=Showing(), iterations=5, name="base", log_interval=100), Listening()
    loop.sample_interval = 3
    loop.run(tracker)
    shown = [{"base/grid": (2, 3, 3)}, {"base/rows": table}, {"base/curve": (4, 3, 3)}]
    told = [(step, each) for step, each in tracker.rows if "samples" not in each]
    assert told == [(3, each) for each in shown] + [(5, each) for each in shown]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_saves_and_leaves_with_a_status_of_its_own(tmp_path, number):
    class Interrupting(ToyData):
        def batches(self, position, should_stop=None):
            for i, batch in enumerate(super().batches(position)):
                if i == 2:
                    os.kill(os.getpid(), number)
                yield batch

    loop = make_loop(tmp_path, data=Interrupting(8), iterations=1000, save_interval=1000)
    with pytest.raises(JobEnd) as end:
        run(loop)
    assert end.value.code == 128 + number and 2 <= loop.step <= 4
    assert make_loop(tmp_path).step == loop.step


@pytest.mark.parametrize(
    ("tells", "said"), [(True, "\nFinishing this step and saving; Ctrl-C again to stop now\n"), (False, "")]
)
def test_ctrl_c_says_what_happens(tells, said, capfd):
    with stop_on_signals(tells) as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.reason == SIGNAL + signal.SIGINT and capfd.readouterr().err == said
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert capfd.readouterr().err == ""


def test_another_signal_has_no_second_one(capfd):
    with stop_on_signals(True) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.reason == SIGNAL + signal.SIGTERM
    assert capfd.readouterr().err == "\nFinishing this step and saving\n"


def test_a_signal_ends_a_wait_for_data(tmp_path):
    class Waiting(ToyData):
        def batches(self, position, should_stop):
            yield from itertools.islice(super().batches(position), 3)
            assert not should_stop()
            os.kill(os.getpid(), signal.SIGTERM)
            assert should_stop()  # or it would wait for ever

    loop = make_loop(tmp_path, data=Waiting(8), iterations=1000, save_interval=1000)
    with pytest.raises(JobEnd) as end:
        run(loop)
    assert end.value.code == 128 + signal.SIGTERM and make_loop(tmp_path).step == loop.step >= 2


class Failing(ToyData):
    """Its batch number ``at``, from 0, cannot be had."""

    def __init__(self, at):
        super().__init__(8)
        self.at = at

    def batches(self, position, should_stop=None):
        for i, batch in enumerate(super().batches(position)):
            if i == self.at:
                raise InputError("the shard is gone")
            yield batch


def test_a_failure_of_the_data_saves_first(tmp_path):
    loop = make_loop(tmp_path, data=Failing(3), save_interval=1000)
    with pytest.raises(InputError, match="^the shard is gone$"):
        run(loop)
    assert make_loop(tmp_path).step == loop.step == 3
    with pytest.raises(InputError, match="the shard is gone"):
        run(make_loop(tmp_path / "first", data=Failing(0)))
    assert make_loop(tmp_path / "first").step == 0


@pytest.mark.parametrize("name", ["log", "progress", "note", "images"])
def test_a_failure_of_the_log_saves_first(tmp_path, name):
    """After the step in progress; nothing more is told to the tracker but that the session has ended."""

    class FullDisk(ListTracker):
        calls = 0

        def fail(self, *_):
            self.calls += 1
            raise InputError("log.txt cannot be written")

    class Shown(ToyTask):
        def previews(self):
            return {"grid": torch.zeros(2, 2, 3).numpy()}

        def findings(self, values):
            return "a note", {}

    tracker = FullDisk()
    setattr(tracker, name, tracker.fail)
    loop = make_loop(tmp_path, task=Shown(), val_data=ToyData(8), eval_interval=2, save_interval=1000)
    loop.sample_interval = 2
    with pytest.raises(InputError, match="log.txt cannot be written"):
        loop.run(tracker)
    first = 1 if name == "progress" else 2
    assert tracker.finished and tracker.calls == 1 and loop.step == first + 1
    assert make_loop(tmp_path).step == loop.step


def test_a_failure_of_held_out_data_saves_first(tmp_path):
    class Lost(ToyData):
        def batch_at(self, positions):
            raise InputError("the held-out shard is gone")

    loop = make_loop(tmp_path, val_data=Lost(8), eval_interval=5, save_interval=1000)
    with pytest.raises(InputError, match="held-out shard is gone"):
        run(loop)
    assert make_loop(tmp_path).step == loop.step == 6


def test_the_data_is_asked_for_no_more_batches_than_are_trained_on(tmp_path):
    class Counted(ToyData):
        given, closed = 0, False

        def batches(self, position, should_stop=None):
            try:
                for batch in super().batches(position):
                    self.given += 1
                    yield batch
            finally:
                self.closed = True

    data = Counted(8)
    run(make_loop(tmp_path, data=data))
    assert data.given == 10 and data.closed
    again = Counted(8)
    run(make_loop(tmp_path, data=again))
    assert again.given == 0


# ------------------------------------------------------------------------------------------------- the flight recorder


def flight_of(folder):
    return [json.loads(text) for text in (folder / "flight.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("log_interval", [1, 3, 50])
def test_steps_that_are_not_finite_are_written_down(tmp_path, log_interval):
    task = ToyTask(poison={9, 34, 35}, observed=("position",))
    task.recorded = ("even",)
    run(make_loop(tmp_path, task=task, microbatch=3, log_interval=log_interval, max_bad_steps=50))
    found = flight_of(tmp_path)
    assert [each["step"] for each in found] == [2, 5]
    (rank,) = found[1]["ranks"]
    assert rank["position"] == list(range(32, 40)) and found[1]["trainee"] == ""
    assert [i for i, loss in zip(rank["position"], rank["loss"], strict=True) if loss == "nan"] == [34, 35]
    assert all(isinstance(loss, float) for loss in rank["loss"][4:]) and rank["even"][1] == "nan"
    assert found[1]["grad_norm"] == "nan" and found[1]["loss_scale"] == 1.0
    assert not any("even" in scalars for _, scalars in run(make_loop(tmp_path / "b", task=task)).rows)


def test_of_very_many_bad_steps_the_latest_are_kept(tmp_path):
    task = ToyTask(poison=set(range(8, 8 * 101)))
    run(make_loop(tmp_path, task=task, iterations=101, log_interval=200, save_interval=200, max_bad_steps=1000))
    found = flight_of(tmp_path)
    assert [each["step"] for each in found] == list(range(38, 102)) and found[0]["missed"] == 36
    assert not any("missed" in each for each in found[1:])
    assert [each["ranks"][0]["position"][0] for each in found] == [8 * (each["step"] - 1) for each in found]


def test_the_loss_scale_of_a_bad_step_is_the_one_it_was_computed_with(tmp_path):
    run(make_loop(tmp_path, task=ToyTask(poison={1, 9}), precision="fp16", iterations=2))
    assert [each["loss_scale"] for each in flight_of(tmp_path)] == [2.0**16, 2.0**15]


def test_old_checkpoints_are_removed_when_asked(tmp_path):
    run(make_loop(tmp_path, save_interval=2, keep_checkpoints=2))
    assert {name for name in os.listdir(tmp_path) if name.startswith("model")} == {"model000008.pt", "model000010.pt"}
    os.remove(tmp_path / "opt000008.pt")  # by hand
    run(make_loop(tmp_path, save_interval=2, keep_checkpoints=2, backup_interval=11, iterations=14))
    names = {f"model0000{step}.pt" for step in (11, 12, 14)}
    assert {name for name in os.listdir(tmp_path) if name.startswith("model")} == names


def test_resume_and_init_from_another_folder(tmp_path, capsys):
    run(make_loop(tmp_path / "a", iterations=4))
    resumed = make_loop(tmp_path / "b", resume_checkpoint=str(tmp_path / "a" / "ema_0.9_000004.pt"))
    assert "Starting at step 4 (32 samples) of" in capsys.readouterr().out
    assert resumed.step == 4
    run(resumed)
    whole = make_loop(tmp_path / "whole")
    run(whole)
    assert torch.equal(weights(resumed.trainees[0]), weights(whole.trainees[0]))
    with pytest.raises(InputError, match="holds a toy, not a generator"):
        make_loop(tmp_path / "other", kind="generator", resume_checkpoint=str(tmp_path / "a" / "model000004.pt"))
    with pytest.raises(InputError, match="holds a run of a toy, not of a generator"):
        open_run(str(tmp_path / "a"), Identity("generator", {}, None), OptimConfig)
    slow = OptimConfig(lr=1e-3, weight_decay=0.1, adam_beta2=0.9, ema_rate=(0.9, 0.99))
    changed = make_loop(tmp_path / "f", optim=slow, resume_checkpoint=str(tmp_path / "a" / "model000004.pt"))
    groups = changed.trainees[0].optimizations[""].optimizer.param_groups
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0] and groups[0]["betas"] == (0.9, 0.9)
    fresh = make_loop(tmp_path / "c", init_checkpoint=(str(tmp_path / "a" / "model000004.pt"),))
    assert fresh.step == 0 and not torch.equal(
        weights(fresh.trainees[0]), weights(make_loop(tmp_path / "d").trainees[0])
    )
    os.remove(tmp_path / "a" / "run.json")
    with pytest.raises(InputError, match="init_checkpoint"):
        make_loop(tmp_path / "e", resume_checkpoint=str(tmp_path / "a" / "model000004.pt"))


def test_a_folder_stands_for_the_averages_of_its_run(tmp_path):
    run(make_loop(tmp_path, iterations=4))
    assert load_file(str(tmp_path))["role"] == "ema"


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_trains_close_to_fp32(tmp_path, precision):
    half, full = make_loop(tmp_path / "h", precision=precision), make_loop(tmp_path / "f")
    run(half), run(full)
    assert torch.allclose(*(weights(loop.trainees[0]) for loop in (half, full)), atol=3e-2)
    assert all(p.dtype == torch.float32 for p in half.trainees[0].task.model.parameters())


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_step_keeps_few_books(tmp_path, precision):
    """Operations of a step beside network, random numbers and losses: as many for any number of parameters."""
    counts = []
    for width in (4, 8):
        task = ToyTask()
        task.model = torch.nn.Sequential(*[torch.nn.Linear(12, 12) for _ in range(width)], torch.nn.Linear(12, 1))
        loop = make_loop(tmp_path / str(width), precision=precision, task=task)
        (trainee,) = loop.trainees
        pieces = [(batch := next(loop.data.batches(0)), Draw(0, batch.index))]
        trainee.update(pieces, 0)
        whole = operations(lambda: trainee.update(pieces, 1)).total()  # noqa: B023
        forward = trainee._forward("")
        trainee.optimizations[""].begin(1)
        work = operations(lambda: task.backward(pieces, forward, trainee.optimizations[""].loss_scale.scale))  # noqa: B023
        counts.append(whole - work.total())
    assert counts[0] == counts[1] <= {"fp32": 74, "fp16": 85}[precision], counts
