"""Checkpoints and prompts → images."""

import numpy as np
import pytest
import torch
from checkpoint_making import FEW, make_file, make_run, sample

from diff_dalle.checkpoints.checkpoint import Identity, save_file
from diff_dalle.checkpoints.kinds import KINDS
from diff_dalle.commands.info import network_cost
from diff_dalle.config import expectations
from diff_dalle.diffusion import DiffusionConfig, GuidanceConfig
from diff_dalle.diffusion.sampling import SamplerConfig
from diff_dalle.errors import InputError
from diff_dalle.images.pixels import to_uint8
from diff_dalle.models.generator import Generator, GeneratorConfig
from diff_dalle.sampling.pipeline import load
from diff_dalle.sampling.request import Request, StageSettings


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    return load(make_file(tmp_path_factory.mktemp("pipeline")), device="cpu")


def test_images_have_the_right_form_and_follow_their_seeds(pipeline):
    images = sample(pipeline, ["a red circle"] * 3, seed=5)
    assert images.shape == (3, 16, 16, 3) and images.dtype == np.uint8
    assert np.array_equal(images, sample(pipeline, ["a red circle"] * 3, seed=5))
    assert (images[0] != images[1]).any()


@pytest.mark.parametrize("sampler", ["ancestral", "ddim", "dpm++2m", "unipc", "heun"])
def test_an_image_is_the_same_in_any_batch(pipeline, sampler):
    options = {"sampler": SamplerConfig(sampler=sampler, timestep_respacing="4", eta=0.7 if sampler == "ddim" else 0.0)}
    prompts = ["a red circle", "two blue squares", "", "a star", "a ring"]
    together = sample(pipeline, prompts, seed=3, batch_size=5, **options)
    alone = sample(pipeline, [prompts[3]], seeds=[6], **options)
    assert np.abs(together[3].astype(int) - alone[0]).max() <= 1


def test_prompt_guidance_and_negative_prompt_matter(pipeline):
    def guided(scale, prompt="a red circle", **options):
        return sample(pipeline, [prompt], guidance=GuidanceConfig(guidance_scale=scale), **options).astype(int)

    assert (guided(1.0) != guided(4.0)).any()
    assert (guided(1.0) != guided(1.0, "a star")).any()
    assert (guided(4.0) != guided(4.0, negative_prompt="a blue square")).any()
    assert (guided(1.0) == guided(1.0, negative_prompt="a blue square")).all()
    assert (guided(1.0, "") == guided(4.0, "")).all()  # an empty prompt is the null condition itself


def test_other_sizes_work_and_impossible_ones_are_named(pipeline):
    assert sample(pipeline, "a star", size=(8, 24)).shape == (1, 8, 24, 3)
    with pytest.raises(InputError, match="multiple of 2"):
        sample(pipeline, "a star", size=(15, 16))


def test_every_stages_pictures_are_those_of_the_only_one(pipeline):
    (images,) = pipeline.sample_stages(["a star"], sampler=FEW, progress=False)
    assert np.array_equal(images, sample(pipeline, ["a star"])) and np.array_equal(images, sample(pipeline, "a star"))
    assert (pipeline.image_size, pipeline.factor, pipeline.has_base, pipeline.step) == (16, 1, True, 7)


def test_lists_must_be_as_long_as_the_prompts(pipeline):
    for name in ("seeds", "labels", "classifier_prompts"):
        with pytest.raises(InputError, match="2 prompts need as many seeds, labels and classifier_prompts"):
            sample(pipeline, ["a star", "a ring"], **{name: [1]})


def test_settings_that_a_base_does_not_have_are_refused(pipeline):
    stage = pipeline.stages[0]
    for settings in ({"noise_level": 0.1}, {"blur_level": 0.5}, {"tile_size": 8}):
        with pytest.raises(InputError, match="noise_level, blur_level and tile_size are for up-samplers"):
            stage.check(Request(["a star"], [0]), StageSettings(**settings), (16, 16))
    with pytest.raises(InputError, match="batch_size is 0, but must be at least 1"):
        sample(pipeline, "a star", batch_size=0)
    with pytest.raises(InputError, match="are needed by up-samplers without a base generator, and by these alone"):
        sample(pipeline, "a star", low_res=np.zeros((1, 8, 8, 3), dtype=np.uint8))


