"""Checkpoints of Improved Diffusion, Guided-Diffusion, GLIDE and the original Diff-DALLE: what they compute here and
there."""

import dataclasses
from dataclasses import replace

import pytest
import torch
from network_making import UNET, relative
from original import Original
from others import Other
from refusing import refused

from diff_dalle.batch import Conditioning
from diff_dalle.checkpoints.checkpoint import load_file, load_weights
from diff_dalle.checkpoints.foreign.reading import check_layout, content_of, recognize, state_of
from diff_dalle.checkpoints.foreign.structure import RELEASES, find_release, structure_of
from diff_dalle.checkpoints.kinds import find_kind
from diff_dalle.diffusion.editing import known_part
from diff_dalle.models.generator import GeneratorConfig, LowResConfig
from diff_dalle.models.text_encoder import TextEncoderConfig

SIZE = 16
LENGTH, END = 7, 39  # of captions of Diff-DALLE, and their last token
GIVEN = {"image_size": SIZE, "num_head_channels": 16, "noise_schedule": "cosine", "text_length": LENGTH}
TEXT = (END + 1, 6, 32, 2, 4)
ORIGINAL_TEXT = (END + 1, LENGTH, 32, 2, 2)
UPSAMPLERS, INPAINTING = (6, 10), (7, 10)  # input channels
CASES = {
    "unconditional": {},
    "new order": dict(new_order=True),
    "classes": dict(classes=5),
    "fixed variance": dict(outputs=3),
    "improved": dict(updown=False, blocks=2),
    "without scales": dict(updown=False, scale_shift=False, attention=(True, False)),
    "pooled": dict(updown=False, learned_resampling=False, blocks=2),
    "three levels": dict(mults=(1, 1, 2), attention=(False, True, False), blocks=2),
    "one level": dict(mults=(1,), attention=(True,), blocks=2),
    "upsampler": dict(inputs=6, classes=3),
    "classifier": dict(pooled=7),
    "deep classifier": dict(pooled=7, mults=(1, 1, 2), attention=(False, True, True), blocks=2, final_size=4),
    "classifier without blocks that halve": dict(pooled=7, updown=False),
    "glide": dict(text=TEXT),
    "glide upsampler": dict(text=TEXT, inputs=6),
    "glide inpainting": dict(text=TEXT, inputs=7),
    "glide inpainting upsampler": dict(text=TEXT, inputs=10),
    "gray inpainting": dict(inputs=3, outputs=1),
    "glide without paddings": dict(text=TEXT, xf_padding=False),
    "glide without a last norm": dict(text=TEXT, xf_padding=False, xf_final_ln=False),
    "adaptive pool": dict(pooled=7, pool="adaptive"),
    "spatial pool": dict(pooled=7, pool="spatial", updown=False, blocks=2),
    "spatial pool with a norm": dict(pooled=7, pool="spatial_v2", mults=(1, 2, 2), attention=(False, True, True)),
    "heads of the decoder": dict(head_channels=32, upsample_head_channels=16, mults=(1, 1), attention=(False, True)),
}
ORIGINALS = {
    "original": dict(text=ORIGINAL_TEXT),
    "original with equal widths": dict(text=(END + 1, LENGTH, 64, 1, 4), attention=(True, True)),
    "original without text": {},
    "original upsampler": dict(inputs=6, outputs=3),
    "original upsampler with text": dict(inputs=6, text=ORIGINAL_TEXT, updown=False, blocks=2),
    "original classifier": dict(pooled=32, text=ORIGINAL_TEXT),
    "deep original classifier": dict(
        pooled=32, text=ORIGINAL_TEXT, mults=(1, 1, 2), attention=(False, True, True), final_size=4
    ),
}


