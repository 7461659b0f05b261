"""The decoder section: the meaning of every setting, rules with one sentence each, files of one U-Net and of all."""

import dataclasses
import re

import pytest
import torch
from decoder_making import TEXT_UNET, UNET, identity, make_decoder, make_network, save_decoder, save_unet
from refusing import refused

from diff_dalle.checkpoints.checkpoint import save_file
from diff_dalle.checkpoints.decoder import ClipConfig, DecoderConfig
from diff_dalle.checkpoints.loading import open_network, open_networks
from diff_dalle.checkpoints.pixels import DecoderSettings
from diff_dalle.config import InputError, from_dict, leaves
from diff_dalle.diffusion.guidance import GuidanceConfig
from diff_dalle.diffusion.sampling import SamplerConfig
from diff_dalle.models.decoder.config import DecoderUnetConfig
from diff_dalle.recipes.planning.cost import NetworkCost

EXAMPLE = DecoderUnetConfig(image_embed_dim=768, cond_dim=64)  # of the documented configuration


def stages(count=3, **settings):
    return make_decoder(count, **settings).stages()


def values(name, count=3, **settings):
    return [getattr(stage, name) for stage in stages(count, **settings)]


def processes(name, count=3, **settings):
    return [getattr(stage.diffusion, name) for stage in stages(count, **settings)]


# ---------------------------------------------------------------------------------------------- the meaning of settings


def test_the_documented_example():
    """186.3 M parameters, cosine, a learned variance, all steps of ancestral sampling."""
    decoder = DecoderConfig(unets=(EXAMPLE,), image_sizes=(64,), channels=3, loss_type=("l2",))
    cost = NetworkCost(DecoderSettings(decoder), trainee="unet0")
    assert cost.parameters == 186_276_294 and cost.size == cost.trained == 64
    assert cost.activation_bytes(True) < 0.5 * cost.activation_bytes(False)
    stage = decoder.stage(0)
    assert (stage.diffusion.noise_schedule, stage.diffusion.variance) == ("cosine", "learned_range")
    assert (stage.diffusion.diffusion_steps, stage.diffusion.prediction) == (1000, "eps")
    assert (stage.diffusion.vb_loss_weight, stage.diffusion.loss_weighting) == (0.001, "none")
    assert stage.sampler == SamplerConfig("ancestral", 0) and stage.guidance == GuidanceConfig(dynamic_percentile=0.95)
    assert (stage.image_drop_prob, stage.text_drop_prob) == (0.1, 0.5)


def test_sizes_and_channels_of_a_cascade():
    assert values("image_size") == [8, 16, 32] and values("small_size") == [0, 8, 16] and values("factor") == [1, 2, 2]
    assert [stage.unet.channels for stage in stages(2, channels=1)] == [1, 1]
    assert make_decoder(image_sizes=(), image_size=8).sizes == (8,)
    assert make_decoder(2, image_size=16).sizes == (8, 16)
    assert [stage.name for stage in stages(2)] == ["unet0", "unet1"]


@pytest.mark.parametrize(
    ("count", "given", "expected"),
    [
        (1, None, ["cosine"]),
        (3, None, ["cosine", "cosine", "linear"]),
        (2, ("sigmoid",), ["sigmoid"] * 2),
        (3, ("cosine", "jsd", "quadratic"), ["cosine", "jsd", "quadratic"]),
    ],
)
def test_schedules(count, given, expected):
    """By default cosine, and linear for the last of several."""
    assert processes("noise_schedule", count, beta_schedule=given) == expected


def test_one_value_is_for_all_and_a_list_for_each():
    assert processes("loss_type") == ["rescaled_mse"] * 3
    assert processes("loss_type", loss_type=("l1", "l2", "huber")) == ["l1", "rescaled_mse", "huber"]
    assert processes("variance") == ["learned_range"] * 3
    mixed = processes("variance", learned_variance=(True, False, True))
    assert mixed == ["learned_range", "fixed_small", "learned_range"]
    both = {"predict_x_start": (True, True, False), "predict_v": (False, True, False)}
    assert processes("prediction", **both) == ["x_start", "v", "eps"]
    assert processes("loss_weighting", p2_loss_weight_gamma=(0.0, 0.5, 1.0)) == ["none", "p2", "p2"]
    assert processes("p2_gamma", p2_loss_weight_gamma=(0.5,), p2_loss_weight_k=2.0) == [0.5] * 3
    assert processes("p2_k", p2_loss_weight_k=2.0) == [2.0] * 3
    assert processes("vb_loss_weight", vb_loss_weight=2.0) == [2.0] * 3
    assert all(processes("learned_variance_constrain_frac", learned_variance_constrain_frac=True))
    samplers = values("sampler", sample_timesteps=(None, 50, 7), ddim_sampling_eta=0.5)
    assert samplers == [SamplerConfig("ancestral", 0)] * 2 + [SamplerConfig("ddim", 7, 0.5, "even")]


