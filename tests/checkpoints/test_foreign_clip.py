"""GLIDE's noised CLIP: what its two files compute, here and there. The reference is written from its names."""

import math
from types import SimpleNamespace

import pytest
import torch
from cascade_making import make_stage, stages
from network_making import relative
from refusing import refused
from safetensors import safe_open
from torch.nn import functional as F

import diff_dalle
from diff_dalle.checkpoints.checkpoint import load_file
from diff_dalle.checkpoints.foreign.glide_clip import clip_content, clip_states
from diff_dalle.commands.command_line import parse
from diff_dalle.commands.convert import ConvertConfig, convert
from diff_dalle.config import InputError
from diff_dalle.diffusion.sampling import SamplerConfig
from diff_dalle.sampling.classifier import load_guide
from diff_dalle.text.vocabulary import find_vocabulary

SIZE, PATCH, HEAD, DIM, STEPS, LENGTH, ROWS = 8, 4, 8, 12, 40, 10, 49500
MEANS, DEVIATIONS = torch.tensor([122.77093945, 116.74601272, 104.09373519]), torch.tensor([68.5005, 66.6322, 70.3232])


def make_half(width, depth, **inputs):
    torch.manual_seed(width)
    state = {f"blocks.input.{name}": torch.randn(shape) / math.sqrt(shape[-1]) for name, shape in inputs.items()}

    def norm(name):
        state[f"{name}.g"], state[f"{name}.b"] = 1 + 0.1 * torch.randn(width), 0.1 * torch.randn(width)

    def affine(name, rows, columns, bias=True):
        state[f"{name}.w"] = torch.randn(rows, columns) / math.sqrt(columns)
        if bias:
            state[f"{name}.b"] = 0.1 * torch.randn(rows)

    for i in range(depth):
        block = f"blocks.block_{i}"
        norm(f"{block}.f_attn.ln")
        for role in "qkvc":
            affine(f"{block}.f_attn.f_{role}", width, width, bias=role != "k")
        norm(f"{block}.f_mlp.ln")
        affine(f"{block}.f_mlp.f_1", 4 * width, width)
        affine(f"{block}.f_mlp.f_2", width, 4 * width)
    if "w_t" in inputs:
        norm("blocks.input.ln")
    norm("blocks.output.ln")
    affine("blocks.output.f", DIM, width, bias=False)
    return state


