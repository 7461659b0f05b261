"""What trackers are told about checkpoints, and runs that go on from what a saver kept."""

import io
import math
import os
import threading
import time

import pytest
import torch
from script_running import hashes
from toy import WORLD, ListTracker, ToyData, ToyTask, run

from diff_dalle.checkpoints.bundle import restore_bundle
from diff_dalle.checkpoints.checkpoint import Identity, load_file
from diff_dalle.checkpoints.run_folder import open_run, read_run
from diff_dalle.config import InputError
from diff_dalle.tracking.saver import SaverConfig
from diff_dalle.tracking.trackers import TrackingConfig, create_trackers
from diff_dalle.training.loop import TrainLoop
from diff_dalle.training.optim import OptimConfig
from diff_dalle.training.settings import TrainingConfig
from diff_dalle.training.trainee import Trainee


def make_loop(logdir, names=("unet0", "unet1"), ema=(0.9,), save_best=False, frozen=None, **settings):
    torch.manual_seed(0)
    defaults = {"batch_size": 8, "iterations": 8, "save_interval": 4, "eval_interval": 2, "precision": "fp32"}
    config = TrainingConfig(**{**defaults, **settings})
    run = open_run(str(logdir), Identity("toy", {}, None), TrainingConfig)
    run.begin()
    optim = OptimConfig(lr=1e-2, ema_rate=ema)
    trainees = [Trainee(ToyTask(), optim, "fp32", WORLD, name) for name in names]
    return TrainLoop(config, trainees, ToyData(8), run, WORLD, ToyData(8), 0, save_best, frozen)


class Keeper(ListTracker):
    """Keeps what is saved; calls ``then`` with each."""

    def __init__(self, then=lambda saved: None):
        super().__init__()
        self.saves, self.files, self.then, self.hurried = [], {}, then, False

    def saved(self, saved):
        self.saves.append(saved)
        for form, write in saved.forms.items():
            file = io.BytesIO()
            write(file)
            self.files[saved.step, form] = file.getvalue()
        self.then(saved)

    def hurry(self):
        self.hurried = True


def losses_by_step(tracker):
    return {
        step: sum(value for name, value in row.items() if name.endswith("held_out/loss")) / 2
        for step, row in tracker.rows
        if any("held_out/loss" in name for name in row)
    }


def test_trackers_learn_of_each_checkpoint(tmp_path):
    tracker = run(make_loop(tmp_path), Keeper())
    assert [(saved.step, saved.samples, saved.trainees) for saved in tracker.saves] == [
        (4, 32, ("unet0", "unet1")),
        (8, 64, ("unet0", "unet1")),
    ]
    means = losses_by_step(tracker)
    assert [saved.loss for saved in tracker.saves] == pytest.approx([means[4], means[8]])
    assert [saved.best for saved in tracker.saves] == [True, means[8] < means[4]]


def test_the_best_state_is_saved_wherever_it_occurs(tmp_path):
    """With save_best also between the regular checkpoints, each once, and never twice in one step."""
    tracker = run(make_loop(tmp_path, save_best=True, iterations=12), Keeper())
    means, lowest, best = losses_by_step(tracker), math.inf, []
    for step, loss in means.items():
        if loss < lowest:
            lowest = loss
            best.append(step)
    assert len(best) > 3 and [saved.step for saved in tracker.saves if saved.best] == best
    assert [saved.step for saved in tracker.saves] == sorted({*best, 4, 8, 12})
    assert read_run(str(tmp_path)).lowest_loss == lowest


def test_the_lowest_loss_outlives_the_session(tmp_path):
    first = run(make_loop(tmp_path, save_best=True, iterations=6), Keeper())
    loop = make_loop(tmp_path, save_best=True, iterations=6)
    assert loop.run_folder.lowest_loss == min(saved.loss for saved in first.saves)
    loop.evaluated_step, loop.loss = 6, loop.run_folder.lowest_loss
    assert not loop._is_best()
    loop.loss = math.nan
    assert not loop._is_best()


