"""convert.py: others' checkpoints become ours and the other way around, and then do all that ours do."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_making import make_file, sample
from original import Original
from others import Other
from script_running import run as run_script

import diff_dalle
from diff_dalle.checkpoints.checkpoint import load_file
from diff_dalle.checkpoints.safetensors import read_safetensors
from diff_dalle.commands import convert as command
from diff_dalle.commands.command_line import parse
from diff_dalle.commands.convert import ConvertConfig, convert
from diff_dalle.config import InputError
from diff_dalle.diffusion.guidance import GuidanceConfig
from diff_dalle.sampling.classifier import load_guide
from diff_dalle.worlds.shapes.scenes import ShapesConfig
from diff_dalle.worlds.shapes.shards import write_shapes

TRAINING = (
    "--iterations 2 --batch_size 4 --save_interval 2 --sample_interval 0 --num_workers 0 --precision fp32 --device cpu"
    " --threads 1 --ema_rate 0.5"
)
SHAPE = {"image_size": 16, "num_head_channels": 16, "noise_schedule": "cosine", "diffusion_steps": 50}
MERGES = ["r e", "re d"]
CLIP_TEXT = (2 * 256 + len(MERGES) + 2, 6, 32, 2, 2)  # the vocabulary of Diff-DALLE, and its text encoder
TEXT = (256 + 2 + 1, 6, 32, 1, 4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("others")
    (path / "vocab.bpe").write_text("\n".join(["#version: 0.2", *MERGES]) + "\n", encoding="utf-8")
    merges = ["r e", "re d</w>"]
    (path / "clip.txt").write_text("\n".join(["# with ends of words", *merges]) + "\n", encoding="utf-8")
    return path


def converted(folder, name, other, **flags):
    """The path of our checkpoint with the weights of a network of others."""
    theirs, out = folder / f"{name}_theirs.pt", folder / f"{name}.pt"
    torch.save(other.file, theirs)
    return run(model_path=theirs, out=out, **{**SHAPE, **flags})


def run(**flags):
    argv = [str(part) for name, value in flags.items() for part in (f"--{name}", value)]
    convert(parse(ConvertConfig, argv))
    return str(flags["out"])


@pytest.fixture(scope="module")
def unconditional(folder):
    return converted(folder, "unconditional", Other())


@pytest.fixture(scope="module")
def glide(folder):
    return converted(folder, "glide", Other(text=TEXT), enc_heads=4, bpe_path=folder / "vocab.bpe")


def test_a_network_with_text_follows_guidance(glide):
    """The vocabulary is in the file; the empty prompt is the null condition."""
    pipeline = diff_dalle.load(glide)
    red, none = sample(pipeline, ["red", ""], seeds=[3, 3])
    assert not np.array_equal(red, none)
    guided = [sample(pipeline, ["red"], seeds=[3], guidance=GuidanceConfig(guidance_scale=s))[0] for s in (1.0, 0.0)]
    alone = sample(pipeline, ["red", ""], seeds=[3, 3], guidance=GuidanceConfig(guidance_scale=1.0))
    assert np.array_equal(guided[0], alone[0]) and np.array_equal(guided[1], alone[1])


def test_classes_are_followed_without_guidance_by_default(folder):
    """There is no trained embedding for "no class"."""
    pipeline = diff_dalle.load(converted(folder, "classes", Other(classes=3)))
    given = {"labels": [0, 2], "seeds": [1, 1], "num_samples": 2}
    images = sample(pipeline, **given)
    assert not np.array_equal(*images)
    assert np.array_equal(images, sample(pipeline, **given, guidance=GuidanceConfig(guidance_scale=1.0)))
    with pytest.raises(InputError, match="guidance_scale is 3, but this network was trained without dropping"):
        sample(pipeline, **given, guidance=GuidanceConfig(guidance_scale=3.0))


def test_a_classifier_guides_towards_classes(folder, unconditional):
    """A generator without classes; the classifier's own probability of the class rises with the scale."""
    path = converted(folder, "classifier", Other(pooled=3))
    guide = load_guide(path, "cpu")
    given = {"labels": [0, 1, 2], "seeds": [1, 1, 1], "num_samples": 3, "classifier": path}
    pipeline, found = diff_dalle.load(unconditional), []
    for scale in (0.5, 8.0):
        images = sample(pipeline, **given, classifier_scale=scale)
        x = torch.from_numpy(images).permute(0, 3, 1, 2) / 127.5 - 1
        with torch.no_grad():
            logits = guide.model(x, torch.zeros(3))
        found.append(logits.log_softmax(1).diagonal().mean().item())
    assert found[1] > found[0]
    for wrong, message in (
        ({"labels": None, "seeds": None}, "give labels from 0 to 2"),
        ({"labels": [0, 1, 3]}, "not"),
    ):
        with pytest.raises(InputError, match=message):
            sample(pipeline, **{**given, **wrong}, classifier_scale=1.0)
    with pytest.raises(InputError, match="no text encoder"):
        sample(pipeline, ["red"] * 3, **{**given, "num_samples": 0}, classifier_scale=1.0)


