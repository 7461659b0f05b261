"""Sharded training by the commands, as users run it: two processes with previews and evaluation, then one."""

import os

import pytest
import torch
import yaml
from cascade_file_making import COMMON, frozen_of, make_frozen
from cascade_file_making import make_world as make_pictures
from cascade_file_making import write_file as write_cascade
from checkpoint_making import make_file
from control_making import flags_of, train_controlnet
from control_making import make_pictures as make_controls
from decoder_file_making import UNET
from decoder_file_making import make_world as make_embedded
from decoder_file_making import write_file as write_decoder
from marks import slow
from ranks import run_ranks_of
from script_running import losses, run, train, training_flags
from shard_making import make_shards
from tiny_settings import TRANSFORMER

from diff_dalle.checkpoints.checkpoint import load_file
from diff_dalle.checkpoints.shards import consolidate

TRAINED = """
from diff_dalle.commands.command_line import parse
from diff_dalle.commands.training_kinds import parse_cascade, parse_controlnet
from diff_dalle.distributed.parallel import is_sharded
from diff_dalle.recipes.classifier import ClassifierRun
from diff_dalle.recipes.decoder import DecoderRun
from diff_dalle.recipes.generator import GeneratorRun
from diff_dalle.recipes.recipe import Session
from diff_dalle.recipes.recipe import spelled_as_in_file
from diff_dalle.recipes.train import train_recipe
from diff_dalle.tasks.control import BASE

build = Session.trainees

def trainees(session, shown):
    found = build(session, shown)
    for each in found:
        networks = each.task.model, *(each.task.companions[name] for name in each.task.companions if name == BASE)
        assert all(is_sharded(each) or not each.dim() for network in networks for each in network.parameters())
    return found

os.chdir({folder!r})
run = {kind}({flags!r}) if {kind!r}.startswith("parse") else parse({kind}, {flags!r})
try:
    with mock.patch.object(Session, "trainees", trainees), spelled_as_in_file(type(run)):
        train_recipe(run.recipe(world.size), world)
except InputError as error:
    world.print("error:", error)
"""


def train_on_two(folder, kind, *flags):
    """The command of a kind, by its class or by the function that reads its flags; its output."""
    return run_ranks_of(2, TRAINED.format(folder=str(folder), kind=kind, flags=[*map(str, flags)]))


def make_data(folder):
    folder.mkdir()
    return make_shards(folder, [8, 8])


@pytest.mark.parametrize("network", [{}, slow(TRANSFORMER)], ids=["unet", "transformer"])
def test_a_generator_from_shards_to_pictures(tmp_path, network):
    """Sharded over two processes, made ordinary files of, sampled from, and resumed by one; with the losses of one."""
    data, folder = make_data(tmp_path / "shards"), tmp_path / "run"
    settings = {
        "save_interval": 2,
        "sample_interval": 2,
        "preview_samples": 2,
        "preview_steps": 2,
        "val_data_dir": data,
        "eval_interval": 2,
        **network,
    }
    train(tmp_path / "one", data, iterations=4, batch_size=4, microbatch=2, **settings)
    train(folder, data, ranks=2, iterations=2, batch_size=2, microbatch=1, parallel="fsdp", keep_best=True, **settings)
    assert sorted(os.listdir(folder / "sharded000002")) == ["index.pt", "rank00000.bin", "rank00001.bin"]
    run("consolidate.py", "--model_path", folder / "sharded000002")
    path = folder / "ema_0.9_000002.pt"
    assert load_file(str(path))["step"] == load_file(str(folder / "best.pt"))["step"] == 2
    flags = ("--steps", 4, "--device", "cpu", "--num_samples", 2, "--logdir", tmp_path / "images")
    run("sample.py", "--model_path", path, "--prompts", "caption of 3", *flags)
    resumed = train(folder, data, iterations=4, batch_size=4, microbatch=2, **settings)
    assert "Resuming at step 2" in resumed.stdout and (folder / "model000004.pt").exists()
    for name in ("loss", "held_out/loss"):
        expected, found = losses(tmp_path / "one", name), losses(folder, name)
        assert found.keys() == expected.keys()
        assert all(abs(loss - expected[step]) <= 1e-5 for step, loss in found.items()), (found, expected)