def test_without_an_evaluation_there_is_no_loss_and_no_best(tmp_path):
    tracker = run(make_loop(tmp_path, eval_interval=100, iterations=9), Keeper())
    assert [(saved.step, saved.loss is None, saved.best) for saved in tracker.saves[:2]] == [
        (4, True, False),
        (8, True, False),
    ]
    assert tracker.saves[2].best  # the last step is evaluated


def test_a_loss_of_an_earlier_step_is_not_this_one_s(tmp_path):
    tracker = run(make_loop(tmp_path, eval_interval=3, iterations=7), Keeper())
    assert [(saved.step, saved.best) for saved in tracker.saves] == [(4, False), (7, True)]
    assert tracker.saves[0].loss is not None


def test_a_run_goes_on_from_a_kept_checkpoint_bit_for_bit(tmp_path):
    """In a folder of its own, from the file alone."""
    run(make_loop(tmp_path / "whole"), Keeper())
    first = run(make_loop(tmp_path / "first", iterations=4), Keeper())
    (tmp_path / "kept.pth").write_bytes(first.files[4, "checkpoint"])
    assert restore_bundle(str(tmp_path / "kept.pth"), str(tmp_path / "second")) == 4
    loop = make_loop(tmp_path / "second")
    assert loop.step == 4
    run(loop, Keeper())
    assert hashes(tmp_path / "second") == hashes(tmp_path / "whole") and len(hashes(tmp_path / "whole")) == 12


def test_a_kept_model_holds_the_averages_of_all_networks(tmp_path):
    loop = make_loop(tmp_path, frozen={"unet2": torch.nn.Linear(2, 1)})
    (tmp_path / "m.pt").write_bytes(run(loop, Keeper()).files[8, "model"])
    content = load_file(str(tmp_path / "m.pt"))
    assert (content["role"], content["step"], content["samples"], content["trainee"]) == ("ema", 8, 64, "")
    for trainee in loop.trainees:
        for name, value in trainee.emas[0].state().items():
            assert torch.equal(content["state"][f"{trainee.name}.{name}"], value)
            assert not torch.equal(value, trainee.task.model.state_dict()[name])
    assert torch.equal(content["state"]["unet2.weight"], loop.saving.frozen["unet2"].weight)
    assert len(content["state"]) == 2 * 4 + 2


def test_without_averages_the_model_holds_the_weights_and_a_single_network_its_name(tmp_path):
    loop = make_loop(tmp_path, names=("unet1",), ema=())
    (tmp_path / "m.pt").write_bytes(run(loop, Keeper()).files[8, "model"])
    content = load_file(str(tmp_path / "m.pt"))
    assert (content["role"], content["trainee"]) == ("model", "unet1")
    for name, value in loop.trainees[0].task.model.state_dict().items():
        assert torch.equal(content["state"][name], value)


@pytest.mark.parametrize("names", [("unet0", "unet1"), ("unet1",)])
def test_a_kept_model_gives_the_first_weights_of_another_run(tmp_path, names):
    """All of its networks, or the one that is trained."""
    loop = make_loop(tmp_path / "old")
    (tmp_path / "m.pt").write_bytes(run(loop, Keeper()).files[8, "model"])
    new = make_loop(tmp_path / "new", names, init_checkpoint=(str(tmp_path / "m.pt"),))
    old = {trainee.name: trainee.emas[0].state() for trainee in loop.trainees}
    for trainee in new.trainees:
        for name, value in trainee.task.model.state_dict().items():
            assert torch.equal(value, old[trainee.name][name])


def test_a_saver_on_a_full_disk_saves_and_ends_the_run(tmp_path):
    def fail(saved):
        raise InputError("the disk is full")

    with pytest.raises(InputError, match="disk is full"):
        run(make_loop(tmp_path, iterations=100), Keeper(fail))
    assert [entry.step for entry in read_run(str(tmp_path)).checkpoints] == [4, 5]


