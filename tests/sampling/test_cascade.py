"""Generators one after another: sizes, seeds, settings of each stage, what is refused at once, memory, processes."""

import contextlib
import threading
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from cascade_making import (
    BLIND,
    FAST,
    PROMPTS,
    close,
    different,
    idle,
    make_stage,
    make_stages,
    pictures,
    reading,
    same,
    stages,
    watching,
)
from checkpoint_making import FEW
from checkpoint_making import make_classifier_file as make_classifier

from diff_dalle.diffusion import GuidanceConfig
from diff_dalle.diffusion.editing import EditConfig
from diff_dalle.diffusion.sampling import SamplerConfig
from diff_dalle.errors import InputError
from diff_dalle.images.pixels import from_uint8
from diff_dalle.sampling.pipeline import Pipeline, load
from diff_dalle.sampling.request import PictureEdit, Request, UpsamplersConfig

ONCE = GuidanceConfig(guidance_scale=1.0)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cascade")
    found = make_stages(folder)
    for name, settings in {"16": {}, "32": {"image_size": 32}, "clean": {"noised": False}}.items():
        (folder / name).mkdir()
        found[f"classifier {name}"] = make_classifier(folder / name, **settings)
    return found


@pytest.fixture(scope="module")
def cascade(files):
    """8 → 16 → 32 pixels; only the up-sampler in the middle reads no text."""
    return load(files["base"], "cpu", upsampler_paths=[files["middle"], files["top"]], keep_loaded=True)


@pytest.fixture(scope="module")
def enlarging(cascade):
    return Pipeline(cascade.stages[1:])


def test_every_stage_enlarges_what_the_one_before_makes(cascade):
    with watching(cascade.stages[1]) as middle, watching(cascade.stages[2]) as top:
        made = cascade.sample_stages(PROMPTS, sampler=FEW, upsampling=FAST, progress=False)
    assert [images.shape for images in made] == [(3, 8, 8, 3), (3, 16, 16, 3), (3, 32, 32, 3)]
    assert all(images.dtype == np.uint8 and 10 < images.std() < 100 for images in made)
    for small, shown in ((made[0], middle), (made[1], top)):
        assert len(shown) == 4 and all(torch.equal(cond.low_res, from_uint8(small)) for _, cond in shown)
        assert not any(cond.low_res_level.any() or cond.low_res_blur.any() for _, cond in shown)
    assert (cascade.image_size, cascade.factor, cascade.has_base, cascade.step) == (32, 4, True, 7)
    assert np.array_equal(cascade.sample(PROMPTS, sampler=FEW, upsampling=FAST, progress=False), made[-1])


def test_a_picture_depends_on_its_seed_alone_through_all_stages(cascade):
    together = stages(cascade, PROMPTS, 5, batch_size=2, upsampling=replace(FAST, batch_size=3))
    for i, prompt in enumerate(PROMPTS):
        assert close([made[i : i + 1] for made in together], stages(cascade, prompt, 5 + i))
    assert different(together, stages(cascade, PROMPTS, seeds=[5, 6, 8]), range(3))


def test_any_size_that_the_networks_divide(cascade):
    made = stages(cascade, ["a star"], size=(24, 48))
    assert [images.shape[1:3] for images in made] == [(6, 12), (12, 24), (24, 48)]
    for height, width in ((20, 32), (32, 36), (0, 32)):
        with pytest.raises(InputError, match=f"{width}×{height} .* each side must be a multiple of 8.*--sample_size"):
            stages(idle(cascade), ["a star"], size=(height, width))


def test_up_samplers_alone_enlarge_what_they_are_given(enlarging):
    for height, width in ((8, 8), (5, 7)):
        low_res = pictures(3, height, width)
        made = stages(enlarging, low_res=low_res)
        assert [images.shape for images in made] == [(3, k * height, k * width, 3) for k in (2, 4)]
        assert close([images[1:2] for images in made], stages(enlarging, PROMPTS[1:2], 1, low_res=low_res[1:2]))
        assert different(made, stages(enlarging, low_res=255 - low_res), (0, 1))
    assert not enlarging.has_base and enlarging.tokenizer is None and enlarging.factor == 4


def test_pictures_that_the_networks_do_not_divide_are_refused(tmp_path):
    path = make_stage(tmp_path / "deep.pt", image_size=16, small_size=8, channel_mult="1,1,2", **BLIND)
    deep = load("", "cpu", upsampler_paths=[path])
    assert stages(deep, [""], low_res=pictures(1, 6, 8))[0].shape == (1, 12, 16, 3)
    with pytest.raises(InputError, match="to be enlarged are 9×8, but each side must be a multiple of 2"):
        stages(idle(deep), [""], low_res=pictures(1, 8, 9))