def given(other):
    flags = {**GIVEN, "use_new_attention_order": other.new_order}
    flags |= {"small_size": SIZE // 4} if other.inputs in UPSAMPLERS else {}
    if other.upsample_head_channels:
        own = other.channels // other.head_channels, other.channels // other.upsample_head_channels
        flags = {**flags, "num_head_channels": -1, "num_heads": own[0], "num_heads_upsample": own[1]}
    return flags | ({"enc_heads": other.text[4]} if other.text else {})


def network_of(other):
    content = content_of(recognize(other.file, "theirs.pt", given(other)), other.file, "theirs.pt")
    vocabulary = "clip" if isinstance(other, Original) else "gpt2"
    assert content["tokenizer"] == (f"{vocabulary}-{END + 1}" if other.text else None)
    network = find_kind(content["kind"]).read(content["config"]).build(END + 1).eval()
    load_weights(network, content, "theirs.pt")
    return network


@pytest.fixture(scope="module", params=[*CASES, *ORIGINALS])
def case(request):
    """A network of theirs, and ours."""
    name = request.param
    other = Original(**ORIGINALS[name]) if name in ORIGINALS else Other(**CASES[name])
    return other, network_of(other)


def captions():
    """Of Diff-DALLE, and ours without the last positions, which hold nothing."""
    tokens = torch.zeros(2, LENGTH, dtype=torch.long)
    tokens[0, :5], tokens[1, :2] = torch.tensor([38, 3, 17, 5, END]), torch.tensor([38, END])
    return tokens, tokens[:, :5], tokens[:, :5] > 0


def inputs(other, n=2):
    generator = torch.Generator().manual_seed(0)
    channels = min(3, other.outputs)
    x, t = torch.randn(n, channels, SIZE, SIZE, generator=generator), torch.tensor([3.0, 711.5])
    theirs, ours = {}, {}
    if other.classes:
        theirs["y"] = ours["labels"] = torch.tensor([0, other.classes - 1])
    if other.inputs in INPAINTING or channels == 1:
        image, unknown = torch.randn(x.shape, generator=generator), torch.rand(n, 1, SIZE, SIZE) < 0.5
        theirs["inpaint_image"], theirs["inpaint_mask"] = image, (~unknown).float()
        ours["known"] = known_part(image, unknown)
    if other.inputs in UPSAMPLERS:
        low_res, none = torch.randn(n, 3, SIZE // 4, SIZE // 4, generator=generator), torch.zeros(n)
        theirs["low_res"] = ours["low_res"] = low_res
        ours |= {"low_res_level": none, "low_res_blur": none}
    if other.text and isinstance(other, Original):
        theirs["tokens"], ours["tokens"], ours["mask"] = captions()
        theirs["mask"] = theirs["tokens"] > 0
    elif other.text:
        theirs["tokens"] = torch.randint(TEXT[0], (n, TEXT[1]), generator=generator)
        theirs["mask"] = torch.arange(TEXT[1]) < torch.tensor([[4], [0]])  # the second one has no caption
        first = torch.ones(n, 1, dtype=torch.bool)
        ours["tokens"] = torch.cat([first.long(), theirs["tokens"]], 1)[:, :-1]  # ours may also be shorter
        ours["mask"] = torch.cat([first, theirs["mask"]], 1)[:, :-1]
    return x, t, theirs, Conditioning(**ours)


@torch.no_grad()
def test_the_function_is_theirs(case):
    other, network = case
    x, t, theirs, cond = inputs(other)
    if other.pooled and other.text:
        assert relative(network.encode_image(x, t), other.encode_image(x, t)) < 1e-5
        assert relative(network.encode_text(cond.tokens, cond.mask), other.encode_text(theirs["tokens"])) < 1e-5
        assert network.scale.item() == pytest.approx(other.scale, rel=1e-6)
        return
    expected = other(x, t, **theirs)
    assert relative(network(x, t) if other.pooled else network(x, t, cond), expected) < 1e-5
    if other.text and isinstance(other, Original):  # an empty or dropped caption, whose mask has the start token alone
        mask = cond.mask & torch.tensor([[True], [False]]) | (torch.arange(5) == 0)
        assert relative(network(x, t, replace(cond, mask=mask)), expected) < 1e-5


def test_the_way_back_is_exact(case):
    other, network = case
    state = state_of(network, "ours.pt", isinstance(other, Original), other.new_order)
    assert state.keys() == other.file.keys()
    assert all(torch.equal(state[key], value) for key, value in other.file.items())


@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.name)
def test_published_networks_are_recognized_by_their_shapes(release):
    """Their parameters, in millions, as published."""
    published = {
        "64x64_diffusion": 296,
        "128x128_diffusion": 422,
        "256x256_diffusion": 554,
        "512x512_diffusion": 559,
        "64_256_upsampler": 312,
        "128_512_upsampler": 309,
        "imagenet64_cond_270M_250K": 273,
        "base": 385,
        "upsample": 398,
        "base_inpaint": 385,
        "upsample_inpaint": 398,
    }
    s, unseen = release.structure, release.unseen
    text = s.text and (50257, s.text.length, s.text.width, s.text.depth, 8)
    with torch.device("meta"):
        other = Other(
            *(s.num_channels, s.channel_mult, s.num_res_blocks, s.attention, s.in_channels, s.out_channels),
            *(s.num_classes, s.use_scale_shift_norm, s.resblock_updown),
            text=text,
            pooled=s.classes,
            final_size=unseen.image_size >> (len(s.channel_mult) - 1),
        )
    shapes = {name: tuple(value.shape) for name, value in other.state.items()}
    assert find_release(structure_of(shapes)) is release
    found = recognize(other.state, "theirs.pt")
    assert found.unseen == unseen and found.structure.kind == release.structure.kind
    own = {weight.other: weight.other_shape for weight in found.weights()}
    pooled = ("out.2.qkv_proj.weight", "out.2.qkv_proj.bias")  # each of two weights of ours
    assert {**own, **{name: shapes[name] for name in pooled if name in shapes}} == shapes
    count = sum(value.numel() for value in other.state.values()) / 1e6
    assert round(count) == published.get(release.name, round(count))


def test_noise_of_the_releases_is_as_published():
    """Nichol & Dhariwal 2021, §3; Dhariwal & Nichol 2021, appendix H; Nichol et al. 2022, §4."""
    found = {each.name: each.unseen for each in RELEASES}
    cosine = {name for name, unseen in found.items() if unseen.noise_schedule == "cosine"}
    assert cosine == {
        "64x64_diffusion",
        "64x64_classifier",
        "imagenet64_uncond_100M_1500K",
        "cifar10_uncond_50M_500K",
        "imagenet64_cond_270M_250K",
        "base",
        "base_inpaint",
    }
    improved = {each.name for each in RELEASES if each.project == "Improved Diffusion"}
    long = {name for name, unseen in found.items() if unseen.diffusion_steps == 4000}
    assert long == improved - {"lsun_uncond_100M_1200K_bs128"}
    assert {unseen.diffusion_steps for unseen in found.values()} == {1000, 4000}


# ----------------------------------------------------------------------------------------------------------- bad files


@pytest.mark.parametrize(
    ("settings", "changes", "flags", "message"),
    [
        ({"text": TEXT}, {"transformer_proj.bias": None}, {}, "has no transformer_proj.bias"),
        ({"inputs": 4, "outputs": 4}, {}, {}, "is a U-Net of latents with 4 channels, whose autoencoder"),
        ({"inputs": 4, "outputs": 8}, {}, {}, "is a U-Net of latents with 4 channels, whose autoencoder"),
        ({}, {}, {"num_head_channels": None}, "attention heads: say them by num_heads or num_head_channels"),
        (
            {},
            {},
            {"num_head_channels": None, "num_heads": 2},
            "of its decoder: say them by num_heads_upsample, -1 = as",
        ),
        ({"text": TEXT}, {"unemb.weight": torch.zeros(3, 3)}, {}, "has an extra unemb.weight"),
        ({"text": TEXT}, {"final_ln.weight": torch.zeros(3, dtype=torch.int64)}, {}, "an odd final_ln.weight"),
        ({"text": TEXT}, {"input_blocks.1.0.out_layers.3.weight": None}, {}, "in shapes of no network of this kind"),
        (
            {"pooled": 3},
            {},
            {"image_size": 32},
            "embedding of shape .64, 65., which does not fit a network of Guided-Diffusion with image_size 32",
        ),
        ({"inputs": 6}, {}, {}, "by small_size"),
        ({"inputs": 10}, {}, {}, "by small_size"),
        ({"inputs": 9, "outputs": 4}, {}, {}, "is a U-Net of latents with 4 channels, whose autoencoder"),
        ({}, {}, {"image_size": None}, "the shapes of none of the published networks"),
        ({}, {}, {"num_head_channels": 5}, "num_head_channels is 5"),
    ],
)
def test_what_does_not_fit_is_refused(settings, changes, flags, message):
    state, flags = (
        {name: value for name, value in each.items() if value is not None}
        for each in (Other(**settings).state | changes, {**GIVEN, "enc_heads": 4, **flags})
    )
    with refused(message):
        content_of(recognize(state, "theirs.pt", flags), state, "theirs.pt")


def test_a_file_of_theirs_is_read_like_ours(tmp_path, monkeypatch):
    """With the settings of a release of the same structure; as a PyTorch file, also as torch wrote it before 1.6, with
    its state, or with the names of DistributedDataParallel, and as safetensors."""
    import safetensors.torch

    from diff_dalle.checkpoints.foreign import reading

    other = Other(classes=4)
    found = recognize(other.state, "theirs.pt", given(other))
    release = dataclasses.replace(RELEASES[0], structure=found.structure, unseen=found.unseen)
    monkeypatch.setattr(reading, "find_release", lambda structure: release if structure == release.structure else None)
    torch.save(other.state, tmp_path / "theirs.pt")
    torch.save(other.state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    torch.save({"epoch": 3, "state_dict": other.state}, tmp_path / "whole.pt")
    torch.save({f"module.{name}": value for name, value in other.state.items()}, tmp_path / "ddp.pt")
    safetensors.torch.save_file(other.state, tmp_path / "theirs.safetensors")
    for path in (tmp_path / name for name in ("theirs.pt", "old.pt", "whole.pt", "ddp.pt", "theirs.safetensors")):
        content = load_file(str(path))
        assert content["kind"] == "generator" and content["config"]["denoising"]["caption_dropout"] == 0
        assert torch.equal(content["state"]["unet.out_conv.weight"], other.state["out.2.weight"])


@pytest.mark.parametrize("original", [False, True])
@pytest.mark.parametrize(
    ("name", "value"), [("network", "transformer"), ("patch_size", 2), ("output_conv", 4), ("low_res_skip", True)]
)
def test_what_a_layout_cannot_hold_is_refused(name, value, original):
    text = TextEncoderConfig(enc_attn_dim=0)
    config = GeneratorConfig(UNET, text, LowResConfig(small_size=8, low_res_levels=False))
    check_layout(config, "a.pt", original)
    section = "low_res" if name == "low_res_skip" else "unet"
    changed = replace(config, **{section: replace(getattr(config, section), **{name: value})})
    with refused(f"a.pt has {name} {value}, which networks of .* cannot have"):
        check_layout(changed, "a.pt", original)


# ------------------------------------------------------------------------------------------------------ Diff-DALLE only

ORIGINAL = Original(text=ORIGINAL_TEXT)


def test_weights_that_were_trained_here_may_have_no_way_back():
    """Keys and values that differ, and a caption that counts as one vector."""
    for part, wrong in (("text_attention.kv.weight", "text_attention.kv"), ("text_emb.weight", "text_emb")):
        network = network_of(ORIGINAL)
        name = next(name for name, _ in network.named_parameters() if name.endswith(part))
        with torch.no_grad():
            network.get_parameter(name)[0] += 1
        with refused(rf"ours.pt has values in \S*{wrong}\S* that the layout of Diff-DALLE"):
            state_of(network, "ours.pt", True)


def test_positions_that_were_trained_go_back():
    network = network_of(ORIGINAL)
    with torch.no_grad():
        network.text_encoder.position_emb += 1
    table = state_of(network, "ours.pt", True)["text_encoder.pos_enc.pe"][0]
    theirs = ORIGINAL.state["text_encoder.pos_enc.pe"][0]
    assert torch.equal(table[:LENGTH], theirs[:LENGTH] + 1) and torch.equal(table[LENGTH:], theirs[LENGTH:])


def test_what_shapes_of_an_original_do_not_tell_must_be_said():
    with refused(r"theirs.pt has the layout of Diff-DALLE.*run diff-dalle convert.*text_length"):
        recognize(ORIGINAL.file, "theirs.pt")
    found = recognize(ORIGINAL.file, "theirs.pt", {"image_size": 64, "noise_schedule": "cosine"}).unseen
    assert (found.num_head_channels, found.enc_heads, found.text_length) == (64, 1, 48)


def test_damaged_originals_are_refused():
    state = ORIGINAL.file
    for name, value, message in (
        ("extra", torch.ones(2), "has an extra extra, which does not belong to a network of Diff-DALLE"),
        ("text_encoder.pos_enc.pe", torch.ones(1, 3, 32), "has text_encoder.pos_enc.pe of shape"),
        ("middle_block.1.attn2.adjust_kv_dim.weight", torch.ones(2, 2), "adjust_kv_dim.weight of shape"),
    ):
        wrong = {**state, name: value}
        with refused(message):
            content_of(recognize(wrong, "theirs.pt", given(ORIGINAL)), wrong, "theirs.pt")
