"""Decoders and U-Nets in the layout of DALLE2-pytorch: equal outputs, every form of file, and back bit for bit."""

import json
from dataclasses import replace

import pytest
import torch
from dalle2_making import OtherUnet, decoder_file, tables, trainer_file
from decoder_making import TEXT_LENGTH, TEXT_WIDTH, UNET, WIDTH, make_decoder, save_decoder
from network_making import randomize
from refusing import refused

from diff_dalle.batch import Conditioning
from diff_dalle.checkpoints.checkpoint import load_file
from diff_dalle.checkpoints.decoder import DecoderConfig
from diff_dalle.checkpoints.foreign.dalle2_pytorch import decoder_content, unet_state
from diff_dalle.checkpoints.loading import open_networks
from diff_dalle.commands.convert import ConvertConfig, convert
from diff_dalle.config import from_dict, to_dict

TEXT = {"cond_on_text_encodings": True, "text_embed_dim": TEXT_WIDTH, "max_text_len": TEXT_LENGTH}
CHANGES = {
    "plain": {},
    "text": {**TEXT, "cond_dim": None, "num_image_tokens": 3, "num_time_tokens": 1},
    "efficient": {"memory_efficient": True, "pixel_shuffle_upsample": False, "scale_skip_connection": True},
    "cross": {"init_cross_embed": True, "cross_embed_downsample": True, "final_conv_kernel_size": 3, "self_cond": True},
    "attention": {"self_attn": (False, True), "cosine_sim_cross_attn": True, "add_image_embeds_to_time": False},
    "cosine": {"self_attn": (True,), "cosine_sim_self_attn": True, "dim_mults": (1, 2, 2)},
    "linear": {"sparse_attn": (True,), "num_resnet_blocks": (2,)},
}


def other_unet(unet, i=0, noised=False, variance=True, seed=0):
    torch.manual_seed(seed)
    return randomize(OtherUnet(unet, i == 0, i > 0, noised and i > 0, variance), seed=seed).eval()


def own_of(other, decoder, i=0):
    content, _ = decoder_content(other.state_dict(), "theirs.pth", decoder, i if len(decoder) > 1 else None)
    found = from_dict(DecoderConfig, content["config"]["decoder"])
    network = found.stage(i).build()
    network.load_state_dict(content["state"])
    return network.eval(), found


@pytest.mark.parametrize("name", CHANGES)
def test_a_unet_computes_what_it_does_there(name):
    unet = replace(UNET, image_embed_dim=WIDTH, **CHANGES[name])
    decoder, other = make_decoder(1, unet), other_unet(unet)
    network, found = own_of(other, decoder)
    x, t = torch.randn(3, 3, 8, 8), torch.tensor([0.0, 7.0, 49.0])
    embed, kept = torch.randn(3, WIDTH), torch.tensor([True, False, True])
    text = torch.randn(3, 2, TEXT_WIDTH) if "cond_on_text_encodings" in CHANGES[name] else None
    given = {"image_embedding": embed}
    if text is not None:
        given |= {"text_states": text, "mask": torch.ones(3, 2, dtype=torch.bool)}
    with torch.no_grad():
        expected = other(x, t, embed, text, kept=kept)
        value = network(x, t, Conditioning(**given).drop(~kept))
    assert expected.std() > 0.1
    torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-4)
    again = unet_state(network, found.stage(0), "own.pt")
    state = other.state_dict()
    assert again.keys() == state.keys() and all(again[key].shape == each.shape for key, each in state.items())
    used = [key for key in state if text is not None or not key.startswith("null_text")]
    used = [key for key in used if found.unets[0].add_image_embeds_to_time or key != "null_image_hiddens"]
    assert all(torch.equal(again[key], state[key]) for key in used)


def test_an_upsampler_computes_what_it_does_there():
    decoder = make_decoder(2, replace(UNET, image_embed_dim=WIDTH), use_noise_for_lowres_cond=(True,))
    other = other_unet(UNET, 1, noised=True, variance=False)
    network, found = own_of(other, decoder, 1)
    assert found.learned_variance[1] is False
    x, low_res, level = torch.randn(2, 3, 16, 16), torch.randn(2, 3, 16, 16), torch.tensor([0.2, 0.9])
    t = torch.tensor([3.0, 30.0])
    with torch.no_grad():
        expected = other(x, t, low_res=low_res, level=1000 * level)
        value = network(x, t, Conditioning(low_res=low_res, low_res_level=level))
    torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------------------------------------------------------- files


def two_unets(seed=0):
    unet = replace(UNET, image_embed_dim=WIDTH)
    return [other_unet(unet, 0, seed=seed), other_unet(UNET, 1, variance=False, seed=seed + 1)]


@pytest.fixture
def settings(tmp_path) -> str:
    """The file of a training: the base learns the variance, as there unless told otherwise."""
    decoder = make_decoder(2, beta_schedule=("cosine", "linear"), learned_variance=(True, False))
    path = tmp_path / "decoder.json"
    path.write_text(json.dumps({"decoder": to_dict(decoder), "train": {}}), encoding="utf-8")
    return str(path)