IMAGE = make_half(24, 2, w_t=(STEPS, 24), patch_proj=(24, 3, PATCH, PATCH), w_pos=(1 + (SIZE // PATCH) ** 2, 24))
TEXT = make_half(16, 3, w_voc=(ROWS, 16), w_pos=(LENGTH, 16))


def theirs(state, h, is_causal):
    def norm(name, x):
        return F.layer_norm(x, x.shape[-1:], state[f"{name}.g"], state[f"{name}.b"])

    def affine(name, x):
        return F.linear(x, state[f"{name}.w"], state.get(f"{name}.b"))

    if "blocks.input.ln.g" in state:
        h = norm("blocks.input.ln", h)
    for i in range(sum(name.endswith("f_q.w") for name in state)):
        name = f"blocks.block_{i}.f_attn"
        q, k, v = (affine(f"{name}.f_{role}", norm(f"{name}.ln", h)) for role in "qkv")
        q, k, v = (each.unflatten(-1, (-1, HEAD)).transpose(1, 2) for each in (q, k, v))
        weights = q @ k.transpose(2, 3) / math.sqrt(HEAD)
        if is_causal:
            weights = weights.masked_fill(torch.ones(weights.shape[2:], dtype=torch.bool).triu(1), -1e10)
        h = h + affine(f"{name}.f_c", (weights.softmax(-1) @ v).transpose(1, 2).flatten(2))
        name = f"blocks.block_{i}.f_mlp"
        h = h + affine(f"{name}.f_2", F.gelu(affine(f"{name}.f_1", norm(f"{name}.ln", h))))
    return affine("blocks.output.f", norm("blocks.output.ln", h))


def image_features(x, t):
    pixels = ((x + 1) * 127.5 - MEANS[:, None, None]) / DEVIATIONS[:, None, None]
    h = F.conv2d(pixels, IMAGE["blocks.input.patch_proj"], stride=PATCH).flatten(2).transpose(1, 2)
    h = torch.cat([IMAGE["blocks.input.w_t"][t][:, None], h], 1) + IMAGE["blocks.input.w_pos"]
    return F.normalize(theirs(IMAGE, h, False)[:, 0], dim=-1)


def text_features(tokens, lengths):
    h = TEXT["blocks.input.w_voc"][tokens] + TEXT["blocks.input.w_pos"]
    return F.normalize(theirs(TEXT, h, True)[torch.arange(len(tokens)), torch.tensor(lengths) - 1], dim=-1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clip")
    torch.save(IMAGE, folder / "clip_image_enc.pt")
    torch.save(TEXT, folder / "clip_text_enc.pt")
    return folder


@pytest.fixture(scope="module")
def path(folder):
    return make(folder, folder / "clip.pt")


def make(folder, out, **changed):
    given = {
        "text_path": str(folder / "clip_text_enc.pt"),
        "bpe_path": find_vocabulary(""),
        "num_head_channels": HEAD,
        **changed,
    }
    convert(ConvertConfig(model_path=str(folder / "clip_image_enc.pt"), out=str(out), **given))
    return str(out)


def test_its_files_become_a_classifier_and_back(path, tmp_path):
    """The same features and gradient of guidance; an empty prompt has its end token; other steps are rounded."""
    classifier = diff_dalle.load_classifier(path, "cpu")
    prompts, end = ["a red circle", ""], classifier.tokenizer.vocab_size - 1
    tokens = torch.zeros(2, LENGTH, dtype=torch.int64)
    ids = classifier.tokenizer.encode(prompts[0])
    tokens[0, : len(ids)], tokens[1, :2] = torch.tensor(ids), torch.tensor([end - 1, end])
    expected = text_features(tokens, [len(ids), 2])
    assert relative(classifier.encode_text(prompts), expected) < 1e-5
    x, t = torch.randn(2, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0)), torch.tensor([3, 39])
    x.requires_grad_()
    ours = torch.autograd.grad(classifier.guide(prompts, None, 3.0, "x_t").similarity(x, t.float()).sum(), x)[0]
    wanted = torch.autograd.grad(100 * (image_features(x, t) * expected).sum(), x)[0]
    assert relative(classifier.model.encode_image(x, t), image_features(x, t)) < 1e-5 and relative(ours, wanted) < 1e-4
    assert classifier.noised and classifier.diffusion.noise_schedule == "cosine"
    out = tmp_path / "back.pt"
    convert(ConvertConfig(model_path=path, out=str(out), to="guided_diffusion"))
    for half, file in ((IMAGE, out), (TEXT, tmp_path / "back_text.pt")):
        state = torch.load(file, weights_only=True)
        assert half.keys() == state.keys() and all(torch.equal(state[name], half[name]) for name in half)
    convert(ConvertConfig(model_path=path, out=str(tmp_path / "back.safetensors"), to="guided_diffusion"))
    with safe_open(tmp_path / "back_text.safetensors", "pt") as file:
        assert file.metadata()["layout"] == "guided_diffusion" and set(file.keys()) == TEXT.keys()
    with torch.no_grad():
        classifier.model.text_tower.blocks[1].attention.qkv.bias[16] = 1.0  # of the keys
    with refused("a.pt has values in text_tower.blocks.1.attention.qkv.bias that the layout of GLIDE cannot hold"):
        clip_states(classifier.model, "a.pt")


def test_it_guides_a_generator_without_its_vocabulary(path, tmp_path):
    generator = diff_dalle.load(
        make_stage(tmp_path / "g.pt", diffusion_steps=STEPS, noise_schedule="cosine", prediction="eps"), "cpu"
    )
    guide = load_guide(path, "cpu")
    assert guide.has_noise_of(generator.stages[0].diffusion)
    guide.check_fits((SIZE, SIZE), guide.signal, SimpleNamespace(base_identity="another"))
    options = {"sampler": SamplerConfig("ancestral", 4), "classifier": guide}
    plain, weak, strong = (stages(generator, ["red"], classifier_scale=scale, **options)[0] for scale in (0.0, 1.0, 30))
    assert 0 < abs(weak - plain).mean() < abs(strong - plain).mean()


def test_what_is_not_both_halves_is_refused(folder, tmp_path):
    image, text = folder / "clip_image_enc.pt", folder / "clip_text_enc.pt"
    for read in (load_file, diff_dalle.load_classifier):
        for half in (image, text):
            with pytest.raises(InputError, match="is half of GLIDE's noised CLIP: make a checkpoint") as error:
                read(str(half))
            assert f"--{'text' if half == text else 'model'}_path {half} " in str(error.value)
    for changed, message in (
        ({"text_path": ""}, "is half of GLIDE's noised CLIP: run diff-dalle convert .* --text_path .* --bpe_path clip"),
        ({"text_path": str(image)}, "is not the text encoder of GLIDE's"),
        ({"image_size": 8}, "image_size is set, but has no effect"),
        ({"num_head_channels": 7}, "num_head_channels is 7, but must divide 24"),
    ):
        with refused(message):
            make(folder, tmp_path / "x.pt", **changed)
    with refused("--text_path"):
        parse(ConvertConfig, ["--model_path", str(image), "--to", "guided_diffusion", "--text_path", str(text)])
    odd = {
        "has no blocks.output.f.w|shapes of no noised CLIP": {"blocks.output.f.w": None},
        "has no blocks.output.ln.g": {"blocks.output.ln.g": None},
        "has an extra more": {"more": torch.zeros(3)},
        "f_mlp.f_1.b of shape": {"blocks.block_0.f_mlp.f_1.b": torch.zeros(3)},
        "an odd blocks.output.ln.b": {"blocks.output.ln.b": torch.zeros(24, dtype=torch.int64)},
    }
    for message, changed in odd.items():
        wrong = {name: value for name, value in {**IMAGE, **changed}.items() if value is not None}
        with refused(message):
            clip_content(wrong, TEXT, ("i.pt", "t.pt"), HEAD)
