"""LoRAs of stages of a latent cascade, from files. ``record`` trains those of a decoder and of stage B too."""

import re
from pathlib import Path

import cascade_file_making as cascade
import numpy as np
import pytest
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
def base(tmp_path_factory, world, frozen):
    """A checkpoint of stage C."""
    folder = tmp_path_factory.mktemp("stage_c")
    quiet = [("loop.preview_samples", 0), ("lr", 0.05), ("updates", 2)]
    cascade.run("stage_c", folder, world, *cascade.frozen_of("stage_c", frozen), *quiet)
    return str(folder / "run" / "model000002.pt")


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


def test_the_documented_example_trains_and_samples(tmp_path, world, frozen, base):
    path = document(tmp_path, world, frozen, base)
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
    run("merge_lora.py", "--model_path", base, "--lora", lora.path, "--out", merged)
    pictures = [
        diff_dalle.load(model, "cpu", lora=given, **options).sample("a [fernando]", progress=False).astype(int)
        for model, given in ((base, ()), (base, lora.path), (merged, ()))
    ]
    assert np.array_equal(pictures[1], pictures[2]) and not np.array_equal(pictures[0], pictures[1])


def test_a_base_may_have_any_size(tmp_path, world, frozen, base):
    """Whatever ``model_version`` it had, which a file need not repeat."""
    own = {"model_version": None, "model": {}}
    settings = parse_cascade([document(tmp_path, world, frozen, base, **own)])
    assert settings.model == open_network(base, "stage_c").settings.model


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            {"model_version": "3.6B", "model": {}},
            r"says its settings itself, but model .*says others: .*; leave these out, and model_version, which stands",
        ),
        ({"generator_checkpoint_path": None}, "generator_checkpoint_path is required"),
        ({"prior_data_dir": ["x"]}, "prior_data_dir .*and multi_aspect_ratio .*exclude each other"),
    ],
)
def test_bad_files_are_refused(tmp_path, world, frozen, base, changed, words):
    result = run("train_cascade.py", document(tmp_path, world, frozen, base, **changed), ok=False)
    assert result.returncode == 2 and re.search(words, result.stderr), result.stderr


@pytest.mark.slow
def test_processes_share_batches_half_of_which_are_regularization_images(tmp_path, world, frozen, base):
    """Of 4 samples each of two processes has one of either kind; of 6 it cannot have as many."""

    def start(name: str, ranks: int, **changed):
        own = {"multi_aspect_ratio": None, "prior_data_dir": [world], "updates": 2, "save_every": 2, "train_tokens": []}
        own["loop"] = {"log_interval": 1, "preview_samples": 0}
        path = document(tmp_path / name, world, frozen, base, **own, **changed)
        return run("train_cascade.py", path, ranks=ranks, ok="batch_size" not in changed)

    start("one", 1)
    start("two", 2)
    one, two = (losses(tmp_path / name / "stage_c_lora") for name in ("one", "two"))
    assert len(one) == 2 and one == pytest.approx(two, rel=1e-5)
    refused = start("six", 2, batch_size=6)
    sentence = "batch_size is 6, but must be a multiple of 4, twice the processes, with prior_data_dir: "
    assert refused.returncode == 2 and refused.stderr.count(sentence) == 1
    assert len(refused.stderr.strip().splitlines()) == 1, refused.stderr