@pytest.mark.slow
def test_an_average_that_the_checkpoint_lacks_starts_from_one_it_has_on_any_number_of_processes(tmp_path):
    data, first = make_data(tmp_path / "shards"), tmp_path / "first"
    two = {"script": "train_generator.py", "data": data, "batch_size": 2, "parallel": "fsdp", "num_workers": 0}
    train_on_two(tmp_path, "GeneratorRun", *training_flags(logdir=first, iterations=1, **two))
    more = {"iterations": 2, "ema_rate": "0.9,0.5", "resume_checkpoint": first / "sharded000001"}
    one = train(tmp_path / "one", data, **more, batch_size=4).stdout
    said = train_on_two(
        tmp_path, "GeneratorRun", *training_flags(logdir=tmp_path / "two", **two, **more, consolidate=True)
    )
    for text in (one, said):
        assert "ema_0.5 of the network starts from ema_0.9 of step 1" in text, text
    ours, theirs = (load_file(str(tmp_path / name / "ema_0.5_000002.pt"))["state"] for name in ("one", "two"))
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-6) for name in ours)


@pytest.mark.slow
def test_a_classifier_with_cached_gradients(tmp_path):
    data = make_data(tmp_path / "shards")
    settings = {"script": "train_classifier.py", "data": data, "iterations": 3, "microbatch": 2, "lr": 1e-4}
    train(logdir=tmp_path / "one", batch_size=8, **settings)
    two = {"logdir": tmp_path / "two", "batch_size": 4, "parallel": "fsdp", "consolidate": True, "num_workers": 0}
    train_on_two(tmp_path, "ClassifierRun", *training_flags(**two, **settings))
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert one.keys() == two.keys() and all(abs(one[step] - two[step]) <= 1e-5 for step in one)
    whole, average = (load_file(str(tmp_path / "two" / f"{role}000003.pt")) for role in ("model", "ema_0.9_"))
    value, mean = (each["state"]["scale_logit"] for each in (whole, average))
    assert value.shape == () and value != mean


@pytest.mark.slow
def test_two_u_nets_of_a_decoder(tmp_path, monkeypatch):
    """Each sharded by itself, in one checkpoint; what a saver keeps is ordinary files."""
    monkeypatch.chdir(tmp_path)
    two = [("decoder.unets", [UNET, UNET]), ("decoder.image_sizes", [8, 16]), ("sharding.parallel", "fsdp")]
    two += [("tracker.log", {"log_type": "console", "auto_resume": True}), ("train.epochs", 1)]
    path = write_decoder(tmp_path, *two, ("data.batch_size", 2), world=make_embedded(tmp_path / "shards"))
    train_on_two(tmp_path, "DecoderRun", "--config", path, "--device", "cpu", "--threads", 1)
    (folder,) = {each for each, names, _ in os.walk(tmp_path) for name in names if name.startswith("sharded")}
    latest = max(name for name in os.listdir(folder) if name.startswith("sharded"))
    names = {os.path.basename(each) for each in consolidate(os.path.join(folder, latest), str(tmp_path / "files"))}
    assert len(names) == 6 and {name.partition("_")[0] for name in names} == {"unet0", "unet1"}
    more = ("--set", "train.epochs=2", "--set", "data.batch_size=4")
    resumed = run("train_decoder.py", "--config", path, "--device", "cpu", "--threads", 1, *more)
    assert "Resuming at step" in resumed.stdout


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    return make_pictures(folder), make_frozen(tmp_path_factory.mktemp("frozen"), str(folder))


@pytest.mark.parametrize("kind", [slow("stage_b"), "stage_c"])
def test_stages_of_a_cascade(tmp_path, pictures, kind):
    """By the key of the documented files; with previews and an average. One process goes on."""
    world, frozen = pictures
    average = [("ema_start_iters", 1), ("ema_iters", 2), ("ema_beta", 0.5)]
    path = write_cascade(kind, tmp_path, world, *frozen_of(kind, frozen), *average, ("use_fsdp", True))
    train_on_two(tmp_path, "parse_cascade", path, "--updates", 2)
    assert sorted(os.listdir(tmp_path / "run" / "sharded000002"))[-1] == "rank00001.bin"
    resumed = run("train_cascade.py", path, "--updates", 3)
    assert "Resuming at step 2" in resumed.stdout and (tmp_path / "run" / "model000003.pt").exists()


