"""Runs that start from another run's checkpoint, and runs that are resumed, with other settings than before."""

import json
import re
from pathlib import Path

import pytest
import torch
from cascade_file_making import run as run_cascade
from decoder_file_making import UNET, make_world, read_run_file, write_file
from tiny_settings import GENERATOR_RUN, flags

from diff_dalle.checkpoints.checkpoint import load_file
from diff_dalle.commands.command_line import parse
from diff_dalle.config import InputError, leaves
from diff_dalle.distributed.world import ALONE
from diff_dalle.recipes.cascade.stages import StageCRun
from diff_dalle.recipes.classifier import ClassifierRun
from diff_dalle.recipes.decoder import DecoderRun
from diff_dalle.recipes.generator import GeneratorRun
from diff_dalle.recipes.train import train_recipe
from diff_dalle.training.loop import TrainLoop

TWO = [("decoder.unets", [UNET, UNET]), ("decoder.image_sizes", [8, 16]), ("train.n_sample_images", 0)]
KID = {"feature": "eval_making:quarters", "subset_size": 9}
EPOCH = ("train.epochs", 1)
AUTO = ("tracker.log", {"log_type": "console", "auto_resume": True})


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return make_world(tmp_path_factory.mktemp("shards"))


@pytest.fixture(autouse=True)
def working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def work(folder: Path, world: str, *changes) -> Path:
    """Train as a file in a folder says; returns the run's folder."""
    folder.mkdir(exist_ok=True)
    train_recipe(read_run_file(write_file(folder, *changes, world=world)).recipe(), ALONE)
    return folder / "run"


def load(path) -> tuple[str, dict]:
    return "tracker.load", {"load_from": "local", "file_path": str(path)}


@pytest.fixture(scope="module")
def kept(tmp_path_factory, world):
    """The checkpoint of a run of three steps, of one epoch."""
    folder = tmp_path_factory.mktemp("kept")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        work(folder, world, EPOCH)
    return folder / "latest.pth"


def state(folder: Path, name: str, step: int) -> dict:
    return load_file(str(folder / f"{name}{step:06d}.pt"), ("model", "ema", "optimizer"))["state"]


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


EDITED = {
    "train.lr": 5e-4, "train.wd": 0.2, "train.max_grad_norm": None, "train.ema_beta": 0.9, "decoder.loss_type": "l1",
    "data.preprocessing": {"CenterCrop": {"size": 12}, "ToTensor": True}, "decoder.sample_timesteps": 3, "seed": 4,
    "data.splits": {"train": 0.75, "val": 0.25, "test": 0}, "decoder.image_cond_drop_prob": 0.3,
}  # fmt: skip


def test_a_start_takes_the_state_from_the_checkpoint_and_the_settings_from_the_file(tmp_path, world, kept, capsys):
    run = work(tmp_path / "next", world, load(kept), *EDITED.items(), ("train.save_every_n_samples", 1))
    out = capsys.readouterr().out
    assert f"Starting at step 3 (12 samples) of {kept}" in out
    rows = {row[0]: row[1:] for line in out.splitlines() if len(row := [*map(str.strip, line.split("|"))][1:-1]) == 3}
    assert (
        rows["train.lr"] == ["[0.001]", "[0.0005]"]
        and rows["seed"] == ["0", "4"]
        and rows["train.epochs"] == ["1", "2"]
    )
    assert {"train.wd", "train.ema_beta", "decoder.loss_type", "data.splits.train", "decoder.sample_timesteps"} <= {
        *rows
    }
    assert "Note: ema_0.989519 of unet0 starts from ema_0.998995 of step 3" in out
    assert "Note: data_dir differs from step 3" in out
    group = state(run, "unet0_opt", 8)["optimizer"]["param_groups"][0]
    assert group["weight_decay"] == 0.2 and state(run, "unet0_opt", 8)["optimizer"]["state"][0]["step"] == 8
    assert not (run / "loaded").exists() and (run / "progress.csv").read_text().count("\n") < 9  # a history of its own
    again = work(tmp_path / "next", world, load(kept), *EDITED.items(), AUTO)  # which is complete
    assert again == run and "nothing is left to train after step 8: raise train.epochs" in capsys.readouterr().out


def test_a_run_that_only_moves_goes_on_bit_for_bit_with_its_history(tmp_path, world, kept):
    run, whole = work(tmp_path / "moved", world, load(kept)), work(tmp_path / "whole", world)
    for name in ("unet0_model", "unet0_ema_0.998995_"):
        moved, plain = state(run, name, 5), state(whole, name, 5)
        assert all(torch.equal(moved[key], plain[key]) for key in plain)
    steps = [json.loads(line)["step"] for line in (run / "progress.jsonl").read_text().splitlines()]
    assert {1, 2, 3, 4, 5} <= {*steps}