def test_a_signal_tells_trackers_to_hurry(tmp_path):
    import signal

    from diff_dalle.distributed.launch import JobEnd

    tracker = Keeper(lambda saved: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(JobEnd):
        run(make_loop(tmp_path, iterations=100), tracker)
    assert tracker.hurried and tracker.finished
    assert not run(make_loop(tmp_path / "other"), Keeper()).hurried


# ---------------------------------------------------------------------------------------------------- in the background


class Held:
    """Holds up writes of a loop's folder until ``go``; ``steps`` of what has been written."""

    def __init__(self, loop, *names):
        self.go, self.steps = threading.Event(), []
        for name in names or ("save", "keep_best"):
            setattr(loop.run_folder, name, self._held(getattr(loop.run_folder, name), int(name == "keep_best")))

    def _held(self, call, number):
        def held(*arguments):
            assert self.go.wait(60)
            call(*arguments)
            self.steps.append(arguments[number])

        return held


def batches(count):
    return [batch for _, batch in zip(range(count), ToyData(8).batches(0), strict=False)]


def test_a_checkpoint_is_of_the_moment_of_saving(tmp_path):
    """However late it is written: weights, averages, optimizer and files beside them."""

    def exports(trainee, state):
        return {"export.pt": lambda file: torch.save(dict(state), file)}

    names = None
    for folder, waits in (("late", False), ("now", True)):
        loop = make_loop(tmp_path / folder, save_best=True)
        loop.saving.exports = exports
        held = Held(loop)
        loop.update(batches(1)[0])
        if waits:
            held.go.set()
        loop.saving.keep_best(loop.trainees[0], 1, 8, 0.5)
        loop.save()
        if waits:
            loop.saving.finish()
        for batch in batches(3):
            loop.update(batch)
        held.go.set()
        loop.saving.finish()
        found = hashes(tmp_path / folder)
        names = names or found
        assert found == names and len(found) == 9


def test_training_goes_on_while_a_checkpoint_is_written_and_the_next_one_waits(tmp_path):
    """One copy at most: what one step saves shares it, and a later step's save waits for it."""
    loop = make_loop(tmp_path)
    held = Held(loop)
    first, second = batches(2)
    loop.update(first)
    loop.saving.keep_best(loop.trainees[0], 1, 8, 0.5)
    snapshot = loop.saving._snapshot()
    copies = len(snapshot._copies)
    loop.save()
    assert loop.saving._snapshot() is snapshot and len(snapshot._copies) > copies
    states = [state.untyped_storage()._cdata for state in loop.trainees[0].emas[0].averages.values()]
    assert set(states) <= set(snapshot._copies)
    del snapshot
    loop.update(second)
    waiting = threading.Thread(target=loop.save)
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive() and held.steps == [] and read_run(str(tmp_path)).checkpoints == []
    held.go.set()
    waiting.join(60)
    loop.saving.finish()
    assert held.steps == [1, 1, 2] and loop.saving._snapshot() is None
    assert [entry.step for entry in read_run(str(tmp_path)).checkpoints] == [1, 2]


def test_the_best_weights_are_compared_with_those_that_are_being_written(tmp_path):
    loop = make_loop(tmp_path)
    held = Held(loop)
    loop.saving.keep_best(loop.trainees[0], 1, 8, 0.5)
    later = threading.Thread(target=loop.saving.keep_best, args=(loop.trainees[0], 2, 16, 0.6))
    later.start()
    later.join(0.2)
    held.go.set()
    later.join(60)
    loop.saving.finish()
    assert held.steps == [1] and read_run(str(tmp_path)).best == {"unet0": {"step": 1, "loss": 0.5}}


def test_the_last_checkpoint_is_waited_for(tmp_path):
    loop = make_loop(tmp_path, iterations=4)
    held = Held(loop)
    timer = threading.Timer(0.3, held.go.set)
    timer.start()
    loop.run(ListTracker())
    assert held.steps == [4] and [entry.step for entry in read_run(str(tmp_path)).checkpoints] == [4]


def test_a_run_that_breaks_waits_for_what_it_has_saved(tmp_path):
    loop = make_loop(tmp_path, iterations=100)
    held, update = Held(loop), loop.update

    def broken(batch):
        if loop.step == 5:
            threading.Timer(0.3, held.go.set).start()
            raise RuntimeError("a bug")
        update(batch)

    loop.update = broken
    with pytest.raises(RuntimeError, match="a bug"):
        loop.run(ListTracker())
    assert held.steps == [4]


@pytest.mark.parametrize("last", [False, True])
def test_a_failure_in_the_background_ends_the_run(tmp_path, last):
    """At the next step, after another attempt; that of the last checkpoint at the end."""
    loop = make_loop(tmp_path, iterations=4 if last else 1000)
    save, failed = loop.run_folder.save, []

    def full(step, *rest):
        if not failed:
            failed.append(step)
            raise InputError("the disk is full")
        save(step, *rest)

    loop.run_folder.save = full
    with pytest.raises(InputError, match="the disk is full"):
        loop.run(ListTracker())
    found = [entry.step for entry in read_run(str(tmp_path)).checkpoints]
    assert failed == [4] and found == ([] if last else [loop.step]) and loop.step < 100


def test_a_failure_is_not_lost_on_a_saver_that_waits_for_it(tmp_path):
    """One of a service, whose own failures are only noted."""
    loop = make_loop(tmp_path, iterations=4)

    def full(step, *rest):
        raise InputError("the disk is full")

    class Service(ListTracker):
        def saved(self, saved):
            with pytest.raises(InputError, match="the disk is full"):
                saved.forms["checkpoint"](io.BytesIO())

    loop.run_folder.save = full
    with pytest.raises(InputError, match="the disk is full"):
        loop.run(Service())


def test_old_checkpoints_stay_until_the_new_one_is_whole(tmp_path):
    loop = make_loop(tmp_path, keep_checkpoints=1)
    first, second = batches(2)
    loop.update(first)
    loop.save()
    loop.saving.finish()
    before = set(hashes(tmp_path))
    held = Held(loop)
    loop.update(second)
    loop.save()
    assert set(hashes(tmp_path)) == before and [entry.step for entry in read_run(str(tmp_path)).checkpoints] == [1]
    held.go.set()
    loop.saving.finish()
    assert [entry.step for entry in read_run(str(tmp_path)).checkpoints] == [2]
    assert not before & set(hashes(tmp_path))


def test_the_lowest_loss_is_recorded_with_its_checkpoint(tmp_path):
    """Not before: a run killed meanwhile would take a state that it lost for the best."""
    loop = make_loop(tmp_path)
    best, checkpoint = Held(loop, "keep_best"), Held(loop, "save")
    loop.update(batches(1)[0])
    loop.evaluated_step, loop.loss = 1, 0.25
    loop.saving.keep_best(loop.trainees[0], 1, 8, 0.25)
    loop.save()
    assert not loop._is_best()
    best.go.set()
    while not best.steps:
        time.sleep(0.01)
    found = read_run(str(tmp_path))
    assert found.best and found.lowest_loss is None
    checkpoint.go.set()
    loop.saving.finish()
    assert read_run(str(tmp_path)).lowest_loss == 0.25


def test_savers_in_a_run(tmp_path):
    """A local latest and best next to the log directory, named after what was trained."""
    savers = (
        SaverConfig(save_latest_to=str(tmp_path / "latest.pth")),
        SaverConfig(save_best_to=str(tmp_path / "best_{unet}_{epoch}.pt"), save_type="model"),
    )
    loop = make_loop(tmp_path / "run", save_best=True)
    run(loop, create_trackers(TrackingConfig(("log",), savers=savers), str(tmp_path / "run"), {}, epoch_samples=64))
    assert restore_bundle(str(tmp_path / "latest.pth"), str(tmp_path / "new")) == 8
    assert load_file(str(tmp_path / "best_0-1_1.pt"))["step"] == 8
    assert load_file(str(tmp_path / "best_0-1_0.pt"))["step"] < 8
