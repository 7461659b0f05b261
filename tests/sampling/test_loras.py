"""Sampling with LoRAs: of classifiers, of several networks, beside a ControlNet, and from a pipeline file."""

from pathlib import Path

import numpy as np
import pytest
import yaml
from cascade_making import random_images
from checkpoint_making import FEW, make_classifier_file, make_file, samples_in
from control_making import make_controlnet
from lora_making import make_lora
from PIL import Image
from script_running import run

import diff_dalle
from diff_dalle import Control
from diff_dalle.commands.command_line import parse
from diff_dalle.commands.sample import SampleRun
from diff_dalle.config import InputError
from diff_dalle.sampling.classifier import ClassifierConfig, load_guide

PROMPTS = ["a red circle", "two blue squares"]
PICTURES = list(random_images(2, 16, 16))


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """Networks, a ControlNet of the base, and a LoRA of each."""
    folder = tmp_path_factory.mktemp("files")
    for name, made in (("base", {}), ("up", {"image_size": 32, "small_size": 16})):
        (folder / name).mkdir()
        make_lora(folder / f"{name}_lora.safetensors", make_file(folder / name, **made))
    make_lora(folder / "classifier_lora.safetensors", make_classifier_file(folder), "classifier")
    make_controlnet(str(folder / "base" / "ema.pt"), folder / "canny.pt")
    Image.fromarray(PICTURES[0]).save(folder / "picture.png")
    return folder


def sample(files, *loras, upsampler=False, controlnet="", **options) -> np.ndarray:
    pipeline = diff_dalle.load(
        str(files / "base" / "ema.pt"),
        "cpu",
        "fp32",
        upsampler_paths=[str(files / "up" / "ema.pt")] * upsampler,
        lora=[str(files / name) for name in loras],
        controlnet=str(files / controlnet) if controlnet else "",
    )
    upsampling = {"upsampling": diff_dalle.StageSettings(FEW)} if upsampler else {}
    return pipeline.sample(PROMPTS, sampler=FEW, progress=False, **upsampling, **options).astype(int)


# --------------------------------------------------------------------------------------------------------- classifiers


@pytest.mark.slow
def test_a_lora_of_a_classifier_goes_to_the_classifier(files):
    """Whichever way the classifier is given; its factor counts."""
    own, lora = str(files / "best.pt"), "classifier_lora.safetensors"
    plain, adapted, weaker = (
        sample(files, *loras, classifier=own, classifier_scale=30.0) for loras in ((), (lora,), (f"{lora}:0.1",))
    )
    loaded = diff_dalle.load_classifier(own, "cpu", "fp32", lora=str(files / lora))
    assert np.array_equal(sample(files, classifier=loaded, classifier_scale=30.0), adapted)
    assert not np.array_equal(adapted, plain) and not np.array_equal(adapted, weaker)


def test_a_lora_of_a_classifier_without_one_is_refused(files):
    lora = "classifier_lora.safetensors"
    with pytest.raises(InputError, match=r"classifier_lora.* was trained for a classifier, but none guides"):
        sample(files, lora)
    plain = load_guide(str(files / "best.pt"), "cpu", "fp32")
    with pytest.raises(InputError, match=r"but the one here was loaded without it: .* load_classifier\(…, lora=…\)"):
        sample(files, lora, classifier=plain, classifier_scale=1.0)
    with pytest.raises(InputError, match="was trained for a generator, which is not among the networks here"):
        diff_dalle.load_classifier(str(files / "best.pt"), "cpu", lora=str(files / "base_lora.safetensors"))
    with pytest.raises(InputError, match="but none guides"):
        ClassifierConfig().load("cpu", lora=[str(files / lora)])
    (files / "other").mkdir()
    changed = make_classifier_file(files / "other", classifier_enc_depth=2)
    with pytest.raises(InputError, match="was trained for a classifier with the weights"):
        sample(files, lora, classifier=changed, classifier_scale=1.0)
    accepted = diff_dalle.load_classifier(changed, "cpu", lora=str(files / lora), accept_changed_base=True)
    assert accepted.encode_text(PROMPTS).isfinite().all()


# ------------------------------------------------------------------------------------- several networks, and a control


def test_a_base_and_an_upsampler_have_loras_of_their_own(files):
    base, up = "base_lora.safetensors", "up_lora.safetensors"
    images = {loras: sample(files, *loras, upsampler=True) for loras in ((), (base,), (up,), (base, up), (up, base))}
    assert np.array_equal(images[base, up], images[up, base])
    different = list(images.values())[:4]
    assert all(not np.array_equal(a, b) for i, a in enumerate(different) for b in different[:i])


def test_a_controlnet_steers_the_network_with_the_lora(files):
    """At scale 0 it is the LoRA alone; the ControlNet is that of the base without it."""
    lora, control = "base_lora.safetensors", Control(PICTURES)
    alone = sample(files, lora)
    assert np.array_equal(sample(files, lora, controlnet="canny.pt", control=Control(PICTURES, scale=0.0)), alone)
    both, steered = (sample(files, *given, controlnet="canny.pt", control=control) for given in ((lora,), ()))
    assert all(not np.array_equal(both, other) for other in (alone, steered, sample(files)))


def test_a_pipeline_file_says_what_flags_say(files, tmp_path):
    """And each LoRA goes to its own network."""
    given = {
        "model_path": str(files / "base" / "ema.pt"),
        "classifier_path": str(files / "best.pt"),
        "classifier_scale": 30,
        "lora": [str(files / "classifier_lora.safetensors"), f"{files / 'base_lora.safetensors'}:0.5"],
        "controlnet": str(files / "canny.pt"),
        "control_image": [str(files / "picture.png")],
        "prompts": "|".join(PROMPTS),
        "steps": 4,
        "device": "cpu",
        "precision": "fp32",
    }
    (tmp_path / "pipeline.yaml").write_text(yaml.safe_dump(given))
    flags = [f"--{name}={','.join(value) if isinstance(value, list) else value}" for name, value in given.items()]
    assert parse(SampleRun, flags) == parse(SampleRun, ["--config", str(tmp_path / "pipeline.yaml")])
    run("sample.py", "--config", tmp_path / "pipeline.yaml", "--logdir", tmp_path / "file")
    loras, picture = ("classifier_lora.safetensors", "base_lora.safetensors:0.5"), Control(PICTURES[:1])
    guided = {"classifier": given["classifier_path"], "classifier_scale": 30.0}
    expected = sample(files, *loras, controlnet="canny.pt", control=picture, **guided)
    assert np.abs(samples_in(tmp_path / "file") - expected).max() <= 1
