"""Sampling from a checkpoint of one generator."""

import numpy as np
import pytest
import torch
from cascade_making import random_images
from checkpoint_making import FEW, make_file, sample

from diff_dalle.checkpoints.checkpoint import Identity, save_file
from diff_dalle.config import InputError, expectations
from diff_dalle.diffusion import SAMPLERS, DiffusionConfig, GuidanceConfig
from diff_dalle.diffusion.editing import EditConfig
from diff_dalle.diffusion.sampling import SamplerConfig
from diff_dalle.images.signal import to_uint8
from diff_dalle.models.generator import GeneratorConfig
from diff_dalle.sampling.generator_stage import GeneratorStage
from diff_dalle.sampling.pipeline import load
from diff_dalle.sampling.request import ImageEdit, Request
from diff_dalle.sampling.stage import StageJob
from diff_dalle.sampling.stage_settings import StageSettings


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    return load(make_file(tmp_path_factory.mktemp("pipeline")), device="cpu")


def test_images_have_the_documented_form_and_depend_on_their_seeds(pipeline):
    images = sample(pipeline, ["a red circle"] * 3, seed=5)
    assert images.shape == (3, 16, 16, 3) and images.dtype == np.uint8
    assert np.array_equal(images, sample(pipeline, ["a red circle"] * 3, seed=5))
    assert (images[0] != images[1]).any()


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


def test_other_sizes_work_and_impossible_ones_are_refused(pipeline):
    assert sample(pipeline, "a star", size=(8, 24)).shape == (1, 8, 24, 3)
    with pytest.raises(InputError, match="size is 16×15, but width and height must be multiples of 2"):
        sample(pipeline, "a star", size=(15, 16))


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


def test_sample_stages_and_sample_agree(pipeline):
    settings = [StageSettings(FEW)]
    (images,) = pipeline.sample_stages(Request(["a star"], [0]), settings, progress=False)
    assert np.array_equal(images, sample(pipeline, ["a star"])) and np.array_equal(images, sample(pipeline, "a star"))
    with pytest.raises(InputError, match="settings has 2 values, but the pipeline has 1 stage: give one for each"):
        pipeline.sample_stages(Request(["a star"], [0]), settings * 2)
    assert (pipeline.image_size, pipeline.factor, pipeline.has_base, pipeline.step) == (16, 1, True, 7)


def test_no_prompt_gives_no_image(pipeline):
    assert sample(pipeline, []).shape == (0, 16, 16, 3)


def test_lists_must_be_as_long_as_the_prompts(pipeline):
    for name in ("seeds", "labels", "classifier_prompts"):
        with pytest.raises(InputError, match=f"{name} has 1 value for 2 prompts: give one for each"):
            sample(pipeline, ["a star", "a ring"], **{name: [1]})


def test_settings_of_upsamplers_are_refused_for_a_base(pipeline):
    stage = pipeline.stages[0]
    for settings in ({"noise_level": 0.1}, {"blur_level": 0.5}, {"tile_size": 8}):
        with pytest.raises(InputError, match=f"{next(iter(settings))} is .*, but only upsamplers .*have it"):
            stage.check(StageJob(Request(["a star"], [0]), StageSettings(**settings), (16, 16)))
    with pytest.raises(InputError, match="batch_size is 0, but must be at least 1"):
        sample(pipeline, "a star", batch_size=0)
    with pytest.raises(InputError, match="are required by upsamplers without a base generator, and by these only"):
        sample(pipeline, "a star", low_res=np.zeros((1, 8, 8, 3), dtype=np.uint8))


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


def test_classes(tmp_path):
    by_class = load(make_file(tmp_path, enc_attn_dim=0, num_classes=3, learn_sigma=True), "cpu")
    images = sample(by_class, ["", ""], seeds=[1, 1], labels=[0, 2])
    assert (images[0] != images[1]).any()
    with pytest.raises(InputError, match="labels"):
        sample(by_class, ["", ""])
    with pytest.raises(InputError, match="between 0 and 2"):
        sample(by_class, [""], labels=[4])
    with pytest.raises(InputError, match="no text encoder"):
        sample(by_class, [""], labels=[1], negative_prompt="blur")


def test_without_conditions(tmp_path):
    free = load(make_file(tmp_path, enc_attn_dim=0, caption_dropout=0), "cpu")
    images = sample(free, ["", ""], seed=1)
    assert images.shape == (2, 16, 16, 3) and (images[0] != images[1]).any()
    with pytest.raises(InputError, match="no text encoder"):
        sample(free, ["a star"])
    with pytest.raises(InputError, match="not class-conditional"):
        sample(free, [""], labels=[0])


def test_loading_checks_the_tokenizer(tmp_path):
    path = make_file(tmp_path)
    content = torch.load(path, weights_only=True)
    save_file(path, "ema", Identity("generator", content["config"], "other-99:0"), 1, 1, content["state"])
    with pytest.raises(InputError, match="tokenizer other-99:0.*(--)?bpe_path"):
        load(path)


def test_to_uint8_rounds_and_clips():
    values = torch.tensor([-2.0, -1.0, 0.0, 0.999, 1.0, 3.0]).view(1, 1, 1, 6)
    assert to_uint8(values).flatten().tolist() == [0, 0, 128, 255, 255, 255]
