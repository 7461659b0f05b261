"""Pipelines by diffusers' names, moved, saved and shown."""

import numpy as np
import pytest
import torch
from cascade_making import make_stage
from PIL import Image

import diff_dalle
from diff_dalle.config import InputError
from diff_dalle.sampling.pipeline import Pipeline

QUICK = {"sample_interval": 0, "text_length": 12, "diffusion_steps": 8, "noise_schedule": "cosine"}


@pytest.fixture
def base(tmp_path):
    make_stage(tmp_path / "base.pt", image_size=16, **QUICK)
    return diff_dalle.load(str(tmp_path / "base.pt"), "cpu", "fp32")


def test_a_call_is_a_sample_by_other_names(base):
    expected = base.sample(["a", "a", "b", "b"], 3, steps=2, guidance_scale=2.0, negative_prompt="c", progress=False)
    called = {"num_inference_steps": 2, "guidance_scale": 2.0, "negative_prompt": "c", "num_images_per_prompt": 2}
    made = {kind: base(["a", "b"], seed=3, output_type=kind, progress=False, **called).images for kind in ("np", "pt")}
    assert np.array_equal(made["np"], expected)
    assert np.array_equal((made["pt"] * 255).round().permute(0, 2, 3, 1).numpy().astype(np.uint8), expected)
    pictures = base(["a", "b"], seed=3, progress=False, **called).images
    assert isinstance(pictures[0], Image.Image) and np.array_equal(np.stack(list(map(np.asarray, pictures))), expected)


def test_a_generator_draws_the_seed(base):
    def images(seed, times=1):
        generator = torch.Generator().manual_seed(seed)
        found = [base("a", 2, generator=generator, output_type="np", progress=False).images for _ in range(times)]
        return found[-1]

    assert np.array_equal(images(5), images(5))
    assert not np.array_equal(images(5), images(6)) and not np.array_equal(images(5), images(5, times=2))


def test_its_size_and_callback(base):
    steps = []
    found = base("a", 2, height=8, width=24, output_type="np", callback=steps.append, progress=False).images
    assert found.shape == (1, 8, 24, 3) and len(steps) == 2


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"height": 8}, "given together"),
        ({"output_type": "jpeg"}, "output_type is 'jpeg', but must be one of pil, np, pt"),
        ({"generator": torch.Generator(), "seed": 1}, "exclude each other"),
    ],
)
def test_what_it_refuses(base, wrong, words):
    with pytest.raises(InputError, match=words):
        base("a", 2, **wrong)


def test_it_says_what_is_loaded_and_moves(base):
    before = base.sample("a", steps=2, progress=False)
    assert repr(base).startswith("Pipeline on cpu in fp32:\n")
    assert "base.pt: " in repr(base) and "16 pixels" in repr(base)
    assert base.to("cpu") is base and base.stages[0]._network is None
    assert np.array_equal(base.sample("a", steps=2, progress=False), before)
    with pytest.raises(InputError, match="cuda"):
        base.to("cuda:7")
    with pytest.raises(InputError, match="made of stages"):
        Pipeline(base.stages).to("cpu")


def test_it_is_saved_as_a_folder_that_loads(base, tmp_path):
    base.save(str(tmp_path / "model"), "fp32")
    saved = diff_dalle.load(str(tmp_path / "model"), "cpu", "fp32")
    assert np.array_equal(saved.sample("a", steps=2, progress=False), base.sample("a", steps=2, progress=False))
    with pytest.raises(InputError, match="model"):
        base.save(str(tmp_path / "model"))
