"""Flags of Guided-Diffusion's commands that say what a checkpoint or another setting says."""

import numpy as np
import pytest
import torch
from network_making import randomize
from script_running import run

from diff_dalle.checkpoints.checkpoint import attention_order
from diff_dalle.checkpoints.foreign import layouts, reading
from diff_dalle.commands.command_line import parse
from diff_dalle.commands.convert import ConvertConfig, convert
from diff_dalle.commands.sample import SampleRun
from diff_dalle.recipes.classifier import ClassifierRun
from diff_dalle.recipes.generator import GeneratorRun
from diff_dalle.sampling.classifier import load_guide
from diff_dalle.unet import EncoderUNetModel, SuperResModel, UNetModel

SHAPE = {"channel_mult": (1, 2), "num_head_channels": 16, "use_scale_shift_norm": True, "resblock_updown": True}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The folder of a class-conditional generator, an upsampler and a classifier of Guided-Diffusion, converted."""
    folder = tmp_path_factory.mktemp("models")
    made = {
        "base": (UNetModel(16, 3, 32, 6, 1, (2,), num_classes=4, use_new_attention_order=True, **SHAPE), 16, 0, True),
        "plain": (UNetModel(16, 3, 32, 3, 1, (2,), **SHAPE), 16, 0, False),
        "up": (SuperResModel(32, 3, 32, 3, 1, (2,), num_classes=4, **SHAPE), 32, 16, False),
        "classifier": (EncoderUNetModel(16, 3, 32, 4, 1, (2,), pool="attention", **SHAPE), 16, 0, False),
    }
    for name, (network, size, small, new_order) in made.items():
        torch.save(randomize(network).state_dict(), folder / f"{name}_raw.pt")
        told = {"image_size": size, "small_size": small, "num_head_channels": 16, "noise_schedule": "linear"}
        order = {"use_new_attention_order": new_order}
        convert(ConvertConfig(model_path=f"{folder}/{name}_raw.pt", out=f"{folder}/{name}.pt", **told, **order))
    return folder


def sample(*flags, ok=True):
    return run("sample.py", *flags, "--use_ddim True --timestep_respacing 2", ok=ok)


def captions(folder):
    return [line.split("\t")[2] for line in (folder / "captions.txt").read_text().splitlines()]


def test_sampling_draws_classes_and_checks_what_flags_say(models, tmp_path):
    given = f"--model_path {models}/base.pt --classifier_path {models}/classifier.pt --logdir {tmp_path}"
    flags = "--class_cond True --classifier_pool attention --classifier_use_fp16 True --clip_denoised True"
    flags += " --classifier_width 32 --classifier_attention_resolutions 8 --classifier_resblock_updown True"
    sample(given, flags, "--learn_sigma True --num_samples 6")
    drawn = captions(tmp_path)
    assert len(set(drawn)) > 1 and set(drawn) <= {f"class {number}" for number in range(4)}
    sample(f"--model_path {models}/base.pt --logdir {tmp_path} --seed 2 --num_samples 2")
    assert captions(tmp_path) == drawn[2:4]  # the class of an image follows from its seed
    sample(f"--model_path {models}/base.pt --logdir {tmp_path} --labels 3")
    assert captions(tmp_path) == ["class 3"]
    assert np.load(tmp_path / "samples_1x16x16x3.npz")["arr_1"].tolist() == [3]

    wrong = sample(given, "--class_cond False", ok=False).stderr
    assert "class_cond (False given, True in the checkpoint)" in wrong
    wrong = sample(f"--model_path {models}/plain.pt", "--class_cond True", ok=False).stderr
    assert "class_cond (True given, False in the checkpoint)" in wrong
    wrong = sample(given, "--classifier_pool spatial --classifier_width 64", ok=False).stderr
    assert "classifier_width (64 given, 32 in the checkpoint)" in wrong
    assert "classifier_pool (spatial given, attention in the checkpoint)" in wrong


def test_the_classifier_has_a_precision_of_its_own(models, monkeypatch, tmp_path):
    found, load = [], load_guide

    def spy(path, device, precision, *rest):
        found.append(load(path, device, precision, *rest))
        return found[-1]

    monkeypatch.setattr("diff_dalle.sampling.classifier.load_guide", spy)
    given = f"--model_path {models}/base.pt --classifier_path {models}/classifier.pt --logdir {tmp_path}"
    sample(given, "--classifier_precision bf16")
    assert [guide.precision for guide in found] == ["bf16"] and "model" in vars(found[0])  # which guided


def test_an_upsampler_takes_samples_of_a_base_generator(models, tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (3, 16, 16, 3), dtype=np.uint8)
    np.savez(tmp_path / "labeled.npz", images, np.array([3, 0, 2]))
    np.savez(tmp_path / "images.npz", images)
    np.savez(tmp_path / "floats.npz", images.astype(float))
    np.savez(tmp_path / "short.npz", images, np.array([3, 0]))
    upsampler = f"--model_path {models}/up.pt --logdir {tmp_path} --base_samples {tmp_path}"
    sample(f"{upsampler}/labeled.npz --large_size 32 --small_size 16 --class_cond True --num_samples 4")
    assert captions(tmp_path) == ["class 3", "class 0", "class 2", "class 3"]
    sample(f"{upsampler}/images.npz")
    assert len(captions(tmp_path)) == 3 and all(captions(tmp_path))
    for flags, wrong in (
        ("/labeled.npz --large_size 64", "image_size (64 given, 32 in the checkpoint)"),
        ("/floats.npz", "has float64 [3, 16, 16, 3] as arr_0"),
        ("/short.npz", "has int64 [2] as arr_1"),
        ("/labeled.npz --low_res_dir x", "exclude each other"),
        (f"/labeled.npz --upsampler_paths {models}/up.pt", "needs either --model_path or --upsampler_paths"),
    ):
        assert wrong in sample(upsampler + flags, ok=False).stderr


def test_the_order_of_rows_is_checked_where_another_project_wrote_the_file(models, monkeypatch):
    assert attention_order(f"{models}/base.pt") is None
    recognize = reading.recognize
    told = {"image_size": 16, "num_head_channels": 16, "noise_schedule": "linear", "use_new_attention_order": True}
    for module in (reading, layouts):
        monkeypatch.setattr(module, "recognize", lambda state, path: recognize(state, path, told))
    path = f"{models}/base_raw.pt"
    assert attention_order(path) is True
    wrong = sample(f"--model_path {path} --use_new_attention_order False", ok=False).stderr
    assert "use_new_attention_order (False given, True in the checkpoint)" in wrong


def test_flags_of_training():
    run = parse(ClassifierRun, ["--anneal_lr", "--classifier_use_fp16", "--classifier_pool", "attention"])
    assert (run.optim.lr_anneal, run.optim.lr_anneal_steps) == ("linear", run.training.iterations)
    assert run.training.precision == "fp16"
    assert parse(ClassifierRun, ["--anneal_lr", "False"]).optim.lr_anneal_steps == 0
    with pytest.warns(UserWarning, match="--learn_sigma has no effect: a classifier does not denoise"):
        parse(ClassifierRun, ["--learn_sigma", "True"])
    with pytest.raises(ValueError, match="--classifier_pool is 'spatial', but must be attention"):
        parse(ClassifierRun, ["--classifier_pool", "spatial"])
    with pytest.raises(ValueError, match="--anneal_lr sets it to linear"):
        parse(ClassifierRun, ["--lr_anneal", "cosine", "--anneal_lr", "True"])

    flags = ["--class_cond", "True", "--num_classes", "5", "--large_size", "64", "--small_size", "16"]
    model = parse(GeneratorRun, flags).model
    assert (model.unet.num_classes, model.unet.image_size) == (5, 64)
    with pytest.raises(ValueError, match="--num_classes is 0, but --class_cond is True"):
        parse(GeneratorRun, ["--class_cond", "True"])
    with pytest.raises(ValueError, match="--num_classes is 5, but --class_cond is False"):
        parse(GeneratorRun, ["--class_cond", "False", "--num_classes", "5"])
    with pytest.warns(UserWarning, match="--use_new_attention_order has no effect"):
        parse(GeneratorRun, ["--use_new_attention_order", "True"])
    clipped = [
        parse(SampleRun, ["--model_path", "x", "--clip_denoised", text]).guidance.thresholding
        for text in ("True", "False")
    ]
    assert clipped == ["static", "none"]
