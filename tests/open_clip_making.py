"""A small stand-in of the package open_clip: the functions that we call, on networks of a few numbers."""

from __future__ import annotations

import copy
import types

import torch
from torch import nn

MEAN, STD = (0.48, 0.45, 0.4), (0.26, 0.25, 0.27)
END = 63
TAGS = {
    "ViT-B-32": {"laion2b_s34b_b79k": {}, "openai": {"quick_gelu": True}},
    "ViT-L-14": {"openai": {"quick_gelu": True}, "other": {"mean": (0.5, 0.5, 0.5), "interpolation": "bilinear"}},
    "ViT-L-14-336": {"openai": {"quick_gelu": True}},
    "HF-B-16": {"webli": {}},
    "RN50": {},
}
CONFIGS = {name: {"embed_dim": 6, "text_cfg": {"context_length": 9, "width": 10}} for name in TAGS}


class Visual(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.image_size = size
        self.conv = nn.Conv2d(3, 6, size)

    def forward(self, images):
        return self.conv(images)[:, :, 0, 0]


class TextTower(nn.Module):
    """Causal, as CLIP's: a token's state depends on those before it."""

    def __init__(self):
        super().__init__()
        self.token_embedding = nn.Embedding(64, 10)
        self.ln_final = nn.LayerNorm(10)
        self.projection = nn.Parameter(torch.randn(10, 6))

    def forward(self, tokens):
        states = self.ln_final(self.token_embedding(tokens).cumsum(1))
        return states[torch.arange(len(tokens)), tokens.argmax(1)] @ self.projection


class Clip(TextTower):
    """A model whose text tower is a part of itself."""

    def __init__(self, size: int, quick: bool):
        super().__init__()
        self.visual, self.quick = Visual(size), quick

    def encode_image(self, images):
        return self.visual(images)

    def encode_text(self, tokens):
        return TextTower.forward(self, tokens)


class CustomClip(nn.Module):
    """A model with a text tower of its own; of a foreign one, states are not to be had."""

    def __init__(self, size: int, foreign: bool):
        super().__init__()
        self.visual, self.text = Visual(size), TextTower()
        if foreign:
            self.text.norm = self.text.ln_final
            del self.text.ln_final
            self.text.forward = lambda tokens: self.text.norm(self.text.token_embedding(tokens).sum(1))[:, :6]

    def encode_image(self, images):
        return self.visual(images)

    def encode_text(self, tokens):
        return self.text(tokens)


SYMBOLS = [f"#{i}" for i in range(62)]
SYMBOLS[38:61] = [f"{letter}</w>" for letter in "abcdefghijklmnopqrstuvw"]  # by their ids


class SimpleTokenizer:
    """Letters between a start and an end token, padded with 0."""

    eot_token_id, sot_token_id = END, 62

    def __init__(self):
        self.encoder = {name: i for i, name in enumerate([*SYMBOLS, "start", "end"])}

    def encode(self, text):
        return [ord(letter) % 60 + 1 for letter in text]

    def __call__(self, texts, context_length=9):
        rows = [[62, *(ord(letter) % 60 + 1 for letter in text[: context_length - 2]), END] for text in texts]
        return torch.tensor([row + [0] * (context_length - len(row)) for row in rows])


class HfTokenizer:
    """Letters, padded with 1, without an end token that it names."""

    tokenizer = types.SimpleNamespace(pad_token_id=1)

    def __call__(self, texts, context_length=9):
        rows = [[2, *(ord(letter) % 60 + 3 for letter in text)][:context_length] for text in texts]
        return torch.tensor([row + [1] * (context_length - len(row)) for row in rows])


def make_open_clip(kind: str = "") -> types.ModuleType:
    """The package. kind: of its models, "" = with a text tower inside, "custom" or "foreign".

    ``created`` lists the arguments of ``create_model``; ``offline`` makes downloads fail.
    """
    module = types.ModuleType("open_clip")
    module.created, module.offline = [], False

    def get_pretrained_cfg(name, tag):
        found = TAGS.get(name, {}).get(tag)
        return {} if found is None else {"url": "x", "mean": MEAN, "std": STD, "interpolation": "bicubic", **found}

    def create_model(name, pretrained=None, force_quick_gelu=False, force_preprocess_cfg=None):
        module.created.append((name, pretrained, force_quick_gelu))
        if pretrained in TAGS[name] and module.offline:
            raise RuntimeError(f"Failed to download weights for tag '{pretrained}': no\nnetwork")
        torch.manual_seed(sum(map(ord, str(pretrained))))
        size = 12 if name.endswith("336") else 8
        model = CustomClip(size, kind == "foreign") if kind else Clip(size, force_quick_gelu)
        if pretrained not in TAGS[name]:
            model.load_state_dict(torch.load(pretrained, weights_only=True))
        preprocessing = {"mean": MEAN, "std": STD, "interpolation": "bicubic", **get_pretrained_cfg(name, pretrained)}
        model.visual.preprocess_cfg = {"size": (size, size), **preprocessing, **(force_preprocess_cfg or {})}
        return model

    module.list_models = lambda: list(TAGS)
    module.list_pretrained_tags_by_model = lambda name: list(TAGS.get(name, {}))
    module.get_pretrained_cfg = get_pretrained_cfg
    module.get_model_config = lambda name: copy.deepcopy(CONFIGS[name])
    module.get_model_preprocess_cfg = lambda model: model.visual.preprocess_cfg
    module.create_model = create_model
    module.get_tokenizer = lambda name: HfTokenizer() if kind == "foreign" else SimpleTokenizer()
    return module
