"""LoRAs of networks that are trained from files: stages of a latent cascade, U-Nets of a decoder."""

import json
import re
from pathlib import Path

import cascade_file_making as cascade
import decoder_file_making as decoder
import numpy as np
import pytest
import torch
import yaml
from script_running import losses, run

import diff_dalle
from diff_dalle.checkpoints.checkpoint import load_file
from diff_dalle.checkpoints.loading import open_network
from diff_dalle.checkpoints.lora_file import read_lora
from diff_dalle.commands.training_kinds import inferred_kind, parse_cascade

TOKENS = [["[fernando]", "^dog</w>"], ["^snail", None]]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return cascade.make_world(tmp_path_factory.mktemp("shards"))


@pytest.fixture(scope="module")
def frozen(tmp_path_factory, world):
    return cascade.make_frozen(tmp_path_factory.mktemp("frozen"), world)


@pytest.fixture(scope="module")
def bases(tmp_path_factory, world, frozen):
    """Checkpoints of stages B and C."""
    found = {}
    for kind in ("stage_b", "stage_c"):
        folder = tmp_path_factory.mktemp(kind)
        quiet = [("loop.preview_samples", 0), ("lr", 0.05), ("updates", 2)]
        cascade.run(kind, folder, world, *cascade.frozen_of(kind, frozen), *quiet)
        found[kind] = str(folder / "run" / "model000002.pt")
    return found


def document(folder, world, frozen, base, **changed) -> str:
    """The documented example of a LoRA of stage C, with other paths, at a tiny size."""
    file = {
        "experiment_id": "stage_c_lora",
        "checkpoint_path": str(folder),
        "output_path": str(folder / "out"),
        "model_version": "1B",
        "lr": 1.0e-2,
        "batch_size": 4,
        "image_size": cascade.SIDE,
        "multi_aspect_ratio": ["1/1"],
        "grad_accum_steps": 1,
        "updates": 3,
        "backup_every": 0,
        "save_every": 3,
        "warmup_updates": 1,
        "use_fsdp": False,
        "module_filters": [".attn"],
        "rank": 4,
        "train_tokens": TOKENS,
        "webdataset_path": [f"file:{world}"],
        "effnet_checkpoint_path": frozen["effnet_checkpoint_path"],
        "previewer_checkpoint_path": frozen["effnet_checkpoint_path"],
        "generator_checkpoint_path": base,
        "model": {**cascade.UNET, "text": cascade.TEXT, "image_width": 0, "micro_conditions": []},
        "data": {"num_workers": 0},
        "loop": {"log_interval": 1, "preview_samples": 2},
        "dtype": "float32",
        "distributed": {"device": "cpu", "threads": 1},
    }
    folder.mkdir(exist_ok=True)
    path = folder / "lora.yaml"
    path.write_text(yaml.safe_dump({**file, **changed}))
    return str(path)


def test_the_documented_example_trains_and_samples(tmp_path, world, frozen, bases):
    path = document(tmp_path, world, frozen, bases["stage_c"])
    assert inferred_kind(yaml.safe_load(Path(path).read_text())) == "stage_c_lora"
    run("train_cascade.py", path)
    folder = tmp_path / "stage_c_lora"
    lora = read_lora(str(folder / "lora000003.safetensors"))
    assert lora.about.kind == "stage_c" and lora.about.module_filters == (".attn",)
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in lora.pairs} == {"in_proj", "out_proj"}
    assert lora.deltas is not None and load_file(str(folder / "model000003.pt"))["kind"] == "stage_c_lora"
    assert sorted(each.name for each in (tmp_path / "out" / "stage_c_lora").iterdir())  # previews
    options = {"semantic": frozen["effnet_checkpoint_path"]}
    merged = str(tmp_path / "merged.pt")
    run("merge_lora.py", "--model_path", bases["stage_c"], "--lora", lora.path, "--out", merged)
    pictures = [
        diff_dalle.load(model, "cpu", lora=given, **options).sample("a [fernando]", progress=False).astype(int)
        for model, given in ((bases["stage_c"], ()), (bases["stage_c"], lora.path), (merged, ()))
    ]
    assert np.array_equal(pictures[1], pictures[2]) and not np.array_equal(pictures[0], pictures[1])