def test_an_up_sampler_need_not_read_what_the_others_read(files, cascade):
    assert different(stages(cascade, ["a star"]), stages(cascade, ["a ring"]), range(3))
    mixed = load(files["exact"], "cpu", upsampler_paths=[files["middle"], files["top"]], keep_loaded=True)
    guided = {"upsampling": replace(FAST, guidance=GuidanceConfig(guidance_scale=3.0))}
    star = stages(mixed, ["a star"], **guided)
    for other in (stages(mixed, ["a ring"], **guided), stages(mixed, ["a star"], negative_prompt="blur", **guided)):
        assert same(star, other, (0, 1)) and different(star, other, [2])


def test_classes_of_an_up_sampler(files, cascade):
    by_class = load(files["base"], "cpu", upsampler_paths=[files["middle"], files["classes"]])
    made = stages(by_class, ["", ""], seeds=[1, 1], labels=[0, 2])
    one, other = ([images[i : i + 1] for images in made] for i in (0, 1))
    assert made[2].shape == (2, 64, 64, 3) and close(one[:2], other[:2]) and different(one, other, [2])
    with pytest.raises(InputError, match="classes.pt: .*give labels from 0 to 2"):
        stages(idle(by_class), ["", ""])
    with pytest.raises(InputError, match="classes.pt: labels must lie between 0 and 2"):
        stages(idle(by_class), ["", ""], labels=[0, 4])
    with pytest.raises(InputError, match="labels are given, but this generator is not conditioned on classes"):
        stages(idle(cascade), labels=[0, 0, 0])


# ------------------------------------------------------------------------------------------------ settings of one stage


def upsamplers(**lists):
    """Settings of two up-samplers, as the command line makes them."""
    usual = {"upsampler_paths": ("a", "b"), "upsampler_timestep_respacing": ("4",)}
    return UpsamplersConfig(**{**usual, **lists}).settings()


@pytest.mark.parametrize(
    ("name", "usual", "changed"),
    [
        ("upsampler_sampler", "ddim", "heun"),
        ("upsampler_timestep_respacing", "4", "7"),
        ("upsampler_seed", 5, 6),
        ("noise_level", 0.1, 0.4),
        ("blur_level", 0.4, 0.6),
    ],
)
def test_a_setting_takes_effect_at_its_stage_only(cascade, name, usual, changed):
    def made(*values):
        return stages(cascade, ["a star"], upsampling=upsamplers(**{name: values}))

    plain, below, above = made(usual), made(changed, usual), made(usual, changed)
    assert same(plain, made(usual, usual), range(3))
    assert same(plain, below, [0]) and different(plain, below, (1, 2))
    assert same(plain, above, (0, 1)) and different(plain, above, [2])


@pytest.mark.parametrize(
    ("common", "changed"),
    [
        ({}, {"upsampler_guidance_scale": (1.0, 4.0)}),
        ({"upsampler_sampler": ("ddim",)}, {"upsampler_eta": (0.0, 0.8)}),
        ({}, {"upsampler_classifier_paths": ("none", "classifier 32")}),
        ({"upsampler_classifier_paths": ("none", "classifier 32")}, {"upsampler_classifier_scale": (1.0, 60.0)}),
        ({}, {"tile_size": (0, 16), "tile_overlap": (8,)}),
    ],
    ids=["guidance_scale", "eta", "classifier_paths", "classifier_scale", "tile_size"],
)
def test_so_do_settings_that_only_one_stage_can_have(cascade, files, common, changed):
    def made(**lists):
        paths = tuple(files.get(name, name) for name in lists.get("upsampler_classifier_paths", ()))
        return stages(cascade, ["a star"], upsampling=upsamplers(**{**lists, "upsampler_classifier_paths": paths}))

    plain, other = made(**common), made(**{**common, **changed})
    assert same(plain, other, (0, 1)) and different(plain, other, [2])


def test_a_batch_size_is_its_stages_alone_and_changes_no_picture(cascade):
    with contextlib.ExitStack() as stack:
        shown = [stack.enter_context(watching(stage)) for stage in cascade.stages]
        settings = [replace(FAST, batch_size=n) for n in (2, 3)]
        made = stages(cascade, batch_size=1, upsampling=settings, guidance=ONCE)
    assert [{len(x) for x, _ in each} for each in shown] == [{1}, {2, 1}, {3}]
    assert close(made, stages(cascade, guidance=ONCE))


