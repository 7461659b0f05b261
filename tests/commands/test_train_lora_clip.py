"""LoRAs with tokens of the CLIP that encodes the text of a stage."""

import json

import cascade_file_making as cascade
import numpy as np
import pytest
import torch
from checkpoint_making import make_classifier_file
from script_running import run

import diff_dalle
from diff_dalle.checkpoints.checkpoint import load_file
from diff_dalle.checkpoints.lora_file import WeightedLora, read_lora, write_lora
from diff_dalle.commands.merge_lora import MergeConfig, merge_lora_files
from diff_dalle.commands.training_kinds import parse_cascade
from diff_dalle.config import InputError
from diff_dalle.distributed.world import ALONE
from diff_dalle.embeddings.clip import load_clip
from diff_dalle.embeddings.contract import Clip
from diff_dalle.randomness import Draw
from diff_dalle.sampling.clips import add_tokens

TOKENS = [["[fernando]", "^dog</w>"], ["^picture", None]]


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """Settings of a LoRA over a stage C whose text a CLIP of ours encodes."""
    folder = tmp_path_factory.mktemp("parts")
    world = cascade.make_world(folder / "shards")
    frozen = cascade.make_frozen(folder / "frozen", world)
    clip = make_classifier_file(folder, noised=False)
    text = {"text": {"enc_attn_dim": 0, "text_length": 12}, "text_width": 16, "pooled_width": 16}
    own = [(f"model.{name}", value) for name, value in text.items()]
    common = [*cascade.frozen_of("stage_c", frozen), *own, ("clip_text_model_name", clip), ("loop.preview_samples", 0)]
    cascade.run("stage_c", folder / "base", world, *common, ("lr", 0.05), ("updates", 2))
    base = str(folder / "base" / "run" / "model000002.pt")
    own = [("kind", "stage_c_lora"), ("generator_checkpoint_path", base), ("train_tokens", TOKENS), ("lr", 0.05)]
    return {"world": world, "clip": clip, "base": base, "semantic": frozen["effnet_checkpoint_path"]}, [*common, *own]


def file(folder, parts, *changes) -> str:
    return cascade.write_file("stage_c", folder, parts[0]["world"], *parts[1], *changes)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, parts):
    folder = tmp_path_factory.mktemp("trained")
    run("train_cascade.py", file(folder, parts))
    return folder / "run"


def test_the_deltas_alone_are_trained_and_the_file_names_their_clip(trained, parts):
    given, _ = parts
    lora = read_lora(str(trained / "lora000004.safetensors"))
    state = load_file(str(trained / "model000004.pt"))["state"]
    clip = load_clip("diff_dalle", given["clip"], "cpu")
    assert lora.about.clip == clip.identity and lora.deltas is not None
    assert lora.deltas.any(1).tolist()[-1] is False  # no caption has [fernando]
    assert lora.deltas.any() and all(name.startswith("lora.") for name in state)
    again = read_lora(str(trained / "model000004.pt"))
    assert again.about == lora.about and torch.equal(again.tensors["tokens.deltas"], lora.deltas)
    header = (trained / "lora000004.safetensors").read_bytes()
    length = int.from_bytes(header[:8], "little")
    assert json.loads(header[8 : 8 + length])["__metadata__"]["clip"] == clip.identity


def test_the_gradient_of_a_token_is_that_of_a_finite_difference(tmp_path, parts):
    run_ = parse_cascade([file(tmp_path, parts, ("denoising.text_dropout", 0.0))]).recipe().open(ALONE)
    data = run_.both_loaders[0]
    (trainee,) = run_.trainees(data)
    batch, deltas = data.batch_at(range(4)), trainee.task.model.lora.tokens.deltas
    draw = Draw(0, batch.index, torch.device("cpu"))
    trainee.task.losses(batch, draw)["loss"].sum().backward()
    assert deltas.requires_grad and deltas.grad.any()
    names = [name for name, parameter in trainee.task.named_parameters() if parameter.requires_grad]
    assert "model.lora.tokens.deltas" in names
    clip = run_.text_clip
    assert not any(parameter.requires_grad for parameter in clip.parameters())
    tokens, mask = clip.tokenize(["picture 1"], clip.text_length)
    direction = deltas.grad.clone()
    pooled = clip.encode_tokens(tokens, mask)[0]
    weights = torch.randn(pooled.shape, generator=torch.Generator().manual_seed(0))
    (expected,) = torch.autograd.grad((pooled * weights).sum(), deltas)
    step = 1e-2 * direction / direction.norm()
    with torch.no_grad():
        values = []
        for sign in (1, -1):
            deltas += sign * step
            values.append((clip.encode_tokens(tokens, mask)[0] * weights).sum())
            deltas -= sign * step
    assert float(values[0] - values[1]) == pytest.approx(float(2 * (expected * step).sum()), rel=0.02, abs=1e-5)


def test_sampling_gives_the_clip_the_tokens(trained, parts):
    given, _ = parts
    path, options = str(trained / "lora000004.safetensors"), {"semantic": given["semantic"]}
    lora = read_lora(path)
    tokens_alone = str(trained / "tokens.safetensors")  # without a change of the stage
    silent = {name: value * (name == "tokens.deltas") for name, value in lora.tensors.items()}
    with open(tokens_alone, "wb") as each:
        write_lora(each, lora.about, silent)

    def sample(prompt, *loras, **more) -> np.ndarray:
        return diff_dalle.load(given["base"], "cpu", lora=loras, **options, **more).sample(prompt, progress=False)

    assert not np.array_equal(sample("a picture"), sample("a picture", path))
    assert not np.array_equal(sample("a picture"), sample("a picture", tokens_alone))
    assert np.array_equal(sample("a circle"), sample("a circle", tokens_alone))
    clip = load_clip("diff_dalle", given["clip"], "cpu")
    plain = [each.clone() for each in clip.encode_text(["a picture", "a circle"])[:2]]
    add_tokens(clip, [WeightedLora(lora, 2.0)])
    changed = clip.encode_text(["a picture", "a circle"])[:2]
    assert not torch.allclose(plain[0][0], changed[0][0]) and torch.equal(plain[0][1], changed[0][1])
    assert not changed[0].requires_grad
    with pytest.raises(InputError, match=r"the token \[fernando\] exists already"):
        sample("a picture", path, path)
    with pytest.raises(InputError, match="trains tokens of a CLIP, which no checkpoint of a stage_c holds"):
        merge_lora_files(MergeConfig(given["base"], (path,), out=str(trained / "merged.pt")))


def test_other_clips_are_refused(tmp_path, parts, monkeypatch):
    """Those whose text tower is not known to us."""
    monkeypatch.setattr("diff_dalle.embeddings.clip.DiffDalleClip.tokenizer", Clip.tokenizer)
    with pytest.raises(
        InputError, match="train_tokens is set, but the text tower .* is another library's: leave it out"
    ):
        parse_cascade([file(tmp_path, parts)]).recipe().open(ALONE)
