"""U-Nets of several files in one: the same images, the same settings, and what does not fit named."""

import re
from dataclasses import replace

import pytest
import torch
from decoder_making import TEXT_UNET, UNET, identity, make_decoder, make_network, save_decoder, save_unet
from refusing import refused

from diff_dalle.checkpoints.assembling import TRAINING_ONLY, USED_BY, assemble, shared_names
from diff_dalle.checkpoints.checkpoint import load_file, save_file
from diff_dalle.checkpoints.decoder import ClipConfig, DecoderConfig
from diff_dalle.checkpoints.loading import open_networks
from diff_dalle.commands.gathering import AssembleConfig, assemble_decoder

FAST = {"sample_timesteps": (3,)}
EVERY = (replace(UNET, cond_on_image_embeds=True),) * 2


@pytest.fixture
def save(tmp_path):
    def saved(i: int, decoder: DecoderConfig, name: str = "") -> str:
        return save_unet(tmp_path / f"{name or i}.pt", decoder, i)

    return saved


def settings_of(path):
    return open_networks(path, ("decoder",))[0].settings.decoder


def test_unets_of_one_decoder(tmp_path, save):
    """In any order; the file is that of the whole decoder, and what was taken is listed."""
    decoder = make_decoder(3, clip=ClipConfig("open_clip", "a"), random_crop_sizes=(None, 8, 16), **FAST)
    paths = [save(i, decoder) for i in (2, 0, 1)]
    out = str(tmp_path / "decoder.pt")
    text = assemble(paths, out)
    assert settings_of(out).stages() == decoder.stages() and settings_of(out).clip == decoder.clip
    whole, ours = (load_file(path, values=True) for path in (save_decoder(tmp_path / "whole.pt", decoder), out))
    assert ours["state"].keys() == whole["state"].keys() and ours["trainee"] == "" and ours["role"] == "ema"
    assert all(torch.equal(ours["state"][name], value) for name, value in whole["state"].items())
    count = sum(p.numel() for p in make_network(decoder, 1).parameters())
    assert f"unet1: {count:,} weights, 16×16 pixels: EMA weights after 11 steps, unet1 of {paths[2]}" in text
    assert text.splitlines()[-1] == f"Wrote {out}." and ours["step"] == 12
    assert assemble([out], str(tmp_path / "again.pt")).count("weights, ") == 3
    assert settings_of(str(tmp_path / "again.pt")) == settings_of(out)


@pytest.mark.slow
def test_unets_trained_in_runs_of_their_own(tmp_path, save):
    """Each by its own decoder: settings of each U-Net, and shared ones from the U-Net that uses them."""
    base = make_decoder(1, loss_type=("l1",), blur_prob=0.0, image_cond_drop_prob=0.3, lowres_noise_sample_level=0.9)
    first = make_decoder(
        2,
        predict_v=(False, True),
        beta_schedule=("jsd", "linear"),
        use_noise_for_lowres_cond=(True,),
        blur_prob=0.7,
        lowres_noise_sample_level=0.4,
        image_cond_drop_prob=0.9,
        **FAST,
    )
    second = make_decoder(3, blur_prob=0.6, learned_variance=(False,), vb_loss_weight=0.5)
    paths = [save(0, base), save(1, first), save(2, second)]
    text = assemble(paths, str(tmp_path / "decoder.pt"))
    found, expected = settings_of(str(tmp_path / "decoder.pt")), [base.stage(0), first.stage(1), second.stage(2)]
    assert "affects training only: blur_prob 0.6" in text and "vb_loss_weight" not in text and "drop" not in text
    for stage, other in zip(found.stages(), expected, strict=True):
        same = {"degradation": stage.degradation, "diffusion": stage.diffusion}
        assert replace(other, **same, image_drop_prob=0.3) == stage
        trained = replace(other.diffusion, vb_loss_weight=stage.diffusion.vb_loss_weight)
        assert trained == stage.diffusion
        assert replace(other.degradation, blur_prob=stage.degradation.blur_prob) == stage.degradation


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        ((1, {}), (0, {"count": 1, "image_sizes": (4,)}), "0.pt makes 4-pixel images, but .*1.pt upsamples 8-pixel"),
        ((0, {}), (0, {}), "0.pt makes 8-pixel images, but .*other.pt is the first of a decoder too"),
        ((1, {}), (1, {}), "1.pt upsamples 8-pixel images, but no U-Net makes them: give the one before it too"),
        ((0, {}), (1, {"timesteps": 40}), "0.pt has timesteps 50, but .*1.pt 40, and the U-Nets of a decoder"),
        ((0, {}), (1, {"channels": 1}), "0.pt has channels 3, but .*1.pt 1"),
        ((0, {"unets": EVERY}), (1, {"unets": EVERY, "clip": ClipConfig()}), ""),
        (
            (0, {"unets": EVERY, "clip": ClipConfig("open_clip")}),
            (1, {"unets": EVERY, "clip": ClipConfig()}),
            "0.pt was trained on embeddings of open_clip ViT-L/14, but .*1.pt on those of openai ViT-L/14",
        ),
        (
            (0, {"unets": EVERY}),
            (1, {"unets": EVERY, "image_cond_drop_prob": 0.0}),
            "1.pt was trained without dropping its conditions, unlike the other U-Nets",
        ),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, save, one, other, message):
    paths = []
    for (i, settings), name in ((one, ""), (other, "other" if one[0] == other[0] else "")):
        paths.append(save(i, make_decoder(**{"count": 2, **settings}), name))
    out = str(tmp_path / "decoder.pt")
    if not message:
        assemble(paths, out)
        return
    with refused(message):
        assemble(paths, out)
    assert not (tmp_path / "decoder.pt").exists()


