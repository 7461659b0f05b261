"""The state in which a run starts: damaged checkpoints, changed data and batches, files to start from."""

import json
import os

import pytest
import torch
from test_loop import OPTIM, make_loop
from toy import WORLD, ToyTask, run, weights

from diff_dalle.checkpoints.checkpoint import Identity
from diff_dalle.checkpoints.run_folder import open_run
from diff_dalle.config import InputError
from diff_dalle.data.fingerprint import Fingerprint
from diff_dalle.diffusion.diffusion_config import DiffusionConfig, create_gaussian_diffusion
from diff_dalle.diffusion.resample import TimestepConfig, create_named_schedule_sampler
from diff_dalle.training.optim import OptimConfig
from diff_dalle.training.restoring import Start
from diff_dalle.training.settings import TrainingConfig
from diff_dalle.training.trainee import Trainee

# ------------------------------------------------------------------------------------------------ damaged checkpoints


def truncate(path):
    path.write_bytes(path.read_bytes()[:-100])


def make_folder(path):
    path.unlink()
    path.mkdir()


def make_wrong(path):
    content = torch.load(path, weights_only=True)
    torch.save({**content, "step": "x"}, path)


DAMAGE = {
    "missing": os.unlink,
    "truncated": truncate,
    "folder": make_folder,
    "wrong": make_wrong,
    "empty": lambda p: p.write_bytes(b""),
}


@pytest.mark.parametrize("name", ["model000008.pt", "ema_0.99_000008.pt", "opt000008.pt"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path, capsys, name, damage):
    """Both are named, and nothing of the damaged one is kept: the run ends as if killed before it."""
    run(make_loop(tmp_path, iterations=8))
    DAMAGE[damage](tmp_path / name)
    resumed = make_loop(tmp_path)
    said = capsys.readouterr().out
    assert resumed.step == 4 and "the checkpoint of step 8 cannot be used" in said and name in said
    assert "falling back to that of step 4" in said
    if damage == "folder":
        (tmp_path / name).rmdir()
    run(resumed)
    whole = make_loop(tmp_path / "whole")
    run(whole)
    assert torch.equal(weights(resumed.trainees[0]), weights(whole.trainees[0]))
    assert [entry["step"] for entry in json.loads((tmp_path / "run.json").read_text())["checkpoints"]] == [4, 8, 10]


def test_a_run_never_starts_again_by_itself(tmp_path):
    run(make_loop(tmp_path, iterations=8))
    for step in ("04", "08"):
        truncate(tmp_path / f"opt0000{step}.pt")
    record = (tmp_path / "run.json").read_text()
    with pytest.raises(InputError, match=r"holds no checkpoint that .*opt000008.*; .*opt000004.*another logdir"):
        make_loop(tmp_path)
    assert (tmp_path / "run.json").read_text() == record


def test_a_changed_bit_is_damage(tmp_path, capsys):
    """Of a value: the archive is whole."""
    run(make_loop(tmp_path, iterations=8))
    path = tmp_path / "model000008.pt"
    data = bytearray(path.read_bytes())
    data[data.index(weights_bytes(path))] ^= 1
    path.write_bytes(data)
    assert make_loop(tmp_path).step == 4 and "checksum" in capsys.readouterr().out


def weights_bytes(path) -> bytes:
    """A value as it lies in the file."""
    state = torch.load(path, weights_only=True)["state"]
    return next(value for value in state.values() if value.is_floating_point()).numpy().tobytes()


def test_a_lost_record_is_named_and_nothing_starts_again(tmp_path):
    """A run that was killed before its first checkpoint starts again, also after one file of it was written."""
    run(make_loop(tmp_path, iterations=4))
    record = (tmp_path / "run.json").read_text()
    (tmp_path / "run.json").unlink()
    with pytest.raises(InputError, match=r"holds opt000004.pt of a run, but no run.json, .*restore it"):
        make_loop(tmp_path)
    empty = {**json.loads(record), "checkpoints": [], "best": {}}
    (tmp_path / "run.json").write_text(json.dumps(empty))
    assert make_loop(tmp_path).step == 0


def test_another_network_is_not_damage(tmp_path):
    """It is refused at once: an earlier checkpoint would not fit either."""
    run(make_loop(tmp_path, iterations=8))
    task = ToyTask()
    task.model = torch.nn.Linear(12, 1)
    with pytest.raises(InputError, match="model000008.pt does not fit this model"):
        make_loop(tmp_path, task=task)


def test_a_wrong_optimizer_is_refused_before_anything_is_loaded(tmp_path):
    run(make_loop(tmp_path, iterations=4))
    path = tmp_path / "opt000004.pt"
    content = torch.load(path, weights_only=True)
    content["state"]["optimizer"]["state"][0]["exp_avg"] = torch.ones(3)
    torch.save(content, path)
    with pytest.raises(
        InputError, match=r"opt000004\.pt does not fit this run: its state\.optimizer\.state\[0\]\.exp_avg"
    ) as error:
        make_loop(tmp_path)
    assert "settings" not in str(error.value)  # they are the same


def test_moments_in_another_layout_are_those_of_the_same_places():
    """Fused AdamW reads parameters and moments in the order of their memory."""

    def updated(change):
        torch.manual_seed(0)
        task = ToyTask()
        task.model = torch.nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)
        optimization = Trainee(task, OPTIM, "fp32", WORLD).optimizations[""]
        optimization.begin(10)
        for parameter in optimization.parameters:
            parameter.grad = torch.randn_like(parameter)
        optimization.optimizer.step()
        optimization.load_state(change(optimization.state()))
        optimization.optimizer.step()
        return task.model.weight.detach()

    def contiguous(state):
        moments = {
            i: {name: value.contiguous() for name, value in entry.items()}
            for i, entry in state["optimizer"]["state"].items()
        }
        return {**state, "optimizer": {**state["optimizer"], "state": moments}}

    assert torch.equal(updated(lambda state: state), updated(contiguous))