def test_the_bases_settings_are_the_bases_alone(cascade):
    with watching(cascade.stages[0]) as base, watching(cascade.stages[2]) as top:
        made = stages(cascade, batch_size=2, guidance=ONCE, sampler=SamplerConfig(timestep_respacing="5"))
    assert [len(x) for x, _ in base] == [2] * 5 + [1] * 5 and [len(x) for x, _ in top] == [3] * 4
    assert different(made, stages(cascade), [0])


def test_an_up_samplers_seed_changes_the_details_and_not_the_base(cascade):
    def made(*seeds):
        return stages(cascade, ["a star"] * 2, 3, upsampling=upsamplers(upsampler_seed=seeds))

    one, other = made(50), made(51)
    assert same(one, other, [0]) and different(one, other, (1, 2))
    assert same(made(), made(3), range(3)) and different(made(), one, (1, 2))


def test_an_up_sampler_alone_repeats_what_it_made_in_the_cascade(cascade):
    settings = upsamplers(noise_level=(0.5,), upsampler_timestep_respacing=("1",))
    base, made, _ = stages(cascade, ["a star"], upsampling=settings)
    enlarged = stages(Pipeline(cascade.stages[1:2]), [""], low_res=base.astype(np.uint8), upsampling=settings[0])
    assert same([made], enlarged, [0])


