"""Previews take at most their share of a run, counted in forward passes, in every kind of training that has them."""

import math
import re
from collections import Counter
from dataclasses import replace

import cascade_file_making as cascade
import decoder_file_making as decoder
import pytest
import torch
from checkpoint_making import make_file, make_run
from control_making import flags_of as control_flags
from control_making import make_pictures
from marks import slow
from tiny_settings import flags

from diff_dalle.batch import Batch, Conditioning
from diff_dalle.commands.training_kinds import parse_controlnet, parse_lora
from diff_dalle.diffusion import GuidanceConfig
from diff_dalle.diffusion.samplers import SAMPLERS
from diff_dalle.diffusion.sampling import SamplerConfig
from diff_dalle.diffusion.spacing import SPACINGS
from diff_dalle.distributed.world import ALONE
from diff_dalle.models.adapters.controlnet import ControlNet
from diff_dalle.models.decoder.unet import DecoderUnet
from diff_dalle.models.generator import Generator
from diff_dalle.models.latent.semantic import Previewer
from diff_dalle.models.latent.stage_a import StageA
from diff_dalle.models.latent.stages import StageB, StageC
from diff_dalle.recipes.generator import previews_of
from diff_dalle.recipes.recipe import TRAINED
from diff_dalle.recipes.train import train_recipe
from diff_dalle.training.loop import TrainLoop

