"""Checkpoints of the original Diff-DALLE: what they compute here and there."""

import pytest
import torch
from network_making import relative
from original import Original
from refusing import refused

from diff_dalle.batch import Conditioning
from diff_dalle.checkpoints.checkpoint import load_weights
from diff_dalle.checkpoints.foreign.reading import content_of, recognize, state_of
from diff_dalle.checkpoints.kinds import find_kind

SIZE, LENGTH, END = 16, 7, 39
GIVEN = {"image_size": SIZE, "num_head_channels": 16, "noise_schedule": "cosine", "text_length": LENGTH}
TEXT = (END + 1, LENGTH, 32, 2, 2)
CASES = {
    "generator": Original(text=TEXT),
    "equal widths": Original(text=(END + 1, LENGTH, 64, 1, 4), attention=(True, True)),
    "without text": Original(),
    "upsampler": Original(inputs=6, outputs=3),
    "upsampler with text": Original(inputs=6, text=TEXT, updown=False, blocks=2),
    "classifier": Original(pooled=32, text=TEXT),
    "deep classifier": Original(pooled=32, text=TEXT, mults=(1, 1, 2), attention=(False, True, True), final_size=4),
}


def given(other):
    flags = {**GIVEN, "small_size": SIZE // 4} if other.inputs == 6 else GIVEN
    return {**flags, "enc_heads": other.text[4]} if other.text else flags


def network_of(other):
    content = content_of(recognize(other.file, "theirs.pt", given(other)), other.file, "theirs.pt")
    assert content["tokenizer"] == (f"clip-{END + 1}" if other.text else None)
    network = find_kind(content["kind"]).read(content["config"]).build(END + 1).eval()
    load_weights(network, content, "theirs.pt")
    return network


def captions():
    """Theirs, and ours without the last positions, which hold nothing."""
    tokens = torch.zeros(2, LENGTH, dtype=torch.long)
    tokens[0, :5], tokens[1, :2] = torch.tensor([38, 3, 17, 5, END]), torch.tensor([38, END])
    return tokens, tokens[:, :5], tokens[:, :5] > 0


@pytest.mark.parametrize("name", [name for name in CASES if "classifier" not in name])
@torch.no_grad()
def test_the_function_of_a_generator_is_theirs(name):
    other = CASES[name]
    generator = torch.Generator().manual_seed(0)
    x, t = torch.randn(2, 3, SIZE, SIZE, generator=generator), torch.tensor([3.0, 711.0])
    theirs, ours = {}, {}
    if other.inputs == 6:
        low_res, none = torch.randn(2, 3, SIZE // 4, SIZE // 4, generator=generator), torch.zeros(2)
        theirs["low_res"] = low_res
        ours = {"low_res": low_res, "low_res_level": none, "low_res_blur": none}
    if other.text:
        tokens, ours["tokens"], ours["mask"] = captions()
        theirs |= {"tokens": tokens, "mask": tokens > 0}
    network, expected = network_of(other), other(x, t, **theirs)
    assert relative(network(x, t, Conditioning(**ours)), expected) < 1e-5
    if other.text:  # a caption that is empty or dropped, for which the mask has the start token alone
        ours["mask"] = ours["mask"] & torch.tensor([[True], [False]]) | (torch.arange(5) == 0)
        assert relative(network(x, t, Conditioning(**ours)), expected) < 1e-5


@pytest.mark.parametrize("name", [name for name in CASES if "classifier" in name])
@torch.no_grad()
def test_the_function_of_a_classifier_is_theirs(name):
    other = CASES[name]
    network = network_of(other)
    x, t = torch.randn(2, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0)), torch.tensor([3.0, 711.0])
    tokens, *ours = captions()
    assert relative(network.encode_image(x, t), other.encode_image(x, t)) < 1e-5
    assert relative(network.encode_text(*ours), other.encode_text(tokens)) < 1e-5
    assert network.scale.item() == pytest.approx(other.scale, rel=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_the_way_back_is_exact(name):
    other = CASES[name]
    state = state_of(network_of(other), "ours.pt", True)
    assert state.keys() == other.file.keys()
    assert all(torch.equal(state[key], value) for key, value in other.file.items())


def test_weights_that_were_trained_here_may_have_no_way_back():
    """Keys and values that differ, and a caption that counts as one vector."""
    for part, wrong in (("text_attention.kv.weight", "text_attention.kv"), ("text_emb.weight", "text_emb")):
        network = network_of(CASES["generator"])
        name = next(name for name, _ in network.named_parameters() if name.endswith(part))
        with torch.no_grad():
            network.get_parameter(name)[0] += 1
        with refused(rf"ours.pt has values in \S*{wrong}\S* that the layout of Diff-DALLE"):
            state_of(network, "ours.pt", True)


def test_positions_that_were_trained_go_back():
    network = network_of(CASES["generator"])
    with torch.no_grad():
        network.text_encoder.position_emb += 1
    table = state_of(network, "ours.pt", True)["text_encoder.pos_enc.pe"][0]
    theirs = CASES["generator"].state["text_encoder.pos_enc.pe"][0]
    assert torch.equal(table[:LENGTH], theirs[:LENGTH] + 1) and torch.equal(table[LENGTH:], theirs[LENGTH:])


def test_what_shapes_do_not_tell_must_be_said():
    with refused(r"theirs.pt has the layout of Diff-DALLE.*run diff-dalle convert.*text_length"):
        recognize(CASES["generator"].file, "theirs.pt")
    found = recognize(CASES["generator"].file, "theirs.pt", {"image_size": 64, "noise_schedule": "cosine"}).unseen
    assert (found.num_head_channels, found.enc_heads, found.text_length) == (64, 1, 48)


def test_damaged_checkpoints_are_refused():
    state = CASES["generator"].file
    for name, value, message in (
        ("extra", torch.ones(2), "has an extra extra, which does not belong to a network of Diff-DALLE"),
        ("text_encoder.pos_enc.pe", torch.ones(1, 3, 32), "has text_encoder.pos_enc.pe of shape"),
        ("middle_block.1.attn2.adjust_kv_dim.weight", torch.ones(2, 2), "adjust_kv_dim.weight of shape"),
    ):
        wrong = {**state, name: value}
        with refused(message):
            content_of(recognize(wrong, "theirs.pt", given(CASES["generator"])), wrong, "theirs.pt")