@pytest.mark.slow
def test_every_shared_setting_is_compared_or_affects_training_only(tmp_path, save):
    """None can differ silently: two U-Nets that use it are refused, or the difference is told."""
    common = {"unets": (replace(TEXT_UNET, cond_on_image_embeds=True),) * 3, "use_noise_for_lowres_cond": (True,)}
    common |= {"use_dynamic_thres": True, "p2_loss_weight_gamma": (1.0,), "sample_timesteps": (5,)}
    changed = {
        "channels": 1, "timesteps": 40, "image_cond_drop_prob": 0.2, "text_cond_drop_prob": 0.2, "blur_prob": 0.1,
        "lowres_downsample_first": False, "blur_sigma": (0.1,), "blur_kernel_size": (5,), "ddim_sampling_eta": 0.5,
        "lowres_noise_sample_level": 0.1, "learned_variance_constrain_frac": True, "vb_loss_weight": 1.0,
        "unconditional": True, "dynamic_thres_percentile": 0.5, "p2_loss_weight_k": 2.0,
        "use_dynamic_thres": False, "clip_denoised": False, "clip_x_start": False,
    }  # fmt: skip
    assert set(changed) == set(shared_names(make_decoder())) >= {*TRAINING_ONLY, *USED_BY}
    paths = [save(i, make_decoder(3, **common), f"common{i}") for i in range(3)]
    state, other = torch.load(paths[2], weights_only=True)["state"], str(tmp_path / "other.pt")
    for name, value in changed.items():
        settings = {**common, name: value}
        if name.startswith("clip_"):
            settings["use_dynamic_thres"] = False
        if name == "unconditional":
            settings["unets"] = (TEXT_UNET,) * 3
        decoder = make_decoder(3, **settings)
        if name in ("channels", "unconditional"):  # the only ones that change the weights
            save(2, decoder, "other")
        else:
            save_file(other, "ema", identity(decoder), 12, 100, state, "unet2")
        given, out = [*paths[:2], other], str(tmp_path / f"{name}.pt")
        if name == "unconditional":  # a U-Net that reads no embedding does not depend on it
            assemble(given, out)
        elif name in TRAINING_ONLY:
            assert f"affects training only: {name}" in assemble(given, out)
        else:
            with refused(f"has {'use_dynamic_thres' if 'clip_' in name else name} "):
                assemble(given, out)


def test_the_command(tmp_path, save):
    decoder = make_decoder(2)
    paths, out = (save(0, decoder), save(1, decoder)), tmp_path / "out.pt"
    assert "unet1: " in assemble_decoder(AssembleConfig(paths, str(out))) and out.exists()
    with refused("out.pt exists already: give another file with --out"):
        assemble_decoder(AssembleConfig(paths, str(out)))
    with refused("model_paths is required"):
        AssembleConfig()
    with refused(re.escape("0.pt does not exist")):
        assemble_decoder(AssembleConfig((str(tmp_path / "none" / "0.pt"),), str(tmp_path / "b.pt")))