def test_a_base_may_have_any_size(tmp_path, world, frozen, bases):
    """Whatever ``model_version`` it had, which a file need not repeat."""
    own = {"model_version": None, "model": {}}
    settings = parse_cascade([document(tmp_path, world, frozen, bases["stage_c"], **own)])
    assert settings.model == open_network(bases["stage_c"], "stage_c").settings.model


def test_a_stage_b_is_adapted(tmp_path, world, frozen, bases):
    own = [("generator_checkpoint_path", bases["stage_b"]), ("module_filters", ["attn", "mlp"]), ("rank", 2)]
    own += [*cascade.frozen_of("stage_b", frozen), ("kind", "stage_b_lora"), ("save_every", 1)]
    for name, updates in (("whole", 2), ("cut", 1), ("cut", 2)):
        path = cascade.write_file("stage_b", tmp_path / name, world, *own, ("updates", updates))
        run("train_cascade.py", path)
    whole, again = (load_file(str(tmp_path / name / "run" / "model000002.pt"))["state"] for name in ("whole", "cut"))
    assert all(name.startswith("lora.") for name in whole) and any(value.any() for value in whole.values())
    assert all(torch.equal(value, again[name]) for name, value in whole.items())


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            {"model_version": "3.6B", "model": {}},
            r"says its settings itself, but model .*says others: .*; leave these out, and model_version, which stands",
        ),
        ({"generator_checkpoint_path": None}, "generator_checkpoint_path is required"),
        ({"train_tokens": [["[fernando]", "^zzzzq"]]}, "which finds no token"),
        ({"rank": 0}, r"rank \(.*lora.yaml, line \d+\) is 0, but must be at least 1"),
        ({"prior_data_dir": ["x"]}, "prior_data_dir .*and multi_aspect_ratio .*exclude each other"),
    ],
)
def test_bad_files_are_refused(tmp_path, world, frozen, bases, changed, words):
    result = run("train_cascade.py", document(tmp_path, world, frozen, bases["stage_c"], **changed), ok=False)
    assert result.returncode == 2 and re.search(words, result.stderr), result.stderr


@pytest.mark.slow
def test_processes_share_batches_half_of_which_are_regularization_images(tmp_path, world, frozen, bases):
    """Of 4 samples each of two processes has one of either kind; of 6 it cannot have as many."""

    def start(name: str, ranks: int, **changed):
        own = {"multi_aspect_ratio": None, "prior_data_dir": [world], "updates": 2, "save_every": 2, "train_tokens": []}
        own["loop"] = {"log_interval": 1, "preview_samples": 0}
        path = document(tmp_path / name, world, frozen, bases["stage_c"], **own, **changed)
        return run("train_cascade.py", path, ranks=ranks, ok="batch_size" not in changed)

    start("one", 1)
    start("two", 2)
    one, two = (losses(tmp_path / name / "stage_c_lora") for name in ("one", "two"))
    assert len(one) == 2 and one == pytest.approx(two, rel=1e-5)
    refused = start("six", 2, batch_size=6)
    sentence = "batch_size is 6, but must be a multiple of 4, twice the processes, with prior_data_dir: "
    assert refused.returncode == 2 and refused.stderr.count(sentence) == 1
    assert len(refused.stderr.strip().splitlines()) == 1, refused.stderr


def test_u_nets_of_a_decoder_are_adapted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where savers put their files
    world = decoder.make_world(tmp_path / "shards")
    first = decoder.write_file(tmp_path, world=world)
    run("train_decoder.py", "--config_file", first, "--threads 1 --set train.epochs=1")
    (base,) = (tmp_path / "run").glob("*best.pt")
    folder = tmp_path / "lora"
    folder.mkdir()
    path = decoder.write_file(folder, world=world)
    file = {name: value for name, value in json.loads(Path(path).read_text()).items() if name != "decoder"}
    (folder / "decoder.json").write_text(json.dumps({**file, "model_path": str(base), "module_filters": ["conv"]}))
    run("train_lora.py", "--config", path, "--threads 1")
    (lora,) = (read_lora(str(each)) for each in sorted((folder / "run").glob("unet0_lora*.safetensors"))[-1:])
    assert lora.about.kind == "decoder" and lora.about.trainee == "unet0"
    embeddings = np.stack([decoder.embedding(1)])
    plain, adapted = (
        diff_dalle.load(str(base), "cpu", lora=given).sample(embeddings=embeddings, progress=False)
        for given in ((), f"{lora.path}:100")  # its pictures are noise, black or white
    )
    assert not np.array_equal(plain, adapted)
