"""Cascades: sizes, seeds, settings of each stage, memory, processes."""

import contextlib
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from cascade_making import (
    FAST,
    NO_TEXT,
    PROMPTS,
    close,
    different,
    edited,
    idle,
    make_stage,
    random_images,
    reading,
    same,
    stages,
    upsamplers,
    watching,
)
from checkpoint_making import FEW
from marks import slow

from diff_dalle.config import InputError
from diff_dalle.diffusion import GuidanceConfig
from diff_dalle.diffusion.sampling import SamplerConfig
from diff_dalle.images.signal import from_uint8
from diff_dalle.sampling.pipeline import Pipeline, load
from diff_dalle.sampling.request import Request
from diff_dalle.sampling.stage import StageJob
from diff_dalle.sampling.stage_settings import StageSettings

ONCE = GuidanceConfig(guidance_scale=1.0)


def test_every_stage_upsamples_the_images_of_the_stage_before(cascade):
    request, settings = Request(PROMPTS, range(3)), [StageSettings(FEW), FAST, FAST]
    with watching(cascade.stages[1]) as middle, watching(cascade.stages[2]) as top:
        images = cascade.sample_stages(request, settings, progress=False)
    assert [each.shape for each in images] == [(3, 8, 8, 3), (3, 16, 16, 3), (3, 32, 32, 3)]
    assert all(each.dtype == np.uint8 and 10 < each.std() < 100 for each in images)
    for small, seen in ((images[0], middle), (images[1], top)):
        assert len(seen) == 4 and all(torch.equal(cond.low_res, from_uint8(small)) for _, cond in seen)
        assert not any(cond.low_res_level.any() or cond.low_res_blur.any() for _, cond in seen)
    assert (cascade.image_size, cascade.factor, cascade.has_base, cascade.step) == (32, 4, True, 7)
    assert np.array_equal(cascade.sample(PROMPTS, sampler=FEW, upsampling=FAST, progress=False), images[-1])
    with pytest.raises(InputError, match="settings has 2 values, but the pipeline has 3 stages: give one for each"):
        cascade.sample_stages(request, settings[:2])


def test_any_size_that_the_networks_divide(cascade):
    images = stages(cascade, ["a star"], size=(24, 48))
    assert [each.shape[1:3] for each in images] == [(6, 12), (12, 24), (24, 48)]
    for height, width in ((20, 32), (32, 36), (0, 32)):
        with pytest.raises(InputError, match=f"{width}×{height}, .* must be multiples of 8.*sample_size"):
            stages(idle(cascade), ["a star"], size=(height, width))


def test_a_size_is_a_multiple_of_every_network_s_divisor(tmp_path):
    """A base that divides by 2, then ×3 by a network that divides by 4: 6 pixels satisfy the first, 12 both."""
    base = make_stage(tmp_path / "base.pt", channel_mult="1,1", **NO_TEXT)
    triple = make_stage(tmp_path / "triple.pt", image_size=24, small_size=8, channel_mult="1,1,1", **NO_TEXT)
    cascade = load(base, "cpu", upsampler_paths=[triple])
    assert [each.shape[1:3] for each in stages(cascade, [""], size=(12, 12))] == [(4, 4), (12, 12)]
    with pytest.raises(InputError, match="18×18, .* must be multiples of 12"):
        stages(idle(cascade), [""], size=(18, 18))


def test_upsamplers_alone(upsamplers_only):
    for height, width in ((8, 8), (5, 7)):
        low_res = random_images(3, height, width)
        images = stages(upsamplers_only, low_res=low_res)
        assert [each.shape for each in images] == [(3, k * height, k * width, 3) for k in (2, 4)]
        assert different(images, stages(upsamplers_only, low_res=255 - low_res), (0, 1))
    assert not upsamplers_only.has_base and upsamplers_only.tokenizer is None and upsamplers_only.factor == 4


def test_low_resolution_images_that_the_networks_do_not_divide_are_refused(tmp_path):
    path = make_stage(tmp_path / "deep.pt", image_size=16, small_size=8, channel_mult="1,1,2", **NO_TEXT)
    deep = load("", "cpu", upsampler_paths=[path])
    assert stages(deep, [""], low_res=random_images(1, 6, 8))[0].shape == (1, 12, 16, 3)
    with pytest.raises(InputError, match="low_res is 9×8, but width and height must be multiples of 2"):
        stages(idle(deep), [""], low_res=random_images(1, 8, 9))