def test_lists_of_upsamplers_may_leave_out_the_first_unet():
    for given in ((16,), (None, 16, 16), (16, 16)):
        assert values("crop_size", random_crop_sizes=given) == [0, 16, 16]
    assert values("crop_size", random_crop_sizes=(None, 8)) == [0, 0, 8]
    for name, read in (
        ("use_noise_for_lowres_cond", lambda stage: stage.has_noise),
        ("use_blur_for_lowres_cond", lambda stage: stage.degradation.blur_prob == 0.5),
    ):
        other = {"use_noise_for_lowres_cond": (True,), "use_blur_for_lowres_cond": (True,)}
        for given in ((True,), (False, True, True), (True, True)):
            assert [read(stage) for stage in stages(**(other | {name: given}))] == [False, True, True]
        assert [read(stage) for stage in stages(**(other | {name: (False, True)}))] == [False, False, True]


def test_degradation_and_thresholding():
    settings = {"blur_prob": 0.3, "blur_sigma": (0.2, 0.9), "blur_kernel_size": (3, 7)}
    (_, found) = values("degradation", 2, use_noise_for_lowres_cond=(True,), **settings)
    assert (found.blur_prob, found.sigmas, found.radii) == (0.3, (0.2, 0.9), (1, 3))
    assert (found.max_level, found.noise_curve) == (1.0, "linear")
    (_, single) = values("degradation", 2)
    assert (single.sigmas, single.radii, single.max_level) == ((0.6, 0.6), (1, 1), 0.0)
    noise = {"use_noise_for_lowres_cond": (True,), "lowres_noise_sample_level": 0.4}
    assert values("noise_level", 2, **noise) == [0.0, 0.4]
    assert values("noise_level", 2) == [0.0, 0.0]
    assert not any(values("downsample_first", lowres_downsample_first=False))
    dynamic = values("guidance", 1, use_dynamic_thres=True, dynamic_thres_percentile=0.9)
    assert dynamic == [GuidanceConfig(thresholding="dynamic", dynamic_percentile=0.9)]
    for name in ("clip_denoised", "clip_x_start"):
        assert values("guidance", 1, **{name: False})[0].thresholding == "none"


def test_embeddings_condition_the_first_unet_unless_told_otherwise():
    assert values("image_embedding") == [True, False, False]
    assert values("image_embedding", unconditional=True) == [False] * 3
    unets = tuple(dataclasses.replace(UNET, cond_on_image_embeds=value) for value in (False, True, None))
    assert values("image_embedding", unets=unets) == [False, True, False]
    assert [stage.droppable for stage in stages(2)] == [True, False]
    assert not stages(1, image_cond_drop_prob=0.0)[0].droppable
    assert stages(1, unet=TEXT_UNET, image_cond_drop_prob=0.0)[0].droppable
    assert stages(1, text_cond_drop_prob=0.2, image_cond_drop_prob=0.3)[0].text_drop_prob == 0.2