def test_the_gradient_of_a_classifier_is_that_of_the_class(folder):
    path = converted(folder, "gradient", Other(pooled=3))
    guide, other = load_guide(path, "cpu"), Other(pooled=3)
    x = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0), requires_grad=True)
    t = torch.tensor([4.0, 30.0])
    value = guide.guide(["", ""], [2, 0], 1.0, "x_t").similarity(x, t)
    expected = other(x, t).log_softmax(1)[[0, 1], [2, 0]]
    assert torch.allclose(value, expected, atol=1e-5)
    given, wanted = (torch.autograd.grad(each.sum(), x)[0] for each in (value, expected))
    assert torch.allclose(given, wanted, atol=1e-5)


@pytest.fixture(scope="module")
def originals(folder):
    """The paths of a generator and a noised CLIP of the original Diff-DALLE."""
    flags = {"enc_heads": 2, "text_length": 6, "bpe_path": folder / "clip.txt"}
    networks = {"original": Original(text=CLIP_TEXT), "original_clip": Original(text=CLIP_TEXT, pooled=32)}
    return [converted(folder, name, other, **flags) for name, other in networks.items()]


def test_the_original_follows_its_captions_and_its_classifier(originals):
    """Captions were never dropped; the classifier's own similarity to the caption rises with the scale."""
    generator, classifier = originals
    pipeline, guide = diff_dalle.load(generator), diff_dalle.load_classifier(classifier)
    plain = sample(pipeline, ["red", ""], seeds=[3, 3])
    assert not np.array_equal(*plain)
    found = []
    for scale in (0.5, 50.0):
        images = sample(pipeline, ["red", "de"], seeds=[1, 2], classifier=classifier, classifier_scale=scale)
        found.append(float((guide.encode_image(images) * guide.encode_text(["red", "de"])).sum()))
    assert found[1] > found[0]
    with pytest.raises(InputError, match="guidance_scale is 3, but this network was trained without dropping"):
        sample(pipeline, ["red"], guidance=GuidanceConfig(guidance_scale=3.0))


@pytest.mark.parametrize("which", [0, 1])
def test_the_original_goes_back_bit_for_bit(originals, folder, which):
    out = run(model_path=originals[which], out=folder / f"original_back_{which}.pt", to="original")
    state, theirs = torch.load(out, weights_only=True), torch.load(originals[which].replace(".pt", "_theirs.pt"))
    assert state.keys() == theirs.keys() and all(torch.equal(state[name], value) for name, value in theirs.items())