# -------------------------------------------------------------------------------------------------------- where from


def test_the_same_command_resumes_what_it_began(tmp_path, monkeypatch):
    """With --resume_checkpoint, killed and repeated: the log directory's own checkpoints, which are newer."""
    run(make_loop(tmp_path / "a", iterations=4))
    command = {"resume_checkpoint": str(tmp_path / "a" / "model000004.pt")}
    run(make_loop(tmp_path / "b", iterations=8, **command))
    assert make_loop(tmp_path / "b", iterations=8, **command).step == 8
    assert make_loop(tmp_path / "b", iterations=8).step == 8
    monkeypatch.chdir(tmp_path)
    assert make_loop(tmp_path / "b", resume_checkpoint="a/model000004.pt").step == 8


@pytest.mark.parametrize("flag", ["resume_checkpoint", "init_checkpoint"])
def test_a_checkpoint_beside_other_checkpoints_is_refused(tmp_path, flag):
    run(make_loop(tmp_path / "a", iterations=4))
    run(make_loop(tmp_path / "b", iterations=4))
    path = str(tmp_path / "a" / "model000004.pt")
    given = {flag: path if flag == "resume_checkpoint" else (path,)}
    with pytest.raises(
        InputError, match=rf"{flag} is .*model000004\.pt, but .*b holds a run that started from its own"
    ):
        make_loop(tmp_path / "b", **given)
    run(make_loop(tmp_path / "c", iterations=8, **given))
    other = given[flag][:-1] + "x" if flag == "resume_checkpoint" else (str(tmp_path / "b" / "model000004.pt"),)
    with pytest.raises(InputError, match=r"c holds a run that started from .*a/model000004\.pt"):
        make_loop(tmp_path / "c", **{flag: other})
    assert make_loop(tmp_path / "c", **given).step == 8


def test_a_record_that_does_not_say_where_from_is_resumed_with_a_note(tmp_path, capsys):
    run(make_loop(tmp_path, iterations=4))
    record = json.loads((tmp_path / "run.json").read_text())
    del record["started_from"]
    (tmp_path / "run.json").write_text(json.dumps(record))
    assert make_loop(tmp_path, resume_checkpoint="elsewhere/model000002.pt").step == 4
    assert "Note: resume_checkpoint is not read" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------- changed batch and data


def test_a_changed_global_batch_needs_consent(tmp_path, capsys):
    run(make_loop(tmp_path, iterations=4))
    with pytest.raises(
        InputError, match="8 samples per step, but now a step has 4, those of 1 process: set batch_size .*by accept_ch"
    ):
        make_loop(tmp_path, batch_size=4)
    loop = make_loop(tmp_path, batch_size=4, iterations=6, accept_changed_batch=True)
    assert "from here on a step has 4 samples instead of 8" in capsys.readouterr().out
    run(loop)
    assert make_loop(tmp_path, batch_size=4).step == 6  # the change is accepted once


ROWS = ((f"{i}.tar", 100, 10) for i in range(3))
DATA = Fingerprint(tuple(ROWS))
MORE = Fingerprint((*DATA.rows, ("3.tar", 50, 5)))


