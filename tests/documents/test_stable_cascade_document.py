"""The Stable Cascade training document: its dataset, its keys and its command, to the letter, with smaller sizes."""

import json
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from cascade_file_making import FILES, frozen_of, make_frozen, make_world
from document_reading import blocks, sections
from script_running import json_lines, run
from shard_making import encoded, random_image

DOCUMENT = {name.rpartition("/")[2]: text for name, text in sections("stable_cascade.md").items()}
SIZES = {
    "batch_size": 4,
    "image_size": 32,
    "updates": 2,
    "backup_every": 2,
    "save_every": 2,
    "ema_start_iters": 1,
    "controlnet_blocks": [0, 3],
}
# What the document leaves at its defaults, which are for large networks.
HERE = {"sampling": {"steps": 2}, "loop": {"log_interval": 1, "preview_samples": 2}, "data": {"num_workers": 0}}
HERE |= {"dtype": "float32", "distributed": {"device": "cpu", "threads": 1}}
STAGE_C = {"model_version": "1B", "model": FILES["stage_c"]["model"]}
CONTROLNET = {"model_version": None, "controlnet_bottleneck_mode": "semantic"}
KINDS = {
    "Text-to-Image": ((), STAGE_C),
    "ControlNet Training": (
        ("ControlNet Training",),
        {"controlnet_bottleneck_mode": "semantic", "model_version": None},
    ),
    "LoRA Training": (("LoRA Training",), STAGE_C),
    "Image Reconstruction": ((), {"model_version": "700M", "model": FILES["stage_b"]["model"]}),
}  # the sections beside the common ones, and further keys; None leaves a key out
COMMON = ("Basics", "Dataset")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """The working directory, with the document's folder of pictures, captions and scores, and its shard of them."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "dataset").mkdir()
    for number in range(12):
        path = folder / "dataset" / f"{number:04d}"
        path.with_suffix(".jpg").write_bytes(encoded(random_image(40, 36, number)))
        path.with_suffix(".txt").write_text(f"picture {number}")
        scores = {"aesthetic_score": 4.0 + number % 3, "nsfw_probability": 0.02 * (number == 2)}
        path.with_suffix(".json").write_text(json.dumps(scores))
    (command,) = [line.strip("`") for line in DOCUMENT["Dataset"].splitlines() if line.startswith("`tar ")]
    subprocess.run(shlex.split(command), cwd=folder, check=True)
    return folder


@pytest.fixture(scope="module")
def frozen(tmp_path_factory):
    return make_frozen(tmp_path_factory.mktemp("frozen"), make_world(tmp_path_factory.mktemp("world")))


def keys_of(*names):
    """The settings in the blocks of some sections."""
    found = {}
    for name in names:
        for block in blocks(DOCUMENT[name], "yaml"):
            found |= yaml.safe_load(block)
    return found


def trained(name, home, frozen, monkeypatch, **own):
    """Train by the document's command from a file of its keys; returns the folder of the run."""
    monkeypatch.chdir(home)
    extra, others = KINDS[name]
    networks = dict(frozen_of("stage_b" if name == "Image Reconstruction" else "stage_c", frozen))
    keys = {**keys_of(*COMMON, *extra), **SIZES, **HERE, **networks, **others, **own}
    del keys["wandb_project"], keys["wandb_entity"]  # optional in the document, and an account
    keys["experiment_id"] = name.split()[0]
    keys["checkpoint_path"], keys["output_path"] = str(home / "checkpoints"), str(home / "output")
    keys["webdataset_path"] = keys["webdataset_path"][1].replace("/path/to/your/local", str(home))
    if "controlnet_filter" not in keys:
        keys.pop("controlnet_blocks")
    _, script, path = shlex.split(blocks(DOCUMENT["Starting a Training"], "python")[1])
    assert script == "train/train_c_lora.py"
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(yaml.safe_dump({key: value for key, value in keys.items() if value is not None}))
    run("train_cascade.py", path)
    folder = home / "checkpoints" / keys["experiment_id"]
    assert json_lines(folder / "progress.jsonl")[-1]["step"] == 2
    return folder


@pytest.fixture(scope="module")
def base(home, frozen):
    with pytest.MonkeyPatch.context() as patch:
        return trained("Text-to-Image", home, frozen, patch)


@pytest.mark.parametrize("name", ["ControlNet Training", "LoRA Training", "Image Reconstruction"])
def test_every_training_of_the_document(home, frozen, base, monkeypatch, name):
    own = {} if name == "Image Reconstruction" else {"generator_checkpoint_path": str(base / "model000002.pt")}
    folder = trained(name, home, frozen, monkeypatch, **own)
    assert list(folder.glob("ema_0.9_*.pt")) and list(folder.glob("model*.pt"))