def test_an_upsampler_continues(folder):
    path = converted(folder, "upsampler", Other(inputs=6), image_size=32, small_size=16)
    low = np.random.default_rng(0).integers(0, 256, (2, 16, 16, 3), dtype=np.uint8)
    images = diff_dalle.load(upsampler_paths=[path]).sample(low_res=low, seeds=[1, 1], num_samples=2, progress=False)
    assert images.shape == (2, 32, 32, 3) and not np.array_equal(*images)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_the_way_back_is_exact(glide, folder, suffix):
    out = run(model_path=glide, out=folder / f"back{suffix}", to="guided_diffusion")
    state = read_safetensors(out)[0] if suffix == ".safetensors" else torch.load(out, weights_only=True)
    theirs = Other(text=TEXT).state
    assert state.keys() == theirs.keys() and all(torch.equal(state[name], value) for name, value in theirs.items())


@pytest.mark.parametrize("to", ["guided_diffusion", "unet"])
def test_a_trained_embedding_for_no_class_is_left_out_only_on_request(tmp_path, to):
    """Which is there if classes were dropped in training; without, it is what initialization made it."""
    network = {"enc_attn_dim": 0, "num_classes": 3}
    path, out = make_file(tmp_path, **network), tmp_path / "out.safetensors"
    with pytest.raises(InputError, match='has a trained embedding for "no class", .* by drop_no_class True'):
        run(model_path=path, out=out, to=to)
    run(model_path=path, out=out, to=to, drop_no_class=True)
    table = load_file(path)["state"]["unet.encoder.label_emb.weight"]
    assert torch.equal(read_safetensors(str(out))[0]["label_emb.weight"], table[:3]) and table[3].any()
    (tmp_path / "never").mkdir()
    never = make_file(tmp_path / "never", **network, caption_dropout=0)
    run(model_path=never, out=tmp_path / "never.safetensors", to=to)


def test_a_unet_of_ours_is_written_with_its_names(tmp_path):
    path = make_file(tmp_path)
    out = run(model_path=path, out=tmp_path / "unet.safetensors", to="unet")
    state, ours = read_safetensors(out)[0], load_file(path)["state"]
    table = (tmp_path / "unet_names.md").read_text(encoding="utf-8")
    assert len(state) == sum(name.startswith("unet.") for name in ours) == table.count("`unet.")
    assert torch.equal(state["out.2.weight"], ours["unet.out_conv.weight"])
    rows = {tuple(cell.strip(" `") for cell in line.split("|")[1:-1]) for line in table.splitlines()}
    own = "unet.encoder.input_blocks.1.0.in_conv.weight"
    assert ("input_blocks.1.0.in_layers.2.weight", "16×16×3×3", own) in rows
    assert "text_encoder" not in table


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    write_shapes(ShapesConfig(image_size=16, train_samples=8, val_samples=0, samples_per_shard=8), str(folder))
    return folder / "train"


def test_a_lora_is_trained_on_it(glide, shards, tmp_path):
    run_script("train_lora.py", TRAINING, f"--model_path {glide} --data_dir {shards} --logdir {tmp_path} --lr 0.05")
    before, after = (
        sample(diff_dalle.load(glide, lora=lora), ["red"], seed=3)
        for lora in ([], [str(tmp_path / "lora000002.safetensors")])
    )
    assert not np.array_equal(before, after)