def start(folder, data, accept=False, **options):
    """Restore in a log directory whose shards are now ``data``."""
    settings = {"batch_size": 8, "precision": "fp32", "accept_changed_data": accept, **options}
    config = TrainingConfig(**settings)
    found = open_run(str(folder), Identity("toy", {"lr": OPTIM.lr, "iterations": 4}), OptimConfig)
    found.data = data
    begun = Start(config, [Trainee(ToyTask(), OPTIM, "fp32", WORLD)], found, WORLD)
    begun.restore()
    return begun


@pytest.fixture
def trained(tmp_path):
    """A run that knows its data."""
    loop = make_loop(tmp_path / "run", iterations=4)
    loop.run_folder.data = {"data_dir": DATA, "val_data_dir": DATA}
    run(loop)
    return tmp_path / "run"


def test_the_same_data_resume_silently(trained, capsys):
    assert start(trained, {"data_dir": DATA, "val_data_dir": DATA}).step == 4
    assert "Note" not in capsys.readouterr().out


def test_changed_data_need_consent(trained, capsys):
    with pytest.raises(
        InputError, match=r"data_dir differs from .*step 4.*: 1 shard new \(3\.tar\).*by accept_changed_data"
    ):
        start(trained, {"data_dir": MORE})
    accepted = start(trained, {"data_dir": MORE}, accept=True)
    assert accepted.step == 4 and "Note: data_dir differs" in capsys.readouterr().out
    accepted.run.batch = 8
    accepted.run.save(6, 48, accepted.trainees[0].states())
    assert start(trained, {"data_dir": MORE}).step == 6  # the checkpoint knows the new data
    assert len(list(trained.glob("data-*.jsonl"))) == 2


def test_changed_held_out_data_are_said(trained, capsys):
    assert start(trained, {"data_dir": DATA, "val_data_dir": MORE}).step == 4
    assert "Note: val_data_dir differs from step 4 of" in capsys.readouterr().out


@pytest.mark.parametrize("text", [None, "", "x", "[1]\n", '["0.tar", 1, 2]\n'])
def test_without_the_list_the_totals_are_named(trained, text):
    (path,) = trained.glob("data-*.jsonl")
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(InputError, match="3 shards with 30 samples before, 4 shards with 35 samples now"):
        start(trained, {"data_dir": MORE})


def test_a_start_from_another_folders_run_says_that_the_data_are_others(trained, tmp_path, capsys):
    path = str(trained / "model000004.pt")
    assert start(tmp_path / "next", {"data_dir": MORE}, batch_size=2, resume_checkpoint=path).step == 4
    out = capsys.readouterr().out
    assert "1 shard new" in out and "a step has 2 samples instead of 8" in out


def test_runs_of_earlier_versions_know_neither_data_nor_batch(trained):
    record = json.loads((trained / "run.json").read_text())
    for entry in record["checkpoints"]:
        del entry["data"], entry["batch"]
    (trained / "run.json").write_text(json.dumps(record))
    assert start(trained, {"data_dir": MORE}, batch_size=2).step == 4


# ------------------------------------------------------------------------------------------------- another task's state


def begin(folder, sampler, **settings):
    """Restore a run with this timestep sampler."""
    task = ToyTask()
    process = create_gaussian_diffusion(DiffusionConfig(diffusion_steps=20))
    task.extra_state = create_named_schedule_sampler(sampler, process).state_dict
    found = open_run(str(folder), Identity("toy", {"schedule_sampler": sampler}), TimestepConfig)
    trainee = Trainee(task, OPTIM, "fp32", WORLD)
    begun = Start(TrainingConfig(batch_size=8, **settings), [trainee], found, WORLD)
    begun.restore()
    return begun


@pytest.mark.parametrize("samplers", [("uniform", "loss-second-moment"), ("loss-second-moment", "uniform")])
def test_another_timestep_sampler_is_refused_by_name(tmp_path, samplers):
    """It would start without statistics, or drop them."""
    then, now = samplers
    first = begin(tmp_path / "a", then)
    first.run.batch = 8
    first.run.save(4, 32, first.trainees[0].states())
    path = str(tmp_path / "a" / "model000004.pt")
    with pytest.raises(
        InputError,
        match=rf'opt000004\.pt does not fit .*: schedule_sampler \("{then}" → "{now}"\): give .*by init_checkpoint',
    ):
        begin(tmp_path / "b", now, resume_checkpoint=path)
    assert begin(tmp_path / "c", then, resume_checkpoint=path).step == 4
    assert begin(tmp_path / "d", now, init_checkpoint=(path,)).step == 0