def test_every_setting_changes_a_unet():
    """No setting is without effect: each alone changes what a U-Net is, is trained on or is sampled by."""
    plain = {"use_noise_for_lowres_cond": (True,), "p2_loss_weight_gamma": (0.5,), "use_dynamic_thres": True}
    plain |= {"sample_timesteps": (5,), "unets": (UNET, UNET)}
    changed = {
        "unets": (UNET, TEXT_UNET), "image_sizes": (8, 32), "channels": 1, "timesteps": 40, "sample_timesteps": (6,),
        "loss_type": ("l1",), "beta_schedule": ("jsd",), "learned_variance": (False,), "image_cond_drop_prob": 0.2,
        "text_cond_drop_prob": 0.2, "predict_x_start": (True,), "predict_v": (True,), "random_crop_sizes": (8,),
        "use_noise_for_lowres_cond": (False,), "use_blur_for_lowres_cond": (False,), "lowres_downsample_first": False,
        "blur_prob": 0.1, "blur_sigma": (0.1,), "blur_kernel_size": (5,), "lowres_noise_sample_level": 0.1,
        "learned_variance_constrain_frac": True, "vb_loss_weight": 1.0, "unconditional": True,
        "use_dynamic_thres": False, "dynamic_thres_percentile": 0.5, "p2_loss_weight_gamma": (1.0,),
        "p2_loss_weight_k": 2.0, "ddim_sampling_eta": 0.5,
    }  # fmt: skip
    usual = make_decoder(2, **plain).stages()
    for name, value in changed.items():
        assert make_decoder(2, **(plain | {name: value})).stages() != usual, name
    assert {leaf.name for leaf in leaves(DecoderConfig)} - changed.keys() == {
        "clip", "clip_denoised", "clip_x_start", "image_size"
    }  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------- rules


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("unets", (), "unets is empty, but must have a U-Net for each resolution"),
        ("image_sizes", (), "image_sizes is missing, but must have a size for each of the 2 U-Nets"),
        ("image_sizes", (8,), "image_sizes has 1 size, but there are 2 U-Nets in unets: give one for each"),
        ("image_sizes", (16, 8), "image_sizes has 8 after 16, but must be a larger multiple of the one before"),
        ("image_sizes", (8, 8), "image_sizes has 8 after 8"),
        ("image_sizes", (8, 20), "image_sizes has 20 after 8"),
        ("image_sizes", (0, 8), "image_sizes is 0, but must be at least 1"),
        ("image_sizes", (7, 14), "unets[0]: the image size is 7, but must be a multiple of 2"),
        ("channels", 4, "channels is 4, but must be 3 (RGB) or 1 (grayscale)"),
        (
            "unet",
            dataclasses.replace(UNET, channels=1),
            "unets[0].channels is 1, but channels, which is for all U-Nets, is 3",
        ),
        ("unet", dataclasses.replace(UNET, image_embed_dim=None), "unets[0].image_embed_dim is missing, but the"),
        (
            "",
            {"timesteps": 10, "beta_schedule": ("linear",)},
            "timesteps is 10, but beta_schedule linear then has betas",
        ),
        ("", {"timesteps": 10, "beta_schedule": None}, "timesteps is 10, but beta_schedule linear"),
        ("timesteps", 0, "timesteps is 0, but must be at least 1 and at most 100,000"),
        ("sample_timesteps", (51,), "sample_timesteps has 51, but must lie between 2 and timesteps (50)"),
        ("sample_timesteps", (1,), "sample_timesteps has 1, but must lie between 2 and timesteps (50)"),
        ("sample_timesteps", (5, 5, 5), "sample_timesteps has 3 values for 2 U-Nets: give one for all, or one for"),
        ("learned_variance", (), "learned_variance has 0 values for 2 U-Nets"),
        ("use_blur_for_lowres_cond", (True,) * 3, "use_blur_for_lowres_cond has 3 values for 2 U-Nets"),
        ("loss_type", ("l2", "l3"), "loss_type is 'l3', but must be one of l1, l2, huber"),
        ("beta_schedule", ("cosin",), "beta_schedule is 'cosin', but must be one of linear, cosine"),
        ("random_crop_sizes", (8, 8), "random_crop_sizes begins with 8, but the first U-Net has no low-resolution"),
        ("use_noise_for_lowres_cond", (True, True), "use_noise_for_lowres_cond begins with True"),
        (
            "random_crop_sizes",
            (24,),
            "unets[1] has crops of 24 pixels in random_crop_sizes, but they must be at most",
        ),
        ("random_crop_sizes", (7,), "unets[1] has crops of 7 pixels"),
        ("use_blur_for_lowres_cond", (False,), "unets[1] upsamples images that are neither blurred nor noised"),
        ("image_cond_drop_prob", 1.5, "image_cond_drop_prob is 1.5, but must be at least 0 and at most 1"),
        ("text_cond_drop_prob", -0.5, "text_cond_drop_prob is -0.5, but must be at least 0 and at most 1"),
        ("blur_prob", 2.0, "blur_prob is 2, but must be at least 0 and at most 1"),
        ("lowres_noise_sample_level", 2.0, "lowres_noise_sample_level is 2, but must be at least 0 and at most 1"),
        ("vb_loss_weight", -1.0, "vb_loss_weight is -1, but must be at least 0"),
        ("ddim_sampling_eta", -1.0, "ddim_sampling_eta is -1, but must be at least 0"),
        ("p2_loss_weight_gamma", (0.0, -1.0), "p2_loss_weight_gamma is -1, but must be at least 0"),
        ("p2_loss_weight_k", 0.0, "p2_loss_weight_k is 0, but must be above 0"),
        ("dynamic_thres_percentile", 0.0, "dynamic_thres_percentile is 0, but must be above 0 and at most 1"),
        ("", {"use_dynamic_thres": True, "clip_denoised": False}, "use_dynamic_thres is True, but clip_denoised"),
        ("blur_sigma", (0.6, 0.4), "blur_sigma is 0.6,0.4, but must be one number of at least 0, or the ends"),
        ("blur_sigma", (0.1, 0.2, 0.3), "blur_sigma is 0.1,0.2,0.3, but must be one number"),
        ("blur_kernel_size", (4,), "blur_kernel_size has 4, but must be odd"),
        ("blur_kernel_size", (-1,), "blur_kernel_size is -1, but must be one number of at least 1"),
        (
            "",
            {"unet": dataclasses.replace(UNET, cond_on_image_embeds=True), "unconditional": True},
            "unets[0].cond_on_image_embeds is True, but the decoder is unconditional",
        ),
    ],
)
def test_impossible_settings_are_one_sentence(name, value, message):
    with pytest.raises(InputError) as error:
        make_decoder(2, **({name: value} if name else value))
    assert error.value.faults[0].sentence().startswith(message)