def test_each_stage_may_read_text_or_not(stage_files, cascade):
    assert different(stages(cascade, ["a star"]), stages(cascade, ["a ring"]), range(3))
    exact, *paths = (stage_files[name] for name in ("exact", "middle", "top"))
    mixed = load(exact, "cpu", upsampler_paths=paths, keep_loaded=True)
    guided = {"upsampling": [FAST, replace(FAST, guidance=GuidanceConfig(guidance_scale=3.0))]}
    star = stages(mixed, ["a star"], **guided)
    for other in (stages(mixed, ["a ring"], **guided), stages(mixed, ["a star"], negative_prompt="blur", **guided)):
        assert same(star, other, (0, 1)) and different(star, other, [2])


def test_classes_of_an_upsampler(stage_files):
    by_class = load(stage_files["base"], "cpu", upsampler_paths=[stage_files["middle"], stage_files["classes"]])
    images = stages(by_class, ["", ""], seeds=[1, 1], labels=[0, 2])
    one, other = ([each[i : i + 1] for each in images] for i in (0, 1))
    assert images[2].shape == (2, 64, 64, 3) and close(one[:2], other[:2]) and different(one, other, [2])
    with pytest.raises(InputError, match="classes.pt: .*give labels from 0 to 2"):
        stages(idle(by_class), ["", ""])
    with pytest.raises(InputError, match="classes.pt: labels must lie between 0 and 2"):
        stages(idle(by_class), ["", ""], labels=[0, 4])


# ------------------------------------------------------------------------------------------------ settings of one stage


COMMON = {"sampler": "ddim", "steps": 4, "seed": 5, "noise": 0.1, "blur": 0.4, "classifier": "none"}
NAMES = {"noise": "noise_level", "blur": "blur_level", "classifier": "upsampler_classifier_paths"}


@pytest.fixture(scope="module")
def star(cascade, stage_files):
    """Sample with settings of both upsamplers: COMMON but for what is given, one value for each."""

    def sampled(**changed):
        lists = {**{name: (value,) * 2 for name, value in COMMON.items()}, **changed}
        given = {NAMES.get(name, name if "tile" in name else f"upsampler_{name}"): lists[name] for name in lists}
        paths = given["upsampler_classifier_paths"]
        given["upsampler_classifier_paths"] = tuple(stage_files.get(path, path) for path in paths)
        return stages(cascade, ["a star"], upsampling=upsamplers(**given))

    return sampled


@pytest.fixture(scope="module")
def plain(star):
    return star()


@pytest.mark.parametrize(
    ("name", "changed"), [("sampler", "heun"), ("steps", 7), ("seed", 6), ("noise", 0.4), ("blur", 0.6)]
)
def test_a_setting_takes_effect_at_its_stage_only(star, plain, name, changed):
    one = {NAMES.get(name, f"upsampler_{name}"): COMMON[name]}
    assert upsamplers(**{key: (value,) for key, value in one.items()}) == upsamplers(
        **{key: (value,) * 2 for key, value in one.items()}
    )
    below, above = star(**{name: (changed, COMMON[name])}), star(**{name: (COMMON[name], changed)})
    assert same(plain, below, [0]) and different(plain, below, (1, 2))
    assert same(plain, above, (0, 1)) and different(plain, above, [2])


