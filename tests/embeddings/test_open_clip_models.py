"""CLIPs of open_clip, through a stand-in of the package."""

import pickle
import sys

import pytest
import torch
from open_clip_making import MEAN, STD, make_open_clip
from refusing import refused
from torch.nn import functional as F

from diff_dalle.embeddings.clip import load_clip
from diff_dalle.embeddings.contract import fit_images
from diff_dalle.text.trained_tokens import find_tokens, parse_token

NAME = "ViT-B-32/laion2b_s34b_b79k"
TEXTS = ["ab", "abcdefghijkl", ""]


@pytest.fixture(params=["", "custom"])
def library(request, monkeypatch):
    module = make_open_clip(request.param)
    monkeypatch.setitem(sys.modules, "open_clip", module)
    return module


def images(height=8, width=8):
    return torch.rand(3, 3, height, width, generator=torch.Generator().manual_seed(0)) * 2 - 1


def column(values):
    return torch.tensor(values).view(1, 3, 1, 1)


def test_a_model_and_its_weights(library):
    clip = load_clip("open_clip", NAME, "cpu")
    assert (clip.image_size, clip.embed_dim, clip.text_width, clip.text_length) == (8, 6, 10, 9)
    assert clip.name == f"open_clip {NAME}" and library.created == [("ViT-B-32", "laion2b_s34b_b79k", False)]


def test_pictures_have_the_colors_and_the_size_of_the_models_own(library):
    clip = load_clip("open_clip", NAME, "cpu")
    network = library.create_model("ViT-B-32", "laion2b_s34b_b79k")
    colors = ((images() + 1) / 2 - column(MEAN)) / column(STD)
    expected = F.normalize(network.encode_image(colors), dim=1)
    torch.testing.assert_close(clip.encode_images(images()), expected)
    large = clip.encode_images(images(20, 30))
    torch.testing.assert_close(large, clip.encode_images(fit_images(images(20, 30), 8)))
    other = load_clip("open_clip", "ViT-L-14/other", "cpu")
    assert torch.equal(other.mean, column([0.5, 0.5, 0.5])) and other.interpolation == "bilinear"
    bilinear = other.encode_images(fit_images(images(20, 30), 8, "bilinear"))
    torch.testing.assert_close(other.encode_images(images(20, 30)), bilinear)


def test_token_states_are_those_before_the_projection(library):
    clip = load_clip("open_clip", NAME, "cpu")
    embedding, states, mask = clip.encode_text(TEXTS)
    assert mask.sum(1).tolist() == [4, 9, 1]  # with start and end; of an empty text, the start alone
    tower = getattr(clip.network, "text", clip.network)
    torch.testing.assert_close(F.normalize(states[0, 3] @ tower.projection, dim=0), embedding[0])
    torch.testing.assert_close(F.normalize(states[1, 8] @ tower.projection, dim=0), embedding[1])
    assert (states != 0).any(2).equal(mask) and states.dtype == torch.float32


def test_outputs_as_the_released_networks_read_them(library):
    """Embeddings as projected; states before the last norm, also at padding, with a mask that hides nothing."""
    unit, clip = (load_clip("open_clip", NAME, "cpu", outputs=outputs) for outputs in ("unit", "released"))
    embedding, states, mask = clip.encode_text(TEXTS)
    tower, (tokens, own) = getattr(clip.network, "text", clip.network), clip.tokenize(TEXTS, 9)
    before = tower.token_embedding(tokens).cumsum(1)
    assert not own.all() and mask.all() and torch.equal(states, before)
    torch.testing.assert_close(embedding[0], tower.ln_final(before)[0, 3] @ tower.projection)
    torch.testing.assert_close(F.normalize(embedding, dim=1), unit.encode_text(TEXTS)[0])
    pictures = clip.encode_images(images())
    torch.testing.assert_close(F.normalize(pictures, dim=1), unit.encode_images(images()))
    assert not torch.allclose(pictures.norm(dim=1), torch.ones(3)) and clip.identity != unit.identity


def test_text_towers_of_other_libraries_give_embeddings_only(monkeypatch):
    monkeypatch.setitem(sys.modules, "open_clip", make_open_clip("foreign"))
    clip = load_clip("open_clip", "HF-B-16/webli", "cpu")
    embedding, states, mask = clip.encode_text(TEXTS)
    assert clip.text_width == 0 and states.shape == (3, 9, 0) and embedding.shape == (3, 6)
    assert mask.sum(1).tolist() == [3, 9, 1]  # padding is 1 here
    with refused("train_tokens is set, but the text tower of the CLIP .* is another library's"):
        _ = clip.tokenizer


