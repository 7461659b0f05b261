"""Errors of cascades, raised before any network is loaded."""

from dataclasses import replace

import numpy as np
import pytest
from cascade_making import FAST, different, edited, idle, random_images, stages, upsamplers
from checkpoint_making import FEW

from diff_dalle.config import InputError
from diff_dalle.diffusion import GuidanceConfig
from diff_dalle.diffusion.sampling import SamplerConfig
from diff_dalle.randomness import MAX_SEED
from diff_dalle.sampling.pipeline import Pipeline, load
from diff_dalle.sampling.stage_settings import UpsamplersConfig


def up(**lists):
    return {"upsampling": upsamplers(**lists)}


def by(sampler, steps=4, eta=0.0, **respacing):
    return {"sampler": SamplerConfig(sampler, None if respacing else steps, eta, **respacing)}


REFUSED = {
    "base's steps": (by("ddim", 200), "base.pt: steps is 200, but must be at most"),
    "later steps": (up(upsampler_steps=(4, 200)), "top.pt: steps is 200, but must be at most"),
    "noise not trained": (up(noise_level=(0.5, 0.6)), "top.pt: noise_level is 0.6, but must lie between 0 and 0.5"),
    "blur not trained": (up(blur_level=(0.3,)), "middle.pt: blur_level is 0.3, but must be 0, or from 0.4"),
    "tiles": (up(tile_size=(0, 15)), "top.pt: (--)?tile_size is 15, but must be a multiple of 2"),
    "overlap": (
        up(tile_size=(16,)),
        r"middle.pt: (--)?tile_overlap is 32, but must be smaller than (--)?tile_size \(16\)",
    ),
    "batch size": ({"upsampling": [FAST, {"batch_size": 0}]}, "batch_size is 0, but must be at least 1"),
    "base's batch size": ({"batch_size": 0}, "batch_size is 0, but must be at least 1"),
    "too many settings": ({"upsampling": [FAST] * 3}, "settings for 3 upsamplers, but the pipeline has 2"),
    "too few settings": ({"upsampling": [FAST]}, "settings for 1 upsampler, but the pipeline has 2"),
    "guidance of nothing": (up(upsampler_guidance_scale=(2.0,)), "middle.pt: guidance_scale is 2, but there is no"),
    "low_res and a base": (
        {"low_res": random_images(3, 8, 8)},
        "low_res, low_res_dir.* required by upsamplers without",
    ),
    "seeds": ({"seeds": [1]}, "seeds has 1 value for 3 prompts: give one for each"),
    "labels": ({"labels": [1, 2]}, "labels has 2 values for 3 prompts: give one for each"),
    "classifier's prompts": ({"classifier_prompts": []}, "classifier_prompts has 0 values for 3 prompts"),
    "noise of a base": ({"noise_level": 0.1}, "base.pt: noise_level is 0.1, but only upsamplers have it"),
    "blur of a base": ({"blur_level": 0.5}, "base.pt: blur_level is 0.5, but only upsamplers have it"),
    "tiles of a base": ({"tile_size": 8}, "base.pt: tile_size is 8, but only upsamplers and stage B have it"),
    "shift of a base": ({"shift": 0.5}, "base.pt: shift is 0.5, but only stages B and C of a latent cascade have it"),
    "t_start of a base": ({"t_start": 0.5}, "base.pt: t_start is 0.5, but only stages B and C"),
    "t_end of a base": ({"t_end": 0.5}, "base.pt: t_end is 0.5, but only stages B and C"),
    "seeds below 0": ({"seeds": [1, 2, -1]}, r"seed is -1, but must lie between 0 and 2\^63 - 1"),
    "last seed too large": (up(upsampler_seed=(0, MAX_SEED - 1)), f"top.pt: upsampler_seed is {MAX_SEED + 1}, but"),
    "random variation": (edited(variation=0.5) | by("ancestral"), "base.pt: (--)?variation requires a deterministic"),
    "variation with eta": (edited(variation=0.5) | by("ddim", eta=0.5), "base.pt: .* not ddim with eta 0.5"),
    "too narrow": (edited(size=(2, 600)), "base.pt: an image of 600 × 2 pixels is too narrow"),
    "no such step": (
        edited(strength=0.001) | by("ddim", timestep_respacing="0,4"),
        "base.pt: (--)?strength 0.001 leaves no step",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_impossible_settings_are_refused_before_any_network_is_loaded(cascade, case):
    options, words = REFUSED[case]
    with pytest.raises(InputError, match=words):
        stages(idle(cascade), **options)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"sampler": ("ddim", "heun"), "eta": (0.5,)}, r"upsampler_.*eta is 0.5, but only .* ddim .* \(upsampler 2\)"),
        (
            {"spacing": ("even",), "timestep_respacing": ("4", "ddim4")},
            r"spacing and .*respacing exclude .* \(upsampler 1\)",
        ),
        ({"sampler": ("ddim", "heunn")}, "upsampler_sampler is 'heunn', but must be one of .* did you mean heun"),
        ({"sampler": ("ddim", "heun"), "eta": (0.0, 0.0, 0.0)}, "upsampler_sampler has 2 values for 3 upsamplers"),
        ({"batch_size": (4, 0)}, "upsampler_batch_size is 0, but must be at least 1"),
        ({"classifier_scale": (2.0,)}, "upsampler_classifier_scale is set, .* with upsampler_classifier_paths"),
    ],
)
def test_impossible_settings_of_upsamplers_are_named(settings, words):
    with pytest.raises(InputError, match=words):
        UpsamplersConfig(**{f"upsampler_{name}": values for name, values in settings.items()})


