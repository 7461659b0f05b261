"""What ``info.py`` and other commands say when they are given a LoRA."""

import re

import pytest
from checkpoint_making import make_file
from lora_making import make_lora
from PIL import Image
from script_running import run

from diff_dalle.checkpoints.checkpoint import Identity, load_file, save_file
from diff_dalle.checkpoints.lora_file import lora_at, read_lora
from diff_dalle.commands.info import describe_file
from diff_dalle.commands.merge_lora import MergeConfig, merge_lora_files


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A base, a LoRA and a checkpoint and an optimizer of its training."""
    folder = tmp_path_factory.mktemp("files")
    lora = read_lora(make_lora(folder / "lora.safetensors", make_file(folder)))
    config = {
        "rank": 2,
        "alpha": 6.0,
        "module_filters": ["mlp_in"],
        "train_tokens": [],
        "base_weights": [lora.about.base],
    }
    state = {f"lora.{name}": value for name, value in lora.tensors.items()}
    for role, values in (("model", state), ("optimizer", {"optimizer": {}})):
        save_file(str(folder / f"{role}.pt"), role, Identity("generator_lora", config), 3, 12, values)
    return folder


def test_a_lora_is_described_by_what_it_says(files):
    base = read_lora(str(files / "lora.safetensors")).about.base
    for name in ("lora.safetensors", "model.pt"):
        text = run("info.py", "--model_path", files / name).stdout
        assert f"{name} holds a LoRA, which --lora takes, of 1 module with 160 parameters" in text
        assert f"for a generator with the weights {base}" in text and "rank 2, alpha 6, module_filters mlp_in" in text
    text = describe_file(str(files / "optimizer.pt"))
    assert "holds an optimizer's state of the training of a LoRA after 3 steps" in text
    assert lora_at(str(files / "ema.pt")) is None


@pytest.mark.slow
def test_a_checkpoint_is_described_with_the_loras_in_its_weights(files, tmp_path):
    merged = str(tmp_path / "merged.pt")
    merge_lora_files(MergeConfig(str(files / "ema.pt"), (f"{files}/lora.safetensors:0.5",), out=merged))
    line = "It has LoRAs in its weights: lora.safetensors:0.5."
    assert line in describe_file(merged) and line not in describe_file(str(files / "ema.pt"))
    assert load_file(merged)["kind"] == "generator"


@pytest.mark.parametrize("flag", ["--model_path", "--controlnet"])
def test_a_lora_in_another_place_is_called_by_its_name(files, flag):
    for name, sentence in (
        ("lora.safetensors", "is a LoRA, which --lora takes, but a checkpoint of a network is required here"),
        ("model.pt", "holds a generator_lora, but .* is required here: give a LoRA with --lora"),
    ):
        flags = {"--model_path": files / "ema.pt", flag: files / name, "--prompts": "a", "--device": "cpu"}
        if flag == "--controlnet":
            Image.new("RGB", (16, 16)).save(files / "x.png")
            flags["--control_image"] = files / "x.png"
        result = run("sample.py", *(part for pair in flags.items() for part in pair), ok=False)
        assert result.returncode == 2 and len(result.stderr.strip().splitlines()) == 1, result.stderr
        assert re.search(sentence, result.stderr), result.stderr