def test_settings_that_are_not_the_checkpoints_are_refused(pipeline):
    model, diffusion = (expectations(config, "Expected") for config in (GeneratorConfig, DiffusionConfig))
    pipeline.check(model(num_channels=16, small_size=0))
    pipeline.check(diffusion(diffusion_steps=50))
    with pytest.raises(InputError, match=r"num_channels \(32 asked for, 16 in the checkpoint\); leave these flags out"):
        pipeline.check(model(num_channels=32))
    with pytest.raises(InputError, match=r"diffusion_steps \(100 asked for, 50 in the checkpoint\)"):
        pipeline.check(diffusion(diffusion_steps=100))


def test_a_vocabulary_that_has_moved_is_the_classifiers_too(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("diff_dalle.sampling.stage.load_classifier", lambda *arguments: asked.append(arguments))
    blind = load(make_file(tmp_path, enc_attn_dim=0, caption_dropout=0), "cpu", "fp32", "moved.gz")
    sample(blind, "", classifier="clip.pt")
    assert asked == [("clip.pt", "cpu", "fp32", "moved.gz")] * 2  # to see whether it fits, and to use it


def test_classes(tmp_path):
    by_class = load(make_file(tmp_path, enc_attn_dim=0, num_classes=3, learn_sigma=True), "cpu")
    images = sample(by_class, ["", ""], seeds=[1, 1], labels=[0, 2])
    assert (images[0] != images[1]).any()
    with pytest.raises(InputError, match="labels"):
        sample(by_class, ["", ""])
    with pytest.raises(InputError, match="between 0 and 2"):
        sample(by_class, [""], labels=[4])
    with pytest.raises(InputError, match="does not read text"):
        sample(by_class, [""], labels=[1], negative_prompt="blur")


def test_without_conditions(tmp_path):
    free = load(make_file(tmp_path, enc_attn_dim=0, caption_dropout=0), "cpu")
    images = sample(free, ["", ""], seed=1)
    assert images.shape == (2, 16, 16, 3) and (images[0] != images[1]).any()
    with pytest.raises(InputError, match="does not read text"):
        sample(free, ["a star"])
    with pytest.raises(InputError, match="not conditioned on classes"):
        sample(free, [""], labels=[0])


def test_loading_checks_kind_and_tokenizer(tmp_path):
    path = make_file(tmp_path)
    content = torch.load(path, weights_only=True)
    save_file(path, "ema", Identity("generator", content["config"], "other-99:0"), 1, 1, content["state"])
    with pytest.raises(InputError, match="tokenizer other-99:0.*--bpe_path"):
        load(path)
    save_file(path, "ema", Identity("classifier", content["config"], None), 1, 1, content["state"])
    with pytest.raises(InputError, match="holds a classifier"):
        load(path)


def test_uint8_rounds_and_clips():
    values = torch.tensor([-2.0, -1.0, 0.0, 0.999, 1.0, 3.0]).view(1, 1, 1, 6)
    assert to_uint8(values).flatten().tolist() == [0, 0, 128, 255, 255, 255]


def test_cost_equals_a_real_network_and_shrinks_with_checkpointing():
    kind, run = KINDS["generator"], make_run()
    costs = network_cost(kind, kind.settings_of(run), 100)
    cost, lean = costs.plain, costs.checkpointed
    assert cost.parameters == sum(p.numel() for p in Generator(run.model, 100).parameters())
    assert lean.activation_bytes < 0.7 * cost.activation_bytes and lean.parameters == cost.parameters
    assert cost.training_bytes(3, averages=2) == cost.parameters * 24 + 3 * cost.activation_bytes