def converted(folder, content, settings, name="own.pt", **flags) -> str:
    torch.save(content, folder / "theirs.pth")
    out = folder / name
    convert(ConvertConfig(str(folder / "theirs.pth"), str(out), decoder_config=settings, **flags))
    return str(out)


def test_every_form_of_file_is_read_and_written(tmp_path, settings):
    unets, averaged, schedules = two_unets(), two_unets(7), ("cosine", "linear")
    plain = decoder_file(unets, schedules, 50)
    path = converted(tmp_path, plain, settings)
    assert load_file(path)["role"] == "model" and len(open_networks(path, ("decoder",))) == 2
    out = tmp_path / "again.pth"
    convert(ConvertConfig(path, str(out), to="dalle2_pytorch"))
    again = torch.load(out, weights_only=True)
    assert again["version"] and {*plain} <= {*again["model"]}
    unused = {
        "unets.0.null_text_embed",
        *(f"unets.1.null_{each}" for each in ("text_embed", "image_embed", "image_hiddens")),
    }
    for name, value in plain.items():
        if name.startswith("unets."):
            assert torch.equal(again["model"][name], value) != (name in unused), name
        else:
            torch.testing.assert_close(again["model"][name], value, rtol=1e-4, atol=1e-6)
    averages = converted(tmp_path, trainer_file(unets, averaged, schedules, 50), settings, "ema.pt")
    state = load_file(averages)
    assert state["role"] == "ema"
    name = "final_resnet_block.block1.project.weight"
    assert torch.equal(state["state"]["unet1.last_block.first.conv.weight"], averaged[1].state_dict()[name])
    single = converted(tmp_path, unets[1].state_dict(), settings, "single.pt", unet=1)
    (found,) = open_networks(single, ("decoder",))
    assert found.trainee == "unet1"
    convert(ConvertConfig(single, str(tmp_path / "unet.pth"), to="dalle2_pytorch"))
    written = torch.load(tmp_path / "unet.pth", weights_only=True)
    assert {*written} == {*unets[1].state_dict()} and torch.equal(written[name], unets[1].state_dict()[name])


def test_what_does_not_fit_is_refused(tmp_path, settings):
    unets = two_unets()
    plain = decoder_file(unets, ("cosine", "linear"), 50)
    torch.save(plain, tmp_path / "theirs.pth")
    with refused("is a decoder of DALLE2-pytorch, whose .*diff-dalle convert --model_path .*theirs.pth --"):
        load_file(str(tmp_path / "theirs.pth"))
    wrong = {f"noise_schedulers.1.{name}": value for name, value in tables("cosine", 50).items()}
    one = {name: value for name, value in plain.items() if ".1." not in name[:20]}
    for content, flags, message in (
        ({**plain, **wrong}, {}, "trained with another noise schedule than unet1's linear of 50 steps"),
        (one, {}, "holds 1 U-Net, but the settings have 2"),
        (unets[1].state_dict(), {}, "holds one U-Net of 2: say by unet which one"),
        (unets[1].state_dict(), {"unet": 2}, "unet is 2, but must be from 0 to 1"),
        (plain, {"unet": 0}, "unet is 0, but must be left out"),
        (
            {**plain, "unets.0.more.weight": torch.zeros(1)},
            {},
            "an extra more.weight, which does not belong to unet0",
        ),
        (
            {**plain, "unets.1.to_out.bias": torch.zeros(4)},
            {},
            r"has to_out.bias of shape \(4,\), which .* fit unet1 .* decoder_config: give the file",
        ),
        (
            {**plain, "unets.0.downs.0.4.1.weight": plain["unets.0.downs.0.4.1.weight"].transpose(0, 1).contiguous()},
            {},
            r"has downs.0.4.1.weight of shape \(32, 8, 1, 1\), which .* fit unet0 ",
        ),
    ):
        with refused(message):
            converted(tmp_path, content, settings, **flags)
    own = save_decoder(tmp_path / "ours.pt", make_decoder(1))
    with refused("has as_published False in unet0, which networks of DALLE2-pytorch lack"):
        convert(ConvertConfig(own, str(tmp_path / "out.pth"), to="dalle2_pytorch"))
    combining = replace(UNET, combine_upsample_fmaps=True, image_embed_dim=WIDTH)
    with refused("has combine_upsample_fmaps, whose maps are resized otherwise here"):
        decoder_content(other_unet(combining).state_dict(), "x", make_decoder(1, combining))
    mixing = replace(UNET, cond_dim=WIDTH, image_embed_dim=WIDTH)
    state = other_unet(mixing).state_dict()
    state = {name: value for name, value in state.items() if not name.startswith("image_to_tokens")}
    with refused("image_embed_dim equal to cond_dim, with which samples mix there"):
        decoder_content(state, "x", make_decoder(1, mixing))