def test_each_stage_draws_its_own_noise(cascade):
    """In the picture and on the small one."""
    stage, settings = cascade.stages[1], replace(FAST, noise_level=0.5)
    with watching(stage) as shown:
        for number in (1, 2):
            stage.sample(Request([""], [0]), [0], settings, (16, 16), pictures(1, 8, 8), number)
    (x, cond), (other_x, other_cond) = shown[0], shown[len(shown) // 2]
    assert not torch.equal(x, other_x) and not torch.equal(cond.low_res, other_cond.low_res)
    assert cond.low_res_level.item() == other_cond.low_res_level.item() == 0.5


def test_degraded_pictures_follow_their_own_seeds_and_the_network_is_told(cascade):
    low_res = pictures(1, 8, 8).repeat(2, 0)

    def shown(count, first, **settings):
        chosen = replace(FAST, noise_level=0.25, blur_level=0.5, **settings)
        with watching(cascade.stages[1]) as seen:
            stages(Pipeline(cascade.stages[1:2]), [""] * count, first, low_res=low_res[:count], upsampling=chosen)
        return seen[0][1]

    two = shown(2, 8)
    assert two.low_res_level.tolist() == [0.25] * 2 and two.low_res_blur.tolist() == [0.5] * 2
    assert not torch.equal(two.low_res[0], two.low_res[1])
    assert all(torch.equal(two.low_res[i], shown(1, 8 + i).low_res[0]) for i in (0, 1))
    assert torch.equal(two.low_res, shown(2, 0, seed=8).low_res)


# --------------------------------------------------------------------------------------------------------------- errors


def up(**lists):
    return {"upsampling": upsamplers(**lists)}


def edited(count=1, size=(16, 16), mask=None, **settings):
    masks = None if mask is None else [mask]
    return {"edit": PictureEdit(list(pictures(count, *size)), masks, EditConfig(**settings))}


def by(sampler, steps="4", eta=0.0):
    return {"sampler": SamplerConfig(sampler, steps, eta)}


REFUSED = {
    "base's steps": (by("ddim", "200"), "base.pt: timestep_respacing .* 200 steps"),
    "later steps": (up(upsampler_timestep_respacing=("4", "200")), "top.pt: timestep_respacing .* 200 steps"),
    "noise not trained": (up(noise_level=(0.5, 0.6)), "top.pt: noise_level is 0.6, but must lie between 0 and 0.5"),
    "blur not trained": (up(blur_level=(0.3,)), "middle.pt: blur_level is 0.3, but must be 0, or from 0.4"),
    "tiles": (up(tile_size=(0, 15)), "top.pt: --tile_size is 15, but must be a multiple of 2"),
    "overlap": (up(tile_size=(16,)), r"middle.pt: --tile_overlap is 32, but must be smaller than --tile_size \(16\)"),
    "batch size": (up(upsampler_batch_size=(4, 0)), "top.pt: batch_size is 0, but must be at least 1"),
    "base's batch size": ({"batch_size": 0}, "base.pt: batch_size is 0, but must be at least 1"),
    "too many settings": ({"upsampling": [FAST] * 3}, "settings for 3 up-samplers, but the pipeline has 2"),
    "too few settings": ({"upsampling": [FAST]}, "settings for 1 up-sampler, but the pipeline has 2"),
    "low_res and a base": ({"low_res": pictures(3, 8, 8)}, "low_res, --low_res_dir.* without a base generator"),
    "seeds": ({"seeds": [1]}, "3 prompts need as many seeds"),
    "variation by chance": (edited(variation=0.5) | by("ancestral"), "base.pt: --variation needs a deterministic"),
    "variation with eta": (edited(variation=0.5) | by("ddim", eta=0.5), "base.pt: .* not ddim with eta 0.5"),
    "a strip": (edited(size=(2, 600)), "base.pt: a picture of 600 × 2 pixels is too narrow"),
    "no such step": (edited(strength=0.001) | by("ddim", "0,4"), "base.pt: --strength 0.001 leaves no step"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_done_is_refused_before_any_network_is_read(cascade, case):
    options, words = REFUSED[case]
    with pytest.raises(InputError, match=words):
        stages(idle(cascade), **options)


def test_a_classifier_must_fit_its_own_stage(files, cascade):
    def guided(middle, top=None, gradient="x_t", **options):
        return {"upsampling": [replace(FAST, classifier=files.get(f"classifier {name}"), classifier_gradient=gradient)
                               for name in (middle, top)], **options}  # fmt: skip

    for fitting in (guided("16", "32"), guided("16", "32", "x_start"), guided("clean", None, "x_start")):
        assert stages(cascade, ["a star"], **fitting)[2].shape == (1, 32, 32, 3)
    cases = [
        (guided("16", "16"), "top.pt: .* trained on pictures of 16×16 pixels and cannot guide ones of 32×32"),
        (guided("16", size=(32, 64)), "middle.pt: .* of 16×16 pixels and cannot guide ones of 32×16"),
        (guided("clean"), "middle.pt: .*--noised False.*classifier_gradient to x_start"),
    ]
    for options, words in cases:
        with pytest.raises(InputError, match=words):
            stages(idle(cascade), **options)


def test_up_samplers_alone_refuse_what_a_base_would_take(enlarging):
    low_res = pictures(3, 8, 8)
    cases = [
        ({}, "low_res, --low_res_dir.* are needed by up-samplers without a base"),
        ({"low_res": low_res[:2]}, "2 pictures to be enlarged for 3 prompts: give one for each"),
        ({"low_res": low_res, "size": (32, 32)}, r"what is enlarged decides it.*\(--sample_size\)"),
        ({"low_res": low_res / 255}, r"low_res is float64 of shape \[3, 8, 8, 3\], but must be uint8 \[N, h, w, 3\]"),
        ({"low_res": low_res[..., 0]}, r"low_res is uint8 of shape \[3, 8, 8\], but must be"),
        ({"low_res": low_res, "guidance": GuidanceConfig(guidance_scale=2.0)}, "give the up-samplers' own"),
        ({"low_res": low_res, "sampler": FEW}, "sampler, .* are given for a base generator, but there is none"),
        ({"low_res": low_res, "batch_size": 2}, "batch_size are given for a base generator, but there is none"),
        ({"low_res": low_res, **edited()}, r"only a mask \(--mask\) means anything"),
        ({"low_res": low_res, **edited(mask=np.eye(16, dtype=bool), strength=0.5)}, "and no strength"),
    ]
    for options, words in cases:
        with pytest.raises(InputError, match=words):
            stages(idle(enlarging), **options)


def test_what_nobody_reads_is_refused(files):
    blind, low_res = load("", "cpu", upsampler_paths=[files["middle"]]), {"low_res": pictures(1, 8, 8)}
    cases = [
        (["a star"], {}, "prompts are given, but this generator does not read text"),
        ([""], {"negative_prompt": "blur"}, "negative_prompt is 'blur', but this generator does not read text"),
        ([""], {"labels": [1]}, "labels are given, but this generator is not conditioned on classes"),
    ]
    for prompts, options, words in cases:
        with pytest.raises(InputError, match=words):
            stages(idle(blind), prompts, **low_res, **options)
    with pytest.raises(InputError, match="settings for 1 up-sampler, but the pipeline has 0"):
        stages(idle(load(files["exact"], "cpu")), [""], upsampling=FAST)
    guided = replace(FAST, classifier=files["classifier 16"], classifier_scale=60.0)  # which reads
    one, other = (stages(blind, [prompt], upsampling=guided, **low_res) for prompt in ("a star", "a ring"))
    assert different(one, other, [0])


def test_stages_must_be_of_the_right_kind_and_size(files):
    base, middle, large = (files[name] for name in ("exact", "middle", "classes"))
    cases = [
        (middle, [], "middle.pt is an up-sampler, not a base generator: give it with --upsampler_paths"),
        ("", [base], "exact.pt is a base generator, not an up-sampler: give it with --model_path"),
        (base, [middle, base], "exact.pt is a base generator, not an up-sampler: only --model_path can be one"),
        (base, [large], "exact.pt makes pictures of 8 pixels, but .*classes.pt enlarges ones of 16"),
        ("", [large, middle], "classes.pt makes pictures of 64 pixels, but .*middle.pt enlarges ones of 8"),
        ("", [], "there is no checkpoint: give a generator's with --model_path"),
        (base, ["nowhere.pt"], "nowhere.pt does not exist"),
        (base, [files["classifier 16"]], "holds a classifier, but a generator is needed"),
    ]
    for path, upsampler_paths, words in cases:
        with pytest.raises(InputError, match=words):
            load(path, "cpu", upsampler_paths=upsampler_paths)
    with pytest.raises(InputError, match="at least one generator"):
        Pipeline([])


# ------------------------------------------------------------------------------------------------ memory and processes


@pytest.mark.parametrize("kind", ["plain", "guided", "inpainting in tiles"])
def test_never_are_two_networks_in_memory(files, kind):
    """Without the garbage collector's help: nothing may hold on to a network that has done its work."""
    unkept = load(files["base"], "cpu", upsampler_paths=[files["middle"], files["top"]])  # the default for a cascade
    alive, names = [], []

    def read(stage):
        network = stage.network()
        assert not any(ref() for ref in alive), f"{stage.path} was read beside another"
        alive.append(weakref.ref(network))
        names.append(stage.path)
        return network

    chosen, options = [FAST] * 2, {}
    if kind == "guided":
        chosen = [replace(FAST, classifier=files[f"classifier {size}"], classifier_gradient="x_start")
                  for size in (16, 32)]  # fmt: skip
    elif kind == "inpainting in tiles":
        chosen = [replace(FAST, sampler=SamplerConfig("heun", "2"), tile_size=8, tile_overlap=4)] * 2
        options = edited(mask=np.eye(16, dtype=bool), inpaint_resamples=2)
    made = stages(reading(unkept, read), ["a star", "a ring"], upsampling=chosen, **options)
    assert made[2].shape == (2, 32, 32, 3) and names == [files["base"], files["middle"], files["top"]]
    assert not any(ref() for ref in alive)


def test_networks_are_kept_when_asked_and_a_single_one_always(files, cascade):
    for stage in (*cascade.stages, *load(files["exact"], "cpu").stages):
        assert stage.network() is stage.network()
    kept, unkept = (load(files["exact"], "cpu", keep_loaded=keep) for keep in (True, False))
    assert unkept.stages[0].network() is not unkept.stages[0].network()
    assert same(stages(kept, [""]), stages(unkept, [""]), [0])


class Share:
    """One of two processes, played by threads."""

    values, meeting, size = [None, None], threading.Barrier(2, timeout=60), 2

    def __init__(self, rank):
        self.rank, self.is_main = rank, rank == 0

    def gather(self, value):
        self.values[self.rank] = value
        self.meeting.wait()
        found = list(self.values)
        self.meeting.wait()
        return found


@pytest.mark.parametrize("count", [3, 1])
def test_processes_share_the_pictures_and_all_get_all(cascade, enlarging, count):
    """Also when there is none for one of them."""
    cases = [(cascade, edited(count=2, mask=np.eye(16, dtype=bool))), (enlarging, {"low_res": pictures(count, 8, 8)})]
    for pipeline, options in cases:
        found = {}

        def work(rank, pipeline=pipeline, options=options, found=found):
            found[rank] = stages(pipeline, PROMPTS[:count], 5, world=Share(rank), **options)

        threads = [threading.Thread(target=work, args=(rank,)) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        expected = stages(pipeline, PROMPTS[:count], 5, **options)
        assert close(found[0], expected) and close(found[1], expected)
