"""LoRAs and ControlNets go to a hub of this machine or a folder and come back."""

import numpy as np
import pytest
import yaml
from checkpoint_making import make_classifier_file, make_file, sample
from control_making import make_controlnet
from lora_making import make_lora
from share_making import refused, share

import diff_dalle
from diff_dalle.checkpoints.lora_file import read_lora
from diff_dalle.checkpoints.model_folder import open_model
from diff_dalle.config import InputError

HUB = "hf://me/star"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_file(tmp_path_factory.mktemp("base"))


def drawn(base: str, **options: object) -> np.ndarray:
    return sample(diff_dalle.load(base, **options), ["a red circle"], seed=3)


def test_a_lora_adapts_its_base_from_the_hub_and_from_a_folder(hub, base, tmp_path):
    path = make_lora(tmp_path / "lora000002.safetensors", base)
    before, half = drawn(base, lora=path), drawn(base, lora=f"{path}:0.5")
    assert not np.array_equal(before, drawn(base)) and not np.array_equal(before, half)
    line = share("push", f"--lora {path} --to {HUB} --license mit --example_prompt 'a [star]'")
    assert set(hub.repos["me/star"]) == {"README.md", "model.json", "lora.safetensors"} and "lora.safetensors" in line
    assert np.array_equal(before, drawn(base, lora=HUB)) and np.array_equal(half, drawn(base, lora=f"{HUB}:0.5"))
    folder = str(tmp_path / "pulled")
    share("pull", f"--from {HUB} --to {folder}")
    assert np.array_equal(before, drawn(base, lora=[folder])) and read_lora(folder).about == read_lora(path).about
    with pytest.raises(InputError, match="pulled has only lora: give a generator's with model_path"):
        diff_dalle.load(folder)


def test_the_card_of_a_lora(base, tmp_path):
    path, folder = make_lora(tmp_path / "lora.safetensors", base), tmp_path / "star"
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "report.md").write_text("# Report\n\n![Samples](grid.png)\n")
    (tmp_path / "report" / "grid.png").write_bytes(b"\x89PNG")
    (tmp_path / "report" / "scores.json").write_text('{"scores": {"star": 0.91}}')
    texts = "--license mit --limits 'Stars only.' --example_prompt 'a [star]'"
    share("push", f"--lora {path} --to {folder} --report_dir {tmp_path}/report", texts)
    card = open_model(str(folder)).card
    front = yaml.safe_load(card.split("---\n")[1])
    assert front["license"] == "mit" and "lora" in front["tags"] and front["pipeline_tag"] == "text-to-image"
    assert "LoRA of a generator, rank 2, 1 module, 160 parameters" in card and "| alpha | 6.0 |" in card
    assert f"--model_path ema.pt --lora {folder} --prompts 'a [star]'" in card
    assert f'diff_dalle.load("ema.pt", lora=["{folder}"])' in card and read_lora(path).about.base in card
    assert "![Samples](grid.png)" in card and "0.91" in card and "Stars only." in card
    compile(card.split("```python\n")[1].split("```")[0], "card", "exec")


def test_a_classifiers_lora_is_merged(tmp_path):
    path = make_lora(tmp_path / "lora.safetensors", make_classifier_file(tmp_path), "classifier")
    share("push", f"--lora {path} --to {tmp_path}/shared")
    card = open_model(str(tmp_path / "shared")).card
    assert f"diff-dalle merge_lora --model_path clip.pt --lora {tmp_path}/shared --out merged.pt" in card


def test_a_controlnet_steers_its_base_from_the_hub(hub, base, tmp_path):
    path = make_controlnet(base, tmp_path / "canny.pt")
    share("push", f"--model_path {path} --to {HUB} --precision fp32")
    control = diff_dalle.Control([np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)])
    images = [
        sample(diff_dalle.load(base, controlnet=each), ["a red circle"], seed=3, control=control)
        for each in (path, HUB)
    ]
    assert np.array_equal(*images)


def test_what_is_refused(base, tmp_path):
    path, to = make_lora(tmp_path / "lora.safetensors", base), f"--to {tmp_path}/shared --lora"
    assert "--lora is sent alone: leave out --model_path" in refused("push", to, path, "--model_path", base)
    assert "a LoRA is sent as it is" in refused("push", to, path, "--precision fp32")
    assert "holds a generator, but a LoRA is required" in refused("push", to, base)
    assert not (tmp_path / "shared").exists()
