"""Frozen CLIPs: ours from its checkpoints, and what all have in common."""

import json
import pickle
import shutil
import sys
import types

import pytest
import torch
from checkpoint_making import make_classifier_file, make_file
from refusing import refused
from torch import nn
from torch.nn import functional as F

from diff_dalle.embeddings.clip import is_local_file, known_image_size, load_clip
from diff_dalle.embeddings.contract import fit_images, weights_digest
from diff_dalle.sampling.classifier import load_classifier
from diff_dalle.training.task import Task

TEXTS = ["a red circle", "two blue squares to the left of a star", ""]


def images(count=3, height=16, width=16, channels=3):
    return torch.rand(count, channels, height, width, generator=torch.Generator().manual_seed(0)) * 2 - 1


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_classifier_file(tmp_path_factory.mktemp("clip"), noised=False)


@pytest.fixture(scope="module")
def clip(path):
    return load_clip("diff_dalle", path, "cpu")


def test_a_checkpoint_says_all_about_a_clip_of_ours(clip, path):
    assert known_image_size("diff_dalle", path) == 16
    assert (clip.image_size, clip.embed_dim, clip.text_width, clip.text_length) == (16, 16, 16, 12)
    assert clip.name == f"diff_dalle {path}" and clip.identity.startswith("diff_dalle:")
    assert not clip.training and not any(parameter.requires_grad for parameter in clip.parameters())


@pytest.mark.parametrize("noised", [True, False])
def test_it_sees_pictures_and_texts_as_the_classifier_does(tmp_path, noised):
    path = make_classifier_file(tmp_path, noised=noised)
    clip, classifier = load_clip("diff_dalle", path, "cpu"), load_classifier(path, "cpu")
    embedding, states, mask = clip.encode_text(TEXTS)
    torch.testing.assert_close(embedding, classifier.encode_text(TEXTS))
    found = clip.encode_images(images())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, classifier.model.encode_image(images(), torch.zeros(3, dtype=torch.int64)))
    tokens, expected = classifier.tokenizer(TEXTS, 12)
    assert torch.equal(mask, expected)
    with torch.no_grad():
        torch.testing.assert_close(states[mask], classifier.model.text_tower(tokens, mask)[0][mask])
    assert mask.sum(1).tolist() == [5, 11, 1]
    assert (states != 0).any(2).equal(mask)


def test_embeddings_have_unit_norm_and_no_gradient(clip):
    found = [clip.encode_images(images().requires_grad_()), clip.encode_text(TEXTS)[0]]
    for embedding in found:
        torch.testing.assert_close(embedding.norm(dim=1), torch.ones(3))
        assert not embedding.requires_grad


def test_the_identity_is_that_of_the_weights(clip, path, tmp_path):
    moved = shutil.copy(path, tmp_path / "moved.pt")
    assert load_clip("diff_dalle", str(moved), "cpu").identity == clip.identity
    assert load_clip("diff_dalle", path, "cpu", "bf16").identity == clip.identity
    other = make_classifier_file(tmp_path, noised=False, classifier_enc_heads=1, text_length=11)
    assert load_clip("diff_dalle", other, "cpu").identity != clip.identity


def test_a_digest_is_that_of_names_values_and_arithmetic():
    weights = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(1.0, dtype=torch.bfloat16)}
    same = {"b": weights["b"].clone(), "a": weights["a"].t().contiguous().t()}
    assert weights_digest(weights) == weights_digest(same) and len(weights_digest(weights)) == 16
    others = [{**weights, "a": weights["a"].view(3, 2)}, {**weights, "b": weights["b"] + 1}, {"a": weights["a"]}]
    others += [{"c": weights["a"], "b": weights["b"]}]
    assert len({weights_digest(weights), weights_digest(weights, "quick"), *map(weights_digest, others)}) == 6


def test_pictures_of_other_sizes_are_resized_and_their_center_is_cropped(clip):
    large = images(2, 24, 40)
    wide = F.interpolate(large, (16, 27), mode="bicubic", antialias=True).clamp(-1, 1)[:, :, :, 5:21]
    torch.testing.assert_close(fit_images(large, 16), wide)
    torch.testing.assert_close(clip.encode_images(large), clip.encode_images(wide))
    assert fit_images(images(1, 8, 8), 16).shape == (1, 3, 16, 16)
    assert fit_images(images(1, 9, 7), 16).shape == (1, 3, 16, 16)
    assert torch.equal(fit_images(images(), 16), images())
    assert not fit_images(large, 16, "bilinear").equal(wide)
    edges = torch.ones(1, 3, 64, 64)
    edges[:, :, :, 32:] = -1
    assert fit_images(edges, 16).abs().max() <= 1


