"""CLIPs of the package open_clip (the extra ``clip``), which is imported when one is asked for."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..config import InputError, nearest
from ..images.plugins import import_package
from ..models.adapters.lora import AdaptedEmbedding
from ..models.layers import to_channels_last
from ..text.trained_tokens import Extensible
from .contract import Clip, weights_digest

SPELLING = "MODEL/TAG (ViT-B-32/laion2b_s34b_b79k), MODEL:FILE or MODEL/TAG:FILE with a local file of weights"


@dataclass
class Tokenizer:
    """A tokenizer of open_clip with our convention: the mask is True up to the end token, and of an empty text at the
    start token only. Of tokenizers without an end token of their own it is True where there is no padding.

    added: further tokens, which only CLIP's own tokenizer can have. Their ids are negative: its networks pool at the
    largest id, that of the end token.
    """

    tokenizer: Any
    added: tuple[str, ...] = ()

    @property
    def vocab_size(self) -> int:
        return len(self.tokenizer.encoder) + len(self.added)

    def symbols(self) -> list[str]:
        return [symbol for symbol, i in self.tokenizer.encoder.items() if i < self.tokenizer.sot_token_id]

    def extended(self, added: Sequence[str]) -> Tokenizer:
        for text in added:
            if text in self.added:
                raise InputError(f"the token {text} exists already: choose another name")
        return replace(self, added=(*self.added, *added))

    def token_id(self, added: str) -> int:
        return -1 - self.added.index(added)

    def _encode(self, text: str) -> list[int]:
        """Token ids of a text that may name added tokens, without start and end."""
        longest_first, ids = sorted(map(re.escape, self.added), key=len, reverse=True), list[int]()
        for part in re.split(f"({'|'.join(longest_first)})", text, flags=re.IGNORECASE):
            ids += [self.token_id(part.lower())] if part.lower() in self.added else self.tokenizer.encode(part)
        return ids

    def _tokens(self, texts: Sequence[str], length: int) -> Tensor:
        if not self.added:
            return self.tokenizer(list(texts), context_length=length)
        tokens, end = torch.zeros(len(texts), length, dtype=torch.int64), self.tokenizer.eot_token_id
        for row, text in enumerate(texts):
            ids = [self.tokenizer.sot_token_id, *self._encode(text)][: length - 1]
            tokens[row, : len(ids) + 1] = torch.tensor([*ids, end])
        return tokens

    def __call__(self, texts: Sequence[str], length: int) -> tuple[Tensor, Tensor]:
        tokens = self._tokens(texts, length)
        end = getattr(self.tokenizer, "eot_token_id", None)
        if end is None:
            padding = getattr(getattr(self.tokenizer, "tokenizer", None), "pad_token_id", None) or 0
            mask = tokens != padding
        else:
            is_end = (tokens == end).int()
            mask = is_end.cumsum(1) - is_end == 0  # no end token before it
        count = mask.sum(1, keepdim=True)
        mask &= (count > 2) | (torch.arange(length) == 0)
        mask[:, 0] = True
        return tokens, mask


class OpenClip(Clip):
    """A model of open_clip. mean, std: of the colors in [0, 1] that it was trained with.

    Token states are what the text transformer's last norm returns, those that are pooled and projected to the
    embedding; with ``outputs`` released, what that norm is given. Text towers from other libraries, and CoCa's, which
    norms only what it has pooled, give none.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self, network: nn.Module, *arguments: Any, mean: Sequence[float], std: Sequence[float], **options: Any
    ):
        self.found = threading.local()  # at the last norm, by this thread
        norm = getattr(getattr(network, "text", network), "ln_final", None)
        if norm is not None:
            norm.register_forward_hook(self._find)
        super().__init__(network, *arguments, **options)
        for name, values in (("mean", mean), ("std", std)):
            colors = torch.tensor(list(values), device=self.device).view(1, -1, 1, 1)
            self.register_buffer(name, colors, persistent=False)

    def _find(self, norm: nn.Module, given: tuple[Tensor, ...], returned: Tensor) -> None:
        self.found.states = given[0] if self.outputs == "released" else returned

    def image_features(self, images: Tensor) -> Tensor:
        return self.network.encode_image(((images + 1) / 2 - self.mean) / self.std)  # type: ignore[operator]

    @property
    def tokenizer(self) -> Extensible:
        own, table = cast(Tokenizer, self.tokenize), getattr(self.token_table()[0], "token_embedding", None)
        is_clips = all(hasattr(own.tokenizer, name) for name in ("encoder", "encode", "sot_token_id", "eot_token_id"))
        return own if is_clips and isinstance(table, (nn.Embedding, AdaptedEmbedding)) else super().tokenizer

    def token_table(self) -> tuple[nn.Module, str]:
        return getattr(self.network, "text", self.network), "token_embedding"

    def text_features(self, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        self.found.states = None
        features = self.network.encode_text(tokens)  # type: ignore[operator]
        states, self.found.states = self.found.states, None
        if states is None or states.ndim != 3 or states.shape[1] != tokens.shape[1]:
            return features, torch.zeros(*tokens.shape, 0, device=tokens.device)
        return features, states


def _preprocessing(library: ModuleType, name: str, tag: str) -> Mapping[str, Any]:
    """What open_clip says about weights: mean, std, interpolation and quick_gelu.

    tag: "" = what all published weights of the model agree on. InputError where they do not.
    """
    tags = [tag] if tag else library.list_pretrained_tags_by_model(name)
    known = [library.get_pretrained_cfg(name, each) for each in tags]
    found = [{key: each.get(key) for key in ("mean", "std", "interpolation")} for each in known]
    if any(each != found[0] for each in found):
        raise InputError(
            f"weights of {name} were published with different normalizations of colors: say whose the file's is, by "
            f"{name}/TAG:FILE, TAG one of {', '.join(tags)}"
        )
    colors = {key: value for key, value in (found[0] if found else {}).items() if value is not None}
    return {**colors, "quick_gelu": bool(tag and known[0].get("quick_gelu", False))}


def load_open_clip(model: str, device: torch.device, precision: str, outputs: str = "unit") -> OpenClip:
    """model: spelled as ``SPELLING``. With FILE, TAG says only whose normalization and activation it has.

    Raises InputError for a package that is missing or broken, an unknown model or tag, and weights that are neither
    in open_clip's cache nor can be downloaded.
    """
    stem, _, file = model.partition(":")
    name, tag = (stem, "") if file and "/" not in stem else stem.rpartition("/")[::2]
    if not name or not (tag or file):
        raise InputError(f"the CLIP model is {model!r}, but must be spelled {SPELLING}")
    library = import_package("open_clip", "clip", "a CLIP of open_clip")
    name = name.replace("/", "-")
    if name not in library.list_models():
        raise InputError(f"open_clip has no model {name!r}{nearest(name, library.list_models())}: spell it {SPELLING}")
    tags = library.list_pretrained_tags_by_model(name)
    if tag and not library.get_pretrained_cfg(name, tag):
        raise InputError(f"open_clip has no weights {tag!r} of {name}, only {', '.join(tags) or 'none'}")
    if file and not os.path.isfile(file):
        raise InputError(f"the weights of the CLIP model {model} are not a local file: {file} does not exist")
    colors = dict(_preprocessing(library, name, tag))
    quick = colors.pop("quick_gelu")
    try:
        options = {"force_quick_gelu": quick, "force_preprocess_cfg": colors}
        network = library.create_model(name, pretrained=file or tag, **options)
    except Exception as error:  # network, disk, hub, missing keys: each library that open_clip uses has its own
        reason = " ".join(str(error).split())[:300]
        hint = "" if file else f"; download them where there is a network, and give the file: {name}/{tag}:FILE"
        raise InputError(f"the weights of {model} cannot be loaded ({type(error).__name__}: {reason}){hint}") from error
    shown = library.get_model_preprocess_cfg(network)
    size, config = shown["size"], library.get_model_config(name)
    text = config["text_cfg"]
    quick = quick or config.get("quick_gelu", False)
    arithmetic = f"{name.removesuffix('-quickgelu')} {list(shown['mean'])} {list(shown['std'])} {quick}"
    arithmetic += "" if outputs == "unit" else f" {outputs}"
    return OpenClip(
        to_channels_last(network.to(device)),
        f"open_clip {model}",
        f"open_clip:{weights_digest(network.state_dict(), arithmetic)}",
        size[0] if isinstance(size, (list, tuple)) else size,
        Tokenizer(library.get_tokenizer(name)),
        text.get("context_length", 77),
        precision,
        outputs=outputs,
        interpolation="bilinear" if shown.get("interpolation") == "bilinear" else "bicubic",
        mean=shown["mean"],
        std=shown["std"],
    )


def load_openai_clip(model: str, device: torch.device, precision: str, outputs: str = "unit") -> OpenClip:
    """model: as OpenAI spells it, ViT-L/14 or ViT-L/14@336px, or with a local file of its weights, ViT-L/14:FILE."""
    name, colon, file = model.partition(":")
    name = name.replace("/", "-").replace("@336px", "-336")
    return load_open_clip(f"{name}/openai{colon}{file}", device, precision, outputs)