def check_same(one, two, steps):
    for name in ("loss", "grad_norm"):
        expected, found = (losses(folder, name) for folder in (one, two))
        assert expected.keys() == set(range(1, steps + 1)) and found == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_a_controlnet_over_a_sharded_base(tmp_path):
    """With previews and micro-batches: the losses of one process, which goes on."""
    base, data = make_file(tmp_path), make_controls(tmp_path / "pictures")
    settings = {"iterations": 3, "lr": 1e-4, "sample_interval": 3, "preview_samples": 2, "preview_steps": 2}
    train_controlnet(base, data, tmp_path / "one", **settings)
    flags = flags_of(base, data, tmp_path / "two", **settings, batch_size=2, microbatch=1, parallel="fsdp")
    train_on_two(tmp_path, "parse_controlnet", *flags)
    check_same(tmp_path / "one", tmp_path / "two", 3)
    resumed = train_controlnet(base, data, tmp_path / "two", **{**settings, "iterations": 4})
    assert "Resuming at step 3" in resumed.stdout and (tmp_path / "two" / "model000004.pt").exists()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["large", "semantic"])
def test_a_controlnet_over_a_sharded_stage_c(tmp_path, pictures, mode):
    """By the key of the documented files; with previews, an average, micro-batches, and weights to start from."""
    world, frozen = pictures
    run("train_cascade.py", write_cascade("stage_c", tmp_path, world, *frozen_of("stage_c", frozen), ("updates", 2)))
    settings = {"kind": "stage_c_controlnet", "controlnet_blocks": [0, 1, 3], "controlnet_filter": "CannyFilter"}
    settings |= {"controlnet_filter_params": {"resize": 16}, "controlnet_bottleneck_mode": mode, "updates": 3}
    settings |= {"controlnet": {"backbone": {"large_width": 8, "large_blocks": 2}}} if mode == "large" else {}
    settings |= {"ema_start_iters": 1, "ema_iters": 1, "ema_beta": 0.5, "save_every": 3, "sampling": {"steps": 2}}
    settings |= {"generator_checkpoint_path": str(tmp_path / "run" / "model000002.pt"), "grad_accum_steps": 2}
    settings |= {"effnet_checkpoint_path": frozen["effnet_checkpoint_path"], "webdataset_path": world, "lr": 1e-4}
    files = {}
    for name, fsdp in (("one", False), ("two", True)):
        own = {"experiment_id": name, "checkpoint_path": str(tmp_path), "use_fsdp": fsdp}
        files[name] = str(tmp_path / f"{name}.yaml")
        (tmp_path / f"{name}.yaml").write_text(
            yaml.safe_dump({**COMMON, **settings, **own, "output_path": str(tmp_path / "out")})
        )
    run("train_cascade.py", files["one"])
    train_on_two(tmp_path, "parse_controlnet", "--config", files["two"])
    check_same(tmp_path / "one", tmp_path / "two", 3)
    consolidate(str(tmp_path / "two" / "sharded000003"), str(tmp_path / "two"))
    for name in ("model000003.pt", "ema_0.5_000003.pt"):
        one, two = (load_file(str(tmp_path / folder / name))["state"] for folder in ("one", "two"))
        assert one.keys() == two.keys()
        assert all(torch.allclose(value, two[key], atol=4e-4) for key, value in one.items())  # a few steps of lr
    resumed = run("train_cascade.py", files["two"], "--updates", 4, "--save_every", 4)
    assert "Resuming at step 3" in resumed.stdout and (tmp_path / "two" / "model000004.pt").exists()


def test_what_cannot_be_sharded_is_refused(tmp_path, pictures):
    """A small network; one of two that are trained together."""
    world, frozen = pictures
    joint = [*frozen_of("stage_b", frozen), ("train_encoder", True)]
    for kind, own, words in (
        ("stage_a", (), "a StageA is not made of blocks"),
        ("stage_b", joint, "JointStageBTask trains several networks"),
    ):
        path = write_cascade(kind, tmp_path / kind, world, ("use_fsdp", True), *own)
        said = train_on_two(tmp_path, "parse_cascade", path)
        assert "error: " in said and words in said, said