@pytest.mark.slow
def test_unets_are_trained_one_after_the_other_from_checkpoints(tmp_path, world, capsys):
    """The first, the second beside it, and then both: each checkpoint has all that is known."""

    def turn(name: str, mask: list[bool], *changes) -> Path:
        own = ("tracker.save", {"save_to": "local", "save_latest_to": f"{name}.pth"})
        return work(tmp_path / name, world, *TWO, EPOCH, own, ("train.unet_training_mask", mask), *changes)

    first = turn("first", [True, False])
    second = turn("second", [False, True], load("first.pth"))
    assert "the checkpoint has no unet1, which starts from its initial weights" in (out := capsys.readouterr().out)
    assert "Starting at step 0 (0 samples) of first.pth" in out and "unet_training_mask" in out
    frozen, averaged = state(second, "unet0_model", 3), state(first, "unet0_ema_0.998995_", 3)
    assert all(torch.equal(frozen[name], averaged[name]) for name in averaged)
    Path("first.pth").unlink()  # its own checkpoint has the U-Net that is not trained
    resumed = turn("second", [False, True], load("first.pth"), AUTO, ("train.epochs", 2))
    assert all(torch.equal(state(resumed, "unet0_model", 5)[name], averaged[name]) for name in averaged)
    both = turn("both", [True, True], load("second.pth"), ("train.epochs", 3))
    out = capsys.readouterr().out
    assert "Note: the checkpoint has only weights of unet0, whose optimizer starts anew" in out
    assert "Starting at step 5" in out and (both / "unet0_opt000008.pt").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ([("decoder.unets", [{**UNET, "dim": 16}])], r"decoder.unets\[0\].dim \(8 → 16\)"),
        ([("decoder.learned_variance", False)], r"decoder.learned_variance \(\[true\] → \[false\]\)"),
        ([("data.webdataset_base_url", "nowhere/{}.tar")], "there is no folder nowhere"),
        (
            [("evaluate", {"n_evaluation_samples": 9, "KID": {"feature": "eval_making:quarters", "subset_size": 9}})],
            "KID",
        ),
    ],
)
def test_a_refused_start_leaves_no_trace(tmp_path, world, kept, changes, words):
    (tmp_path / "next").mkdir()
    before = files(tmp_path)
    with pytest.raises(InputError, match=words):
        work(tmp_path / "next", world, load(kept), *changes)
    assert files(tmp_path) == before | {"next/decoder.json"}
    work(tmp_path / "next", world, EPOCH)  # not the other run
    assert state(tmp_path / "next/run", "unet0_opt", 3)["optimizer"]["state"][0]["step"] == 3


def test_a_run_is_recorded_before_its_first_checkpoint(tmp_path, world, monkeypatch):
    def fail(loop, tracker):
        raise InputError("the disk is gone")

    monkeypatch.setattr(TrainLoop, "run", fail)
    with pytest.raises(InputError, match="gone"):
        work(tmp_path / "next", world)
    assert json.loads((tmp_path / "next" / "run" / "run.json").read_text())["checkpoints"] == []


def test_a_run_that_is_refused_does_not_replace_another(tmp_path, world, kept):
    run = work(tmp_path / "run_of_mine", world, EPOCH)
    before = files(run)
    replace = ("tracker.overwrite_data_path", True)
    with pytest.raises(InputError, match="nowhere"):
        work(tmp_path / "run_of_mine", world, replace, ("data.webdataset_base_url", "nowhere/{}.tar"))
    assert files(run) == before


def test_resuming_allows_what_cannot_change_the_past(tmp_path, world, capsys):
    run = work(tmp_path / "run_of_mine", world, EPOCH)
    allowed = {
        "train.lr": 1e-4,
        "train.wd": 0.1,
        "train.warmup_steps": 2,
        "decoder.sample_timesteps": 3,
        "train.epochs": 2,
    }
    work(tmp_path / "run_of_mine", world, AUTO, *allowed.items())
    out = capsys.readouterr().out
    assert "Resuming at step 3" in out and "| [0.001]" in out and "| train.epochs" in out
    before = files(run)
    for name, value, words in (
        ("seed", 1, r"seed \(0 → 1\)"),
        ("train.ema_beta", 0.9, r"train.ema_beta \(\[0.99\] → \[0.9\]\)"),
        ("decoder.loss_type", "l1", r"loss_type \(\[\"l2\"\] → \[\"l1\"\]\)"),
    ):
        with pytest.raises(InputError, match=words + ".* where a run can start from its checkpoint: tracker.load"):
            work(tmp_path / "run_of_mine", world, AUTO, *allowed.items(), (name, value))
    assert files(run) == before


