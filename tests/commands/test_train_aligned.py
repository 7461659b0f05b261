"""Training a generator with auxiliary losses, by the command: resuming, processes, what is saved, refusals."""

import json
import os

import eval_making
import pytest
import torch
from checkpoint_making import make_classifier_file, make_file
from dinov2_making import make_state
from marks import slow
from refusing import refused
from script_running import SETTINGS, hashes, json_lines, losses, run, train
from shard_making import make_shards
from tiny_settings import flags

from diff_dalle.checkpoints.checkpoint import load_file
from diff_dalle.checkpoints.lora_file import read_lora
from diff_dalle.checkpoints.safetensors import read_safetensors
from diff_dalle.commands.command_line import parse
from diff_dalle.commands.training_kinds import parse_controlnet
from diff_dalle.distributed.world import ALONE
from diff_dalle.recipes.generator import GeneratorRun

SMALL = {"alignment_width": 24, "log_interval": 1}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with shards and the files of two encoders."""
    folder = tmp_path_factory.mktemp("aligned")
    (folder / "shards").mkdir()
    make_shards(folder / "shards", [8, 8])
    make_classifier_file(folder)
    torch.save(make_state(), folder / "dino.pth")
    return folder


def aligned(place, **changed):
    both = {"alignment_path": place / "best.pt", "perceptual_weight": 0.3, "perceptual_path": place / "dino.pth"}
    return {**SMALL, **both, **changed}


def flags_of_lora(place, base):
    """Of a short run."""
    usual = {"iterations": 2, "batch_size": 4, "sample_interval": 0, "num_workers": 0, "ema_rate": 0.5}
    return {
        "model_path": base,
        "data_dir": place / "shards",
        "precision": "fp32",
        "device": "cpu",
        "threads": 1,
        **usual,
    }


def opened(**changed):
    return parse(GeneratorRun, flags({**SETTINGS["train_generator.py"], **changed})).recipe().open(ALONE)


def test_a_resumed_run_is_the_same_bit_for_bit_also_across_the_end_of_alignment(place, tmp_path):
    data, settings = place / "shards", aligned(place, alignment_until=0.6, batch_size=4, save_interval=2)
    train(tmp_path / "whole", data, iterations=5, **settings)
    train(tmp_path / "parts", data, iterations=5, hours=1e-9, **settings)
    first = {row["step"] for row in json_lines(tmp_path / "parts" / "progress.jsonl") if "loss" in row}
    train(tmp_path / "parts", data, iterations=5, **settings)
    whole, parts = (hashes(tmp_path / name) for name in ("whole", "parts"))
    last = [name for name in whole if name.endswith("000005.pt")]
    assert first != {1, 2, 3, 4, 5} and len(last) == 3 and all(whole[name] == parts[name] for name in last)
    alignment = losses(tmp_path / "whole", "alignment")
    assert all(alignment[step] > 0.1 for step in (1, 2, 3)) and alignment[4] == alignment[5] == 0
    state = load_file(str(tmp_path / "whole" / "opt000005.pt"), ("optimizer",))["state"]
    assert state["modules"]["projector"]["first.weight"].shape == (24, 32)
    config = json.loads((tmp_path / "whole" / "run.json").read_text())["config"]
    assert len(config["alignment"]["alignment_encoder"]) == len(config["perceptual"]["perceptual_encoder"]) == 16
    # The generator is one: sample.py and others take it as any.
    state = load_file(str(tmp_path / "whole" / "ema_0.9_000005.pt"))["state"]
    assert state.keys() == opened().network().state_dict().keys()
    images = ("--steps", 2, "--device", "cpu", "--num_samples", 1, "--logdir", tmp_path / "images")
    run("sample.py", "--model_path", tmp_path / "whole" / "ema_0.9_000005.pt", "--prompts", "caption of 3", *images)


@pytest.mark.parametrize("parallel", ["ddp", slow("fsdp")])
def test_processes_do_not_change_what_is_learned(place, tmp_path, parallel):
    """Losses of two processes, and of the processes that resume what they saved."""
    data = place / "shards"
    settings = aligned(place, alignment_until=0.75, save_interval=2)
    train(tmp_path / "one", data, iterations=4, batch_size=4, microbatch=2, **settings)
    two = {**settings, "ranks": 2, "batch_size": 2, "microbatch": 1, "parallel": parallel}
    train(tmp_path / "two", data, iterations=4, **two)
    again = tmp_path / "again"
    end = {"iterations": 4, **two, "keep_checkpoints": 0}
    train(again, data, **end)
    newest = "sharded000004" if parallel == "fsdp" else "opt000004.pt"
    record = json.loads((again / "run.json").read_text())
    record["checkpoints"] = [each for each in record["checkpoints"] if each["step"] == 2]
    (again / "run.json").write_text(json.dumps(record))
    assert (again / newest).exists()
    alone = {**settings, "batch_size": 4, "microbatch": 2}
    resumed = train(again, data, iterations=4, **(two if parallel == "fsdp" else alone))
    assert "Resuming at step 2" in resumed.stdout
    for name in ("loss", "alignment", "perceptual", "grad_norm"):
        expected = losses(tmp_path / "one", name)
        for folder in ("two", "again"):
            found = losses(tmp_path / folder, name)
            assert found.keys() == expected.keys()
            assert all(abs(loss - expected[step]) <= 2e-5 for step, loss in found.items()), (name, found, expected)
    assert losses(tmp_path / "one", "alignment")[4] == 0 < losses(tmp_path / "one", "alignment")[3]


def test_other_weights_of_an_encoder_are_refused(place, tmp_path):
    data, settings = place / "shards", aligned(place, batch_size=2, save_interval=1)
    train(tmp_path / "run", data, iterations=1, **settings)
    torch.save({**make_state(), "cls_token": torch.ones(1, 1, 64)}, tmp_path / "other.pth")
    other = {**settings, "perceptual_path": tmp_path / "other.pth"}
    said = train(tmp_path / "run", data, iterations=2, ok=False, **other)
    assert said.returncode and "perceptual_encoder" in said.stderr
    for name in ("alignment", "perceptual"):
        with refused(f"{name}_path is .*, whose weights are .*, but the run was begun with 0123: give those"):
            opened(**aligned(place, **{f"{name}_encoder": "0123"}))


def test_the_projector_begins_as_the_seed_says_and_the_network_as_without_it(place):
    def built(**changed):
        session = opened(**changed)
        return session.task(session.network(), "", None)

    one, same, other = (built(**aligned(place, seed=seed)).state_dict() for seed in (1, 1, 2))
    alone = built(seed=1).state_dict()
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert all(torch.equal(one[name], alone[name]) for name in alone) and len(one) == len(alone) + 6
    assert not torch.equal(one["alignment.projector.last.weight"], other["alignment.projector.last.weight"])
    task = built(**aligned(place, alignment_block="unet.output_blocks.3", alignment_image_size=0))
    assert task.alignment.projector.first.in_features == 16 and task.perceptual.snr == 0.2
    assert built(small_size=8, **aligned(place)).alignment.projector.first.in_features == 32


def test_what_cannot_be_is_refused(place, tmp_path):
    path, weights = {"alignment_path": place / "best.pt"}, {"perceptual_weight": 1.0}

    def built(**changed):
        session = opened(**changed)
        session.task(session.network(), "", None)

    for changed, words in (
        ({"alignment_path": make_file(tmp_path)}, "holds a generator, but a classifier, a vit_clip or a semantic is"),
        ({"alignment_path": tmp_path / "none.pt"}, "none.pt does not exist"),
        ({**path, "alignment_block": "unet.encoder.time_emb"}, "alignment_block gives .*, which is no feature map"),
        ({**path, "alignment_block": "unet.encoder.cond_emb"}, "alignment_block is unet.encoder.cond_emb, but the"),
        ({**path, "alignment_block": "unet.output_blocks"}, "is never called in a forward pass"),
        ({**path, "alignment_image_size": 8}, "takes images of 16 pixels alone: leave it out"),
        ({"alignment_path": place / "dino.pth", "alignment_image_size": 2}, "smaller than one patch"),
        (
            {**path, "alignment_until": 0.5, "iterations": 0, "hours": 1},
            "alignment_until is a share of --iterations or",
        ),
        (weights, "perceptual_path is required with --perceptual_weight: nothing is downloaded"),
        ({**weights, "perceptual_path": "p", "perceptual_net": "alex"}, "needs images of 31 pixels, but these have 16"),
        ({"alignment_weight": 0.1}, "alignment_path is"),
    ):
        with refused(words):
            built(**changed)
    weight = ["perceptual.perceptual_weight=1", "--set", "perceptual.perceptual_path=p"]
    with refused("perceptual_weight is for generators and their LoRAs, and this is a controlnet"):
        parse_controlnet(["--model_path", "a.pt", "--controlnet_filter", "canny", "--set", *weight])


def test_a_lora_can_be_aligned_and_its_file_has_no_projector(place, tmp_path):
    given = {**flags_of_lora(place, make_file(tmp_path)), "logdir": tmp_path / "lora"}
    run("train_lora.py", *flags({**given, **aligned(place)}))
    (path,) = (tmp_path / "lora").glob("lora*.safetensors")
    assert not [name for name in read_safetensors(str(path))[0] if "projector" in name] and read_lora(str(path))
    rows = json_lines(tmp_path / "lora" / "progress.jsonl")
    assert rows[0]["alignment"] > 0.1 and rows[0]["perceptual"] > 0 and rows[0]["alignment"] != rows[1]["alignment"]


def test_lpips_is_a_perceptual_loss(monkeypatch, tmp_path):
    eval_making.install(monkeypatch, tmp_path)
    eval_making.save_lpips(tmp_path / "squeeze.pth", "squeeze")
    options = {"perceptual_weight": 1.0, "perceptual_net": "squeeze", "perceptual_path": tmp_path / "squeeze.pth"}
    session = opened(image_size=32, **options)
    task = session.task(session.network(), "", None)
    images = torch.rand(2, 3, 32, 32) * 2 - 1
    other = (images + 0.1).requires_grad_()
    distance = task.perceptual.distance(images, other)
    distance.sum().backward()
    assert distance.shape == (2,) and (distance > 0).all() and other.grad.any()
    assert not any(p.requires_grad or each.training for each in task.companions.values() for p in each.parameters())
    assert len(session.settings.perceptual.perceptual_encoder) == 16 and os.path.exists(tmp_path / "squeeze.pth")