def test_tokens_can_be_trained(library):
    """A new token begins as the mean of others, and the text is still pooled at its end token."""
    clip = load_clip("open_clip", NAME, "cpu")
    plain = clip.encode_text(["ab", "cb", "a"])
    entries = [parse_token(entry) for entry in ('["[star]", "^[ac]</w>"]', '["^b</w>", null]')]
    found = find_tokens(clip.tokenizer, entries)
    assert found.ids == (39, -1) and found.sources == ((39,), (38, 40))
    deltas = clip.take_tokens(found).lent()
    tokens, mask = clip.tokenize(["[STAR]b", "[star][star]bbbbbbbbb", "a"], 9)
    assert tokens.tolist()[0] == [62, -1, 39, 63, 0, 0, 0, 0, 0] and mask.sum(1).tolist() == [4, 9, 3]
    assert tokens[1].tolist() == [62, -1, -1, 39, 39, 39, 39, 39, 63]
    tower = getattr(clip.network, "text", clip.network)
    table = tower.token_embedding.base.weight
    with torch.no_grad():
        deltas += torch.arange(2.0)[:, None]
    rows = torch.stack([table[62], (table[38] + table[40]) / 2 + 1, table[39], table[63]])
    expected = F.normalize(tower.ln_final(rows.cumsum(0))[3] @ tower.projection, dim=0)
    embedding = clip.encode_text(["[star]b", "a"])[0]
    torch.testing.assert_close(embedding[0], expected)
    torch.testing.assert_close(embedding[1], plain[0][2])
    embedding[0, 0].backward()
    assert deltas.grad.any(1).all() and not any(parameter.requires_grad for parameter in clip.parameters())
    with refused(r"the token \[star\] exists already"):
        find_tokens(clip.tokenizer, entries[:1])
    pickled = pickle.loads(pickle.dumps(clip.tokenize))
    assert torch.equal(pickled(["[star]"], 9)[0], clip.tokenize(["[star]"], 9)[0])


def test_openai_spells_its_models_in_its_own_way(library):
    clip = load_clip("openai", "ViT-L/14", "cpu")
    assert library.created == [("ViT-L-14", "openai", True)]  # its networks have another activation than the config
    assert load_clip("openai", "ViT-L/14@336px", "cpu").image_size == 12
    assert load_clip("open_clip", "ViT-L/14/openai", "cpu").identity == clip.identity
    assert clip.name == "open_clip ViT-L-14/openai"


def test_a_local_file_has_the_identity_of_the_published_weights(library, tmp_path):
    clip, file = load_clip("open_clip", NAME, "cpu"), tmp_path / "weights.pt"
    torch.save(clip.network.state_dict(), file)
    assert load_clip("open_clip", f"ViT-B-32:{file}", "cpu").identity == clip.identity
    assert load_clip("open_clip", f"{NAME}:{file}", "cpu").identity == clip.identity
    # The same weights with the activation of OpenAI's, and with other colors, are other CLIPs.
    assert load_clip("openai", f"ViT-B/32:{file}", "cpu").identity != clip.identity
    assert library.created[-1] == ("ViT-B-32", str(file), True)
    colors = load_clip("open_clip", f"ViT-L-14/other:{file}", "cpu")
    assert torch.equal(colors.mean, column([0.5, 0.5, 0.5])) and colors.interpolation == "bilinear"
    with refused(r"different normalizations of colors.* TAG one of openai, other"):
        load_clip("open_clip", f"ViT-L-14:{file}", "cpu")
    assert load_clip("open_clip", f"RN50:{file}", "cpu").mean.flatten().tolist() == pytest.approx(MEAN)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision(library, precision):
    clip, half = (load_clip("open_clip", NAME, "cpu", name) for name in ("fp32", precision))
    found = half.encode_images(images())
    assert found.dtype == torch.float32 and F.cosine_similarity(found, clip.encode_images(images())).min() > 0.99
    assert half.identity == clip.identity and half.network.visual.conv.weight.element_size() == 2


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("ViT-B-32", "must be spelled MODEL/TAG"),
        ("/laion2b_s34b_b79k", "must be spelled MODEL/TAG"),
        ("ViT-B32/openai", "no model 'ViT-B32'; did you mean ViT-B-32"),
        ("ViT-B-32/laion2b", r"no weights 'laion2b' of ViT-B-32, only laion2b_s34b_b79k, openai"),
        ("RN50/any", "no weights 'any' of RN50, only none"),
        ("ViT-B-32:none.pt", "not a local file: none.pt does not exist"),
    ],
)
def test_what_is_misspelled_is_named(library, model, reason):
    with refused(reason):
        load_clip("open_clip", model, "cpu")
    assert not library.created


def test_weights_that_cannot_be_had_are_named(library, tmp_path):
    library.offline = True
    with refused(r"cannot be loaded \(RuntimeError: .*no network\); .* ViT-L-14/openai:FILE"):
        load_clip("openai", "ViT-L/14", "cpu")
    torch.save({"weight": torch.zeros(1)}, tmp_path / "other.pt")
    with refused(r"other\.pt cannot be loaded \(RuntimeError: Error.*\)$"):
        load_clip("open_clip", f"ViT-B-32:{tmp_path / 'other.pt'}", "cpu")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ModuleNotFoundError("No module named 'open_clip'", name="open_clip"), r"pip install 'diff_dalle\[clip\]'"),
        (ModuleNotFoundError("No module named 'timm'", name="timm"), "requires the package timm"),
        (RuntimeError("operator torchvision::nms does not exist\n…"), r"\(operator torchvision::nms does not exist\)"),
        (ImportError("undefined symbol"), "torchvision must be built for the installed torch"),
    ],
)
def test_a_package_that_cannot_be_imported_is_named(monkeypatch, error, reason):
    def broken(name):
        raise error

    monkeypatch.setattr("diff_dalle.images.plugins.importlib.import_module", broken)
    with refused(reason):
        load_clip("open_clip", NAME, "cpu")