def test_a_classifier_must_fit_its_own_stage(stage_files, cascade):
    def guided(middle, top=None, gradient="x_t", **options):
        settings = replace(FAST, classifier_gradient=gradient)
        paths = (stage_files.get(f"classifier {name}") for name in (middle, top))
        return {"upsampling": [replace(settings, classifier=path) for path in paths], **options}

    for fitting in (guided("16", "32"), guided("16", "32", "x_start"), guided("clean", None, "x_start")):
        assert stages(cascade, ["a star"], **fitting)[2].shape == (1, 32, 32, 3)
    cases = [
        (guided("16", "16"), "top.pt: .* trained on 16×16 images and cannot guide 32×32 images"),
        (guided("16", size=(32, 64)), "middle.pt: .* on 16×16 images and cannot guide 32×16 images"),
        (guided("clean"), "middle.pt: .*noised False.*classifier_gradient to x_start"),
    ]
    for options, words in cases:
        with pytest.raises(InputError, match=words):
            stages(idle(cascade), **options)


def test_upsamplers_alone_refuse_settings_of_a_base(upsamplers_only):
    low_res = random_images(3, 8, 8)
    cases = [
        ({}, "low_res, low_res_dir.* are required by upsamplers without a base"),
        ({"low_res": low_res[:2]}, "low_res has 2 images for 3 prompts: give one for each"),
        ({"low_res": low_res, "size": (32, 32)}, r"follows from the low-resolution images.*\(sample_size\)"),
        ({"low_res": low_res / 255}, r"low_res is float64 of shape \[3, 8, 8, 3\], but must be uint8 \[N, h, w, 3\]"),
        ({"low_res": low_res[..., 0]}, r"low_res is uint8 of shape \[3, 8, 8\], but must be"),
        ({"low_res": low_res, "guidance": GuidanceConfig(guidance_scale=2.0)}, "set the upsamplers' own"),
        ({"low_res": low_res, "sampler": FEW}, "sampler, .* are set for a base generator, but there is none"),
        ({"low_res": low_res, "batch_size": 2}, "batch_size are set for a base generator, but there is none"),
        ({"low_res": low_res, **edited()}, r"support a mask \(mask\) only"),
        ({"low_res": low_res, **edited(mask=np.eye(16, dtype=bool), strength=0.5)}, "only, without strength"),
    ]
    for options, words in cases:
        with pytest.raises(InputError, match=words):
            stages(idle(upsamplers_only), **options)


def test_inputs_without_effect_are_refused(stage_files):
    blind, low_res = load("", "cpu", upsampler_paths=[stage_files["middle"]]), {"low_res": random_images(1, 8, 8)}
    cases = [
        (["a star"], {}, "prompts are given, but this generator has no text encoder"),
        ([""], {"negative_prompt": "blur"}, "negative_prompt is 'blur', but this generator has no text encoder"),
        ([""], {"labels": [1]}, "labels are given, but this generator is not class-conditional"),
    ]
    for prompts, options, words in cases:
        with pytest.raises(InputError, match=words):
            stages(idle(blind), prompts, **low_res, **options)
    with pytest.raises(InputError, match="settings for 1 upsampler, but the pipeline has 0"):
        stages(idle(load(stage_files["exact"], "cpu")), [""], upsampling=FAST)
    guided = replace(FAST, classifier=stage_files["classifier 16"], classifier_scale=60.0)  # which reads the prompt
    one, other = (stages(blind, [prompt], upsampling=guided, **low_res) for prompt in ("a star", "a ring"))
    assert different(one, other, [0])


def test_stages_must_be_of_the_right_kind_and_size(stage_files):
    base, middle, large = (stage_files[name] for name in ("exact", "middle", "classes"))
    cases = [
        (middle, [], "middle.pt is an upsampler, not a base generator: give it with upsampler_paths"),
        ("", [base], "exact.pt is a base generator, not an upsampler: give it with model_path"),
        (base, [middle, base], "exact.pt is a base generator, not an upsampler: only model_path can be one"),
        (base, [large], "exact.pt generates 8-pixel images, but .*classes.pt upsamples 16-pixel images"),
        ("", [large, middle], "classes.pt generates 64-pixel images, but .*middle.pt upsamples 8-pixel images"),
        ("", [], "there is no checkpoint: give a generator's with model_path"),
        (base, ["nowhere.pt"], "nowhere.pt does not exist"),
        (
            base,
            [stage_files["classifier 16"]],
            "a classifier, but a generator, a decoder, a stage_b or a stage_c is req",
        ),
    ]
    for path, upsampler_paths, words in cases:
        with pytest.raises(InputError, match=words):
            load(path, "cpu", upsampler_paths=upsampler_paths)
    with pytest.raises(InputError, match="at least one generator"):
        Pipeline([])