def test_gray_pictures_get_three_channels_and_others_are_refused(clip):
    gray = images(2, channels=1)
    torch.testing.assert_close(clip.encode_images(gray), clip.encode_images(gray.repeat(1, 3, 1, 1)))
    with refused("have 4 channels"):
        clip.encode_images(images(channels=4))


def test_texts_of_another_length_are_refused(clip):
    tokens, mask = clip.tokenize(TEXTS[:1], 10)
    with refused("reads texts of 12 tokens, but they have 10"):
        clip.encode_tokens(tokens, mask)


def test_the_tokenizer_can_be_sent_to_a_worker(clip):
    sent = pickle.loads(pickle.dumps(clip.tokenize))
    assert torch.equal(sent(TEXTS, 12)[0], clip.tokenize(TEXTS, 12)[0])


def test_its_precision_is_its_own(clip, path):
    """Whatever that of the training around it."""
    expected = clip.encode_images(images())
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(clip.encode_images(images()), expected)
    half = load_clip("diff_dalle", path, "cpu", "bf16").encode_images(images())
    assert half.dtype == torch.float32 and not torch.equal(half, expected)
    assert F.cosine_similarity(half, expected).min() > 0.99


def test_a_clip_can_be_a_companion(clip):
    class Blank(Task):
        def __init__(self):
            super().__init__()
            self.model = nn.Linear(1, 1)

    task = Blank()
    task.add_companion("clip", clip)
    assert task.companions["clip"] is clip and len(task.state_dict()) == 2


@pytest.mark.parametrize(
    ("model", "options", "reason"),
    [
        ("", {}, "the CLIP has no model"),
        ("none.pt", {}, "does not exist"),
        ("generator", {}, "holds a generator, but a classifier is required"),
        ("generator", {"precision": "half"}, "precision is 'half'"),
        ("classifier", {"outputs": "released"}, "are 'released', but those of a CLIP of ours must be 'unit'"),
        ("x", {"make": "open-clip"}, "clip.make 'open-clip' is unknown; did you mean open_clip"),
    ],
)
def test_what_cannot_be_loaded_is_refused(tmp_path, path, model, options, reason):
    model = {"generator": lambda: make_file(tmp_path), "classifier": lambda: path}.get(model, lambda: model)()
    with refused(reason):
        load_clip(**{"make": "diff_dalle", "model": model, "device": "cpu", **options})


@pytest.mark.parametrize(
    ("make", "model", "size"),
    [
        ("openai", "ViT-L/14", 224),
        ("openai", "ViT-B/32:weights.pt", 224),
        ("openai", "ViT-L/14@336px:w.pt", 336),
        ("diff_dalle", "none.pt", 0),
        ("diff_dalle", "s3://bucket/clip.pt", 0),
    ],
)
def test_image_sizes_are_known_before_a_clip_is_loaded(make, model, size):
    assert known_image_size(make, model) == size


def test_models_of_open_clip_are_known_from_its_files_without_importing_it(tmp_path, monkeypatch):
    package = tmp_path / "open_clip"
    (package / "model_configs").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    for name, size in (("ViT-L-14-336", 336), ("odd", [192, 256])):
        (package / "model_configs" / f"{name}.json").write_text(json.dumps({"vision_cfg": {"image_size": size}}))
    (package / "model_configs" / "broken.json").write_text("[")
    monkeypatch.delitem(sys.modules, "open_clip", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    found = [known_image_size("open_clip", name) for name in ("ViT-L-14-336/openai", "ViT-L-14-336:w.pt", "odd/tag")]
    assert found == [336, 336, 256]
    assert known_image_size("open_clip", "unknown/tag") == known_image_size("open_clip", "broken/tag") == 0
    monkeypatch.setitem(sys.modules, "open_clip", types.ModuleType("open_clip"))  # without a spec
    assert known_image_size("open_clip", "ViT-L-14-336/openai") == 0


def test_a_command_is_no_local_file(tmp_path, monkeypatch):
    """Even where a file has its name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pipe:cat x").touch()
    assert is_local_file(str(tmp_path / "pipe:cat x")) and not is_local_file("pipe:cat x")
