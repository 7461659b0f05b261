"""Sampling from a checkpoint of one generator."""

import numpy as np
import pytest
import torch
from cascade_making import random_images
from checkpoint_making import make_file, sample

from diff_dalle.checkpoints.checkpoint import Identity, save_file
from diff_dalle.config import InputError, expectations
from diff_dalle.diffusion import SAMPLERS, DiffusionConfig, GuidanceConfig
from diff_dalle.diffusion.editing import EditConfig
from diff_dalle.diffusion.sampling import SamplerConfig
from diff_dalle.images.signal import to_uint8
from diff_dalle.models.generator import GeneratorConfig
from diff_dalle.sampling.pipeline import load
from diff_dalle.sampling.pixel_stages import GeneratorStage
from diff_dalle.sampling.request import ImageEdit


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    return load(make_file(tmp_path_factory.mktemp("pipeline")), device="cpu")


def test_guidance_needs_a_condition(pipeline, tmp_path):
    """By default it is 3 with a condition and off without; an explicit scale without one is refused."""
    unconditional = load(make_file(tmp_path, enc_attn_dim=0, caption_dropout=0), "cpu")
    three, one = (GuidanceConfig(guidance_scale=scale) for scale in (3.0, 1.0))
    assert np.array_equal(sample(pipeline, "a star"), sample(pipeline, "a star", guidance=three))
    assert np.array_equal(sample(unconditional, ""), sample(unconditional, "", guidance=one))
    with pytest.raises(InputError, match="guidance_scale is 3, but there is no caption, class or image embedding"):
        sample(unconditional, "", guidance=three)


def test_guidance_is_that_of_the_previews_of_the_training(tmp_path):
    """Its scale, its interval and the rest; given guidance replaces all of it. An upsampler has its own."""
    flags = {"guidance_scale": 1.5, "guidance_interval": "0,0.9", "sample_interval": 0}
    trained, interval = load(make_file(tmp_path, **flags), "cpu"), (0.0, 0.9)
    images = sample(trained, "a star")
    assert np.array_equal(images, sample(trained, "a star", guidance=GuidanceConfig(1.5, guidance_interval=interval)))
    for other in (GuidanceConfig(), GuidanceConfig(1.5), GuidanceConfig(guidance_interval=interval)):
        assert not np.array_equal(images, sample(trained, "a star", guidance=other))
    (tmp_path / "up").mkdir()
    for given, expected in (({}, 1.0), ({"guidance_scale": 2}, 2.0)):
        upsampler = load(upsampler_paths=[make_file(tmp_path / "up", image_size=32, small_size=16, **given)])
        assert upsampler.upsampler_defaults[0].guidance.guidance_scale == expected


def test_prompt_guidance_and_negative_prompt_matter(pipeline):
    def guided(scale, prompt="a red circle", **options):
        return sample(pipeline, [prompt], guidance=GuidanceConfig(guidance_scale=scale), **options).astype(int)

    assert (guided(1.0) != guided(4.0)).any()
    assert (guided(1.0) != guided(1.0, "a star")).any()
    assert (guided(4.0) != guided(4.0, negative_prompt="a blue square")).any()
    assert (guided(1.0) == guided(1.0, negative_prompt="a blue square")).all()
    assert (guided(1.0, "") == guided(4.0, "")).all()  # an empty prompt is the null condition itself


def test_the_spacing_of_the_steps_matters(pipeline):
    """Of 50 steps on a linear schedule, whose default is log_snr."""
    images = {
        spacing: sample(pipeline, ["a star"], sampler=SamplerConfig("ddim", 4, spacing=spacing))
        for spacing in (None, "even", "trailing", "log_snr")
    }
    assert np.array_equal(images[None], images["log_snr"])
    for other in ("even", "trailing"):
        assert (images[other] != images["log_snr"]).any()


def test_a_flow_samples_and_edits(tmp_path):
    """With text, guidance and steps in its times; known pixels stay."""
    flow = {"noise_schedule": "flow", "diffusion_steps": 1000, "prediction": "x_start", "loss_space": "flow"}
    pipeline, image = load(make_file(tmp_path, **flow), "cpu"), random_images(1, 16, 16)[0]
    for name in SAMPLERS:
        images = sample(pipeline, ["a star"], sampler=SamplerConfig(name, 4))
        assert images.shape == (1, 16, 16, 3) and images.std() > 1
    hole = np.arange(16)[:, None].repeat(16, 1) < 8
    inpainted = sample(pipeline, ["a star"], edit=ImageEdit([image], [hole]))[0]
    assert (inpainted[~hole] == image[~hole]).all() and (inpainted[hole] != image[hole]).any()
    near, far = (
        np.abs(sample(pipeline, ["a star"], edit=ImageEdit([image], config=EditConfig(strength=s)))[0] - image).mean()
        for s in (0.3, 1.0)
    )
    assert near != far
    with pytest.raises(InputError, match="timestep_respacing is '4', but a process in log-SNR has no steps"):
        sample(pipeline, ["a star"], sampler=SamplerConfig(timestep_respacing="4"))


def test_no_prompt_gives_no_image(pipeline):
    assert sample(pipeline, []).shape == (0, 16, 16, 3)


def test_settings_other_than_the_checkpoints_are_refused(pipeline):
    model, diffusion = (expectations(config, "Expected") for config in (GeneratorConfig, DiffusionConfig))
    pipeline.check(model(num_channels=16, small_size=0))
    pipeline.check(diffusion(diffusion_steps=50))
    with pytest.raises(InputError, match=r"num_channels \(32 given, 16 in the checkpoint\); leave these flags out"):
        pipeline.check(model(num_channels=32))
    with pytest.raises(InputError, match=r"diffusion_steps \(100 given, 50 in the checkpoint\)"):
        pipeline.check(diffusion(diffusion_steps=100))


def test_a_moved_vocabulary_is_passed_to_classifiers(tmp_path, monkeypatch):
    loaded = []
    monkeypatch.setattr("diff_dalle.sampling.stage.load_guide", lambda *arguments: loaded.append(arguments[:4]))
    blind = load(make_file(tmp_path, enc_attn_dim=0, caption_dropout=0), "cpu", "fp32", "moved.gz")
    sample(blind, "", classifier="clip.pt")
    assert loaded == [("clip.pt", torch.device("cpu"), "fp32", "moved.gz")]  # once, to check and to use it


def test_negative_conditions_are_encoded_only_if_guidance_uses_them(tmp_path, monkeypatch):
    pipeline, scales = load(make_file(tmp_path), "cpu"), []
    negative = GeneratorStage.negative_conditioning
    for scale in (1.0, 3.0):
        counted = lambda self, *arguments, scale=scale: scales.append(scale) or negative(self, *arguments)  # noqa: E731
        monkeypatch.setattr(GeneratorStage, "negative_conditioning", counted)
        sample(pipeline, ["a star"], guidance=GuidanceConfig(guidance_scale=scale))
    assert scales == [3.0]


def test_loading_checks_the_tokenizer(tmp_path):
    path = make_file(tmp_path)
    content = torch.load(path, weights_only=True)
    save_file(path, "ema", Identity("generator", content["config"], "other-99:0"), 1, 1, content["state"])
    with pytest.raises(InputError, match="tokenizer other-99:0.*(--)?bpe_path"):
        load(path)


def test_to_uint8_rounds_and_clips():
    values = torch.tensor([-2.0, -1.0, 0.0, 0.999, 1.0, 3.0]).view(1, 1, 1, 6)
    assert to_uint8(values).flatten().tolist() == [0, 0, 128, 255, 255, 255]