def test_all_errors_of_a_file_are_found_at_once():
    unets = [{"dim": 8, "out_dim": 3}, {"dim": 8, "dim_mult": [1]}]
    section = {"unets": unets, "image_sizes": [8], "blur_sigma": [], "clip": {"make": "coca"}, "vae": {}}
    with pytest.raises(InputError) as error:
        from_dict(DecoderSettings, {"decoder": section | {"loss_type": ["x"]}})
    for message in (
        "decoder.unets[0].out_dim has no effect: the output has the image's channels",
        "decoder.unets[1].dim_mult is an unknown setting; did you mean dim_mults?",
        "decoder.image_sizes has 1 size, but there are 2 U-Nets",
        "decoder.blur_sigma is (), but must be one number",
        "decoder.clip.make is 'coca', but must be one of openai, open_clip, diff_dalle",
        "decoder.vae is not supported",
        "decoder.loss_type is 'x', but must be one of l1, l2, huber",
    ):
        assert message in str(error.value)
    with refused("decoder.unets is required"):
        from_dict(DecoderSettings, {"decoder": {"image_size": 8}})


@pytest.mark.parametrize(
    ("one", "two", "expected"),
    [
        (None, ClipConfig(), True),
        (ClipConfig(model="a"), ClipConfig(model="b"), False),
        (ClipConfig(model="a", identity="x"), ClipConfig(model="b", identity="x"), True),
        (ClipConfig(identity="x"), ClipConfig(identity="y"), False),
        (ClipConfig(identity="x"), ClipConfig(), True),
        (ClipConfig("open_clip"), ClipConfig(), False),
    ],
)
def test_embeddings_are_compared_by_the_identity_of_their_clip(one, two, expected):
    assert make_decoder(clip=one).same_embeddings(make_decoder(clip=two)) == expected
    assert make_decoder(clip=two).same_embeddings(make_decoder(clip=one)) == expected


# ---------------------------------------------------------------------------------------------------------------- files


def test_a_file_holds_one_unet_or_all(tmp_path):
    """Both give the same networks."""
    decoder = make_decoder(2, clip=ClipConfig("open_clip", "ViT-B-32"))
    one, two = (open_network(save_unet(tmp_path / f"{i}.pt", decoder, i), "decoder") for i in range(2))
    both = open_networks(save_decoder(tmp_path / "all.pt", decoder), ("generator", "decoder"))
    assert [saved.trainee for saved in both] == ["unet0", "unet1"] and two.trainee == "unet1"
    assert one.settings.decoder == both[0].settings.decoder == decoder and two.step == 11
    for single, part, i in ((one, both[0], 0), (two, both[1], 1)):
        expected, found = make_network(decoder, i).state_dict(), part.load(torch.device("cpu")).state_dict()
        loaded = single.load(torch.device("cpu")).state_dict()
        assert expected.keys() == found.keys() == loaded.keys()
        assert all(torch.equal(expected[name], found[name]) for name in expected)
        assert all(torch.equal(expected[name], loaded[name]) for name in expected)


def test_files_that_do_not_fit_their_settings_are_refused(tmp_path):
    decoder, path = make_decoder(2), str(tmp_path / "bad.pt")
    state = make_network(decoder).state_dict()
    cases = [
        (state, "unet2", "holds impossible settings: the U-Net 'unet2' is unknown; did you mean unet1?"),
        (state, "unet1", "does not fit this model"),
        (state, "", "does not fit its settings: it has an extra conditions.time.weight"),
        (
            {f"unet0.{name}": value for name, value in state.items()},
            "",
            "does not fit this model: it has no conditions.time.weight",
        ),
    ]
    for content, trainee, message in cases:
        save_file(path, "model", identity(decoder), 1, 1, content, trainee)
        with refused(re.escape(message)):
            open_networks(path, ("decoder",))
    with refused("holds 2 networks, but one is required here"):
        open_network(save_decoder(tmp_path / "all.pt", decoder), "decoder")
    with refused("holds a decoder, but a generator or a classifier is required here"):
        open_networks(str(tmp_path / "all.pt"), ("generator", "classifier"))