@pytest.mark.parametrize(
    "changed",
    [
        {"guidance_scale": (1.0, 4.0)},
        {"eta": (0.0, 0.8)},
        {"classifier": ("none", "classifier 32")},
        {"tile_size": (0, 16), "tile_overlap": (8,)},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_settings_that_only_one_stage_can_have_take_effect_there(star, plain, changed):
    images = star(**changed)
    assert same(plain, images, (0, 1)) and different(plain, images, [2])
    if "classifier" in changed:
        stronger = star(**changed, classifier_scale=(1.0, 60.0))
        assert same(images, stronger, (0, 1)) and different(images, stronger, [2])


def test_batch_sizes_and_steps_are_those_of_their_stage(cascade):
    """A batch size changes no image."""
    with contextlib.ExitStack() as stack:
        seen = [stack.enter_context(watching(stage)) for stage in cascade.stages]
        settings = [replace(FAST, batch_size=n) for n in (2, 3)]
        base = {"guidance": ONCE, "sampler": SamplerConfig(steps=5)}
        images = stages(cascade, batch_size=1, upsampling=settings, **base)
    assert [[len(x) for x, _ in inputs] for inputs in seen] == [[1] * 15, [2] * 4 + [1] * 4, [3] * 4]
    assert close(images, stages(cascade, **base)) and different(images, stages(cascade, guidance=ONCE), [0])


def test_an_upsampler_alone_repeats_its_images_in_the_cascade(cascade):
    settings = upsamplers(noise_level=(0.5,), upsampler_steps=(1,))
    base, images, _ = stages(cascade, ["a star"], upsampling=settings)
    alone = stages(Pipeline(cascade.stages[1:2]), [""], low_res=base.astype(np.uint8), upsampling=settings[0])
    assert same([images], alone, [0])


def test_each_stage_draws_its_own_noise(cascade):
    """For its image and for the low-resolution image."""
    stage, settings = cascade.stages[1], replace(FAST, noise_level=0.5)
    job, low_res = StageJob(Request([""], [0]), settings, (16, 16), 1), from_uint8(random_images(1, 8, 8))
    with watching(stage) as seen:
        for index in (1, 2):
            list(stage.sample_batches(replace(job, index=index), [0], low_res))
    (x, cond), (other_x, other_cond) = seen[0], seen[len(seen) // 2]
    assert not torch.equal(x, other_x) and not torch.equal(cond.low_res, other_cond.low_res)
    assert cond.low_res_level.item() == other_cond.low_res_level.item() == 0.5


def test_degraded_images_depend_on_their_own_seeds_and_the_levels_are_passed_as_conditioning(cascade):
    low_res = random_images(1, 8, 8).repeat(2, 0)

    def conditions(count, first, **settings):
        chosen = replace(FAST, noise_level=0.25, blur_level=0.5, **settings)
        with watching(cascade.stages[1]) as seen:
            stages(Pipeline(cascade.stages[1:2]), [""] * count, first, low_res=low_res[:count], upsampling=chosen)
        return seen[0][1]

    two = conditions(2, 8)
    assert two.low_res_level.tolist() == [0.25] * 2 and two.low_res_blur.tolist() == [0.5] * 2
    assert not torch.equal(two.low_res[0], two.low_res[1])
    assert all(torch.equal(two.low_res[i], conditions(1, 8 + i).low_res[0]) for i in (0, 1))
    assert torch.equal(two.low_res, conditions(2, 0, seed=8).low_res)


# ------------------------------------------------------------------------------------------------ memory and processes


@pytest.mark.parametrize("kind", ["plain", "guided", slow("inpainting in tiles")])
def test_two_networks_are_never_in_memory(stage_files, kind):
    """Without the garbage collector's help: nothing may keep a reference to a network after its stage."""
    paths = [stage_files[name] for name in ("base", "middle", "top")]
    unkept = load(paths[0], "cpu", upsampler_paths=paths[1:])  # keep_loaded False is the default of a cascade
    alive, names = [], []

    def read(stage):
        network = stage.network()
        assert not any(ref() for ref in alive), f"{stage.path} was loaded beside another"
        alive.append(weakref.ref(network))
        names.append(stage.path)
        return network

    chosen, options = [FAST] * 2, {}
    if kind == "guided":
        classifiers = (stage_files[f"classifier {size}"] for size in (16, 32))
        chosen = [replace(FAST, classifier=path, classifier_gradient="x_start") for path in classifiers]
    elif kind == "inpainting in tiles":
        chosen = [replace(FAST, sampler=SamplerConfig("heun", 2), tile_size=8, tile_overlap=4)] * 2
        options = edited(mask=np.eye(16, dtype=bool), inpaint_resamples=2)
    pipeline = reading(unkept, read)
    images = stages(pipeline, ["a star", "a ring"], upsampling=chosen, **options)
    assert images[2].shape == (2, 32, 32, 3) and names == paths
    assert not any(ref() for ref in alive) and not any(stage._classifiers for stage in pipeline.stages)


def test_networks_are_kept_on_request_and_a_single_one_by_default(stage_files, cascade):
    for stage in (*cascade.stages, *load(stage_files["exact"], "cpu").stages):
        assert stage.network() is stage.network()
    kept, unkept = (load(stage_files["exact"], "cpu", keep_loaded=keep) for keep in (True, False))
    assert unkept.stages[0].network() is not unkept.stages[0].network()
    assert same(stages(kept, [""]), stages(unkept, [""]), [0])