RUN = {"precision": "fp32", "device": "cpu", "threads": 1, "num_workers": 0, "batch_size": 4, "iterations": 4}
RUN |= {"sample_interval": 3, "lr_anneal_steps": 0, "warmup_steps": 0}
EMA = (("ema_start_iters", 0), ("ema_iters", 1), ("ema_beta", 0.5))
TWO_UNETS = [("decoder.unets", [decoder.UNET] * 2), ("decoder.image_sizes", [8, 16])]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return make_pictures(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_file(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return cascade.make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def frozen(tmp_path_factory, world):
    return cascade.make_frozen(tmp_path_factory.mktemp("frozen"), world)


def pixel_run(folder, request, kind):
    """Run, and what of it is counted."""
    data = request.getfixturevalue("pictures")
    own = {**RUN, "logdir": folder, "data_dir": data}
    if kind == "generator":
        return make_run(**own), Generator
    if kind == "guided":
        return make_run(**own, sampler="heun", guidance_scale=2, perturbed_attention_scale=1), Generator
    if kind == "upsampler":  # trained on crops, and shown on them
        return make_run(**own, small_size=8, crop_size=8, val_data_dir=data, eval_samples=1), Generator
    base = request.getfixturevalue("base")
    if kind == "controlnet":
        return parse_controlnet(control_flags(base, data, folder, **RUN)), ControlNet
    own |= {"model_path": base, "module_filters": "unet"}
    return parse_lora(flags(own)), Generator


def cascade_run(folder, request, kind):
    """Four updates, with previews after two."""
    given = [*cascade.frozen_of(kind, request.getfixturevalue("frozen")), ("loop.preview_samples", 8)]
    given += [*EMA, ("sampling.steps", 20)] if kind in ("stage_b", "stage_c") else []
    given += [("autoencoding.adversarial_weight", 0)] if kind == "stage_a" else []
    run = cascade.read(kind, folder, request.getfixturevalue("world"), *given)
    classes = {"stage_a": StageA, "semantic": Previewer, "stage_b": StageB, "stage_c": StageC}
    return run, classes[kind]


def decoder_run(folder, request, kind):
    data = decoder.make_world(folder / "shards")
    own = [*TWO_UNETS, ("train.n_sample_images", 5), ("train.cond_scale", [[1.0, 3.0], [1.0]])]
    own += [("decoder.sample_timesteps", 18), ("decoder.random_crop_sizes", [None, 8])]
    return decoder.read_run_file(decoder.write_file(folder, *own, world=data)), DecoderUnet


MAKE = {
    **dict.fromkeys(("generator", "guided", "upsampler", "controlnet", "lora"), pixel_run),
    **dict.fromkeys(("stage_a", "semantic", "stage_b", "stage_c"), cascade_run),
    "decoder": decoder_run,
}
#: The share, such that something is left out and something is left; the setting; previews in the run.
KINDS = {
    "generator": (0.5, "--preview_share", 2),
    "guided": (1.0, "--preview_share", 2),
    "upsampler": (0.5, "--preview_share", 2),
    "controlnet": (0.5, "--preview_share", 2),
    "lora": (0.5, "--preview_share", 2),
    "stage_a": (0.3, "loop.preview_share", 2),
    "semantic": (0.1, "loop.preview_share", 2),
    "stage_b": (2.0, "loop.preview_share", 2),
    "stage_c": (2.0, "loop.preview_share", 2),
    "decoder": (1.0, "train.preview_share", 3),
}


def counted(recipe, network, monkeypatch):
    """Train; the pixels that networks of a class see in training, and for previews."""
    seen, shows, show = Counter(), [False], TrainLoop._show

    def count(module, inputs, output):
        if isinstance(module, network):
            seen["training" if torch.is_grad_enabled() else "previews" if shows[0] else "others"] += inputs[0].numel()

    def counted_show(*arguments):
        shows[0] = True
        show(*arguments)
        shows[0] = False

    monkeypatch.setattr(TrainLoop, "_show", counted_show)
    handle = torch.nn.modules.module.register_module_forward_hook(count)
    try:
        train_recipe(recipe, ALONE)
    finally:
        handle.remove()
    return seen["training"], seen["previews"]


@pytest.mark.parametrize(
    "kind", [kind if kind in ("generator", "stage_a", "semantic", "stage_c") else slow(kind) for kind in KINDS]
)
def test_previews_take_their_share_of_a_run(tmp_path, request, kind, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where a decoder's savers write
    share, setting, previews = KINDS[kind]
    run, network = MAKE[kind](tmp_path, request, kind)
    trained, shown = counted(replace(run.recipe(), preview_share=share), network, monkeypatch)
    assert 0.4 * share < shown / (TRAINED * trained) <= share
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Previews")]
    assert len(said) == (2 if kind == "decoder" else 1)
    assert all(f"at most {100 * share:g}% of the run; {setting} " in line for line in said)
    assert len(list(tmp_path.rglob("*00000*.png"))) == (2 * previews if kind == "decoder" else previews)


# ------------------------------------------------------------------------------------------------------ what is reduced


class Told:
    """A world of so many processes that keeps what is printed."""

    def __init__(self, size=1):
        self.size, self.lines = size, []

    def print(self, line):
        self.lines.append(line)


def fitting(images=16, steps=30, each=2.0, once=0.0, processes=1, **settings):
    """What previews have, and what is said about it."""
    world, settings = Told(processes), {"sample_interval": 5000, "batch_size": 16, "iterations": 2, **settings}
    return *make_run(**settings).recipe().affordable(world, images, steps, each, once), world.lines


@pytest.mark.parametrize(
    ("settings", "images", "steps"),
    [
        ({}, 1, 2),
        ({"iterations": 40}, 5, 9),
        ({"iterations": 399}, 16, 29),
        ({"iterations": 400}, 16, 30),
        ({"iterations": 80, "sample_interval": 40}, 5, 9),  # two previews
        ({"iterations": 80, "sample_interval": 41}, 5, 9),  # too: the last step has one
        ({"iterations": 0, "samples": 640}, 5, 9),
        ({"iterations": 0, "samples": 1280, "processes": 2}, 5, 9),
        ({"iterations": 40, "processes": 2}, 5, 9),  # each process makes all of them
        ({"iterations": 0, "hours": 1, "sample_interval": 40}, 5, 9),  # nobody knows how many there will be
        ({"iterations": 40, "preview_share": 0.5}, 16, 30),
        ({"preview_share": "none"}, 16, 30),
        ({"iterations": 1, "batch_size": 1}, 1, 1),  # at least
        ({"images": 1}, 1, 2),
        ({"steps": 1, "each": 1, "iterations": 4}, 9, 1),
        ({"once": 1, "iterations": 40}, 5, 9),
        ({"each": 20, "iterations": 40}, 1, 4),
    ],
)
def test_both_images_and_steps_are_reduced(settings, images, steps):
    found = fitting(**settings)
    assert found[:2] == (images, steps)
    asked = settings.get("images", 16), settings.get("steps", 30)
    assert len(found[2]) == (asked != (images, steps))


@pytest.mark.parametrize("images", [1, 3, 16])
@pytest.mark.parametrize("steps", [1, 7, 1000])
@pytest.mark.parametrize("each", [0.25, 1.0, 6.0])
def test_nothing_more_would_fit(images, steps, each):
    for iterations in (1, 3, 30, 700):
        limit, once = 0.05 * TRAINED * 16 * iterations, 1.5
        count, few, _ = fitting(images, steps, each, once, iterations=iterations)

        def takes(count, few, once=once):
            return count * (once + few * each)

        assert takes(count, few) <= limit or (count, few) == (1, 1)
        assert count == images or takes(count + 1, few) > limit
        assert few == steps or takes(count, few + 1) > limit


def test_the_line_says_what_was_reduced_and_which_value_would_give_all():
    for changed, words in (
        ({}, "1 of 16 images and 2 of 30 sampling steps, so that they take at most 5% of the run; --preview_share 10 "),
        ({"steps": 1, "each": 1}, "4 of 16 images, so that "),
        ({"images": 1, "preview_share": 0.03}, "1 of 30 sampling steps, so that they take at most 3% of the run; "),
    ):
        *_, (line,) = fitting(**changed)
        assert line.startswith(f"Previews have {words}") and line.endswith(" would give them all.")
        share = re.search(r"share ([\d.]+)", line)[1]
        assert fitting(**{**changed, "preview_share": share})[2] == []
        less = float(share) - 10.0 ** (math.floor(math.log10(float(share))) - 1)
        assert fitting(**{**changed, "preview_share": less})[2]  # it is the least of two digits


# ------------------------------------------------------------------------------------------------ how fewer are sampled


def previews(**settings):
    """Of a run that is so short that they are reduced to one step."""
    recipe = make_run(**{**RUN, "batch_size": 1, "iterations": 1, **settings}).recipe()
    return previews_of(recipe, ALONE, None, Noise())


class Noise:
    def first(self, count):
        images = torch.rand(count, 3, 16, 16) * 2 - 1
        return Batch(images, Conditioning(), torch.arange(count))


PLAIN = {"enc_attn_dim": 0, "caption_dropout": 0}


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("schedule", ["cosine", "linear", "flow"])
def test_a_single_step_begins_at_noise_with_every_sampler(sampler, schedule):
    process = {**PLAIN, "noise_schedule": schedule, "diffusion_steps": 1000 if schedule == "flow" else 50}
    found = previews(**process, sampler=sampler)
    assert found.sampler == SamplerConfig(sampler, 1) and len(found.captions) == 1
    model, seen = make_run(**process).recipe().open(ALONE).network(), []
    model.register_forward_pre_hook(lambda module, inputs: seen.append(float(inputs[1][0])))
    assert found(model)["samples"].std() > 0
    assert seen == [pytest.approx(1000 if schedule == "flow" else 49, rel=1e-3)]


@pytest.mark.parametrize("spacing", SPACINGS)
def test_fewer_steps_are_spaced_as_usual(spacing):
    """Some spacings do not have every number of steps, and some would begin a single one without noise."""
    steps = {"preview_steps": 20} if spacing == "leading" else {}
    found = previews(**PLAIN, **steps, spacing=spacing)
    assert found.sampler == SamplerConfig("dpm++2m", 1)
    all_of_them = previews(**PLAIN, **steps, spacing=spacing, preview_share="none")
    assert all_of_them.sampler == SamplerConfig(steps=20 if steps else None, spacing=spacing)


def test_the_algorithm_stays():
    assert previews(**PLAIN, timestep_respacing="10,10").sampler == SamplerConfig("ancestral", 1)
    assert previews(**PLAIN, sampler="ddim", eta=0.5).sampler == SamplerConfig("ddim", 1, 0.5)


@pytest.mark.parametrize(
    ("guidance", "conditional", "passes"),
    [
        ({}, True, 2),
        ({}, False, 1),
        ({"guidance_scale": 1}, True, 1),
        ({"guidance_scale_end": 1}, True, 2),
        ({"perturbed_attention_scale": 2}, True, 3),
        ({"perturbed_attention_scale": 2}, False, 2),
    ],
)
def test_passes_of_guidance(guidance, conditional, passes):
    assert GuidanceConfig(**guidance).passes(conditional) == passes