def of_generator(folder: Path, world: str, **changed) -> None:
    given = {
        "data_dir": Path(world).parent,
        "logdir": folder / "run",
        "iterations": 2,
        "batch_size": 4,
        "num_workers": 0,
    }
    run = parse(GeneratorRun, flags({**GENERATOR_RUN, **given, **changed}))
    train_recipe(run.recipe(), ALONE)


def of_cascade(folder: Path, world: str, **changed) -> None:
    named = {"lr": "lr", "seed": "loop.seed", "iterations": "updates", "resume_checkpoint": "loop.resume_checkpoint"}
    named |= {"num_channels": "model.width"}
    given = {"updates": 2, "loop.preview_samples": 0, **{named[key]: value for key, value in changed.items()}}
    run_cascade("stage_a", folder, str(Path(world).parent), *given.items())


@pytest.mark.parametrize("system", [of_generator, of_cascade])
def test_flags_and_yaml_start_and_resume_alike(tmp_path, world, capsys, system):
    system(tmp_path / "first", world)
    path = str(tmp_path / "first" / "run" / "model000002.pt")
    capsys.readouterr()
    system(tmp_path / "next", world, resume_checkpoint=path, seed=3, lr=1e-4, iterations=3)
    out = capsys.readouterr().out
    assert "Starting at step 2 (8 samples) of" in out and "Trained for 3 steps" in out
    assert re.search(r"\| (loop.)?seed +\| 0 +\| 3 ", out) and re.search(r"\| lr +\|.* 0.0001 ", out)
    system(tmp_path / "next", world, resume_checkpoint=path, seed=3, lr=1e-5, iterations=4)
    out = capsys.readouterr().out
    assert "Resuming at step 3" in out and re.search(r"\| lr +\| 0.0001 +\| 1e-05 ", out) and "seed" not in out
    rows = map(json.loads, (tmp_path / "next" / "run" / "progress.jsonl").read_text().splitlines())
    assert {row["step"]: row["lr"] for row in rows if "lr" in row} == pytest.approx({3: 1e-4, 4: 1e-5})
    before = files(tmp_path)
    with pytest.raises(InputError, match=r"seed \(3 → 4\)"):
        system(tmp_path / "next", world, resume_checkpoint=path, seed=4, iterations=5)
    with pytest.raises(InputError, match=r"(num_channels|width) \(\d+ → 24\)"):
        system(tmp_path / "larger", world, resume_checkpoint=path, num_channels=24, iterations=5)
    assert {name for name in files(tmp_path) - before if not name.endswith(".yaml")} <= {"larger"}


FREE = {
    "rates": (
        {"lr", "warmup_steps", "weight_decay", "lr_anneal", "grad_clip", "adam_beta2"},
        {"lr", "wd", "warmup_steps", "cosine_decay_max_steps", "max_grad_norm"},
        {"lr", "warmup_updates", "weight_decay", "lr_anneal", "grad_clip", "adam_beta2"},
    ),
    "limits": ({"iterations", "samples", "hours"}, {"epochs", "epoch_samples", "hours"}, {"updates", "hours"}),
    "logging and saving": (
        {"log_interval", "save_interval", "trackers", "keep_checkpoints"},
        {"log_interval", "save_every_n_samples", "log", "save", "keep_checkpoints"},
        {"log_interval", "save_every", "backup_every", "wandb_project", "keep_checkpoints"},
    ),
}
FIXED = (
    {"seed", "ema_rate", "optimizer", "noise_schedule", "loss_type", "num_channels"},
    {"seed", "ema_beta", "unet_training_mask", "timesteps", "loss_type", "preprocessing", "train"},
    {"seed", "ema_beta", "image_size", "loss_weighting"},
)


@pytest.mark.parametrize(("system", "run_class"), [(0, GeneratorRun), (1, DecoderRun), (2, StageCRun)])
def test_the_rule_is_the_same_for_all_systems(system, run_class):
    free = {leaf.path[-1] for leaf in leaves(run_class) if leaf.free}
    fixed = {leaf.path[-1] for leaf in leaves(run_class) if not leaf.free}
    for names in FREE.values():
        assert names[system] <= free - fixed
    assert FIXED[system] <= fixed


def test_all_settings_of_previews_are_free():
    previews = [leaf for leaf in leaves(GeneratorRun) if leaf.path[0] == "preview"]
    assert len(previews) > 10 and all(leaf.free for leaf in previews)


def test_a_classifier_has_the_rule_of_a_generator():
    """Where both have a setting, whatever its default."""
    rules = ({leaf.path: leaf.free for leaf in leaves(each)} for each in (GeneratorRun, ClassifierRun))
    one, other = rules
    assert {path for path in one.keys() & other.keys() if one[path] != other[path]} == set()