def test_training_continues_from_it(glide, shards, tmp_path):
    network = "--num_channels 32 --channel_mult 1,2 --num_res_blocks 1 --attention_resolutions 8 --resblock_updown True"
    network += " --variance learned_range --text_attention joint --text_padding learned"
    text = f"--text_length {TEXT[1] + 1} --enc_attn_dim {TEXT[2]} --enc_depth {TEXT[3]} --enc_heads {TEXT[4]}"
    shape = " ".join(f"--{name} {value}" for name, value in SHAPE.items())
    own = f"--bpe_path {Path(glide).parent}/vocab.bpe --init_checkpoint {glide} --data_dir {shards} --logdir {tmp_path}"
    run_script("train_generator.py", TRAINING, network, text, shape, own, "--lr 1e-5")
    before, after = load_file(glide)["state"], load_file(str(tmp_path / "model000002.pt"))["state"]
    changes = [(after[name] - value).abs().max().item() for name, value in before.items()]
    assert before.keys() == after.keys() and 0 < max(changes) < 1e-4
    assert (after["text_encoder.token_emb.weight"] != before["text_encoder.token_emb.weight"]).any()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"model_path": "ours", "to": "guided_diffusion"}, "has patch_size|has text_attention cross"),
        ({"model_path": "unconditional", "to": "guided_diffusion", "image_size": 16}, "image_size is set"),
        ({"model_path": "unconditional", "to": "unet", "out": "x.pt"}, "end it with .safetensors"),
        ({"out": "x.safetensors"}, "is a .pt file"),
        ({"bpe_path": "vocab"}, "reads no text"),
        ({"model_path": "glide_theirs", "enc_heads": 4}, "give GPT-2's merge file"),
        ({"model_path": "glide_theirs", "enc_heads": 4, "bpe_path": ""}, "give GPT-2's merge file"),
        (
            {"model_path": "glide_theirs", "enc_heads": 4, "bpe_path": "clip"},
            "knows 259 tokens, but the vocabulary of --bpe_path .* has 516",
        ),
        ({"model_path": "original_theirs"}, "give CLIP's, bpe_simple_vocab_16e6.txt.gz or clip, with --bpe_path"),
        ({"model_path": "ours", "to": "original"}, "has patch_size|has text_padding masked"),
        ({"model_path": "glide", "to": "original"}, "has text_attention joint, which networks of the original Diff-D"),
        ({"drop_no_class": True}, "drop_no_class is set, but has no effect with (--)?to diff_dalle"),
        ({"image_size": None}, "shapes of none of the published networks"),
        ({"num_head_channels": 7}, "num_head_channels is 7"),
    ],
)
def test_bad_input(flags, message, folder, unconditional, glide, originals, tmp_path):
    paths = {"ours": make_file(tmp_path), "unconditional": unconditional, "glide": glide, "vocab": folder / "vocab.bpe"}
    paths["clip"] = folder / "clip.txt"
    theirs = {"glide_theirs": "glide_theirs", "original_theirs": "original_theirs", "theirs": "unconditional_theirs"}
    paths |= {name: folder / f"{file}.pt" for name, file in theirs.items()}
    converts = flags.get("to", "diff_dalle") == "diff_dalle"
    flags = {"model_path": "theirs", "out": str(tmp_path / "x.pt"), **(SHAPE if converts else {}), **flags}
    flags = {name: paths.get(value, value) for name, value in flags.items() if value is not None}
    with pytest.raises(InputError, match=message):
        run(**flags)


@pytest.mark.parametrize(
    ("to", "suffix"), [("diff_dalle", ".pt"), ("guided_diffusion", ".pt"), ("unet", ".safetensors")]
)
def test_what_is_written_moves_a_bar(to, suffix, unconditional, folder, tmp_path, monkeypatch):
    bars, bar = [], command.tqdm
    monkeypatch.setattr(
        command, "tqdm", lambda **given: bars.append(bar(**{**given, "disable": False}, file=io.StringIO())) or bars[-1]
    )
    theirs = to == "diff_dalle"
    path = folder / "unconditional_theirs.pt" if theirs else unconditional
    out = run(model_path=path, out=tmp_path / f"out{suffix}", to=to, **(SHAPE if theirs else {}))
    (found,) = bars
    assert found.n == Path(out).stat().st_size >= found.total > 0.9 * found.n


def test_an_existing_file_stays(unconditional, folder):
    with pytest.raises(InputError, match="exists already"):
        run(model_path=folder / "unconditional_theirs.pt", out=unconditional, **SHAPE)
