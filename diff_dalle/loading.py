"""Checkpoint files → networks ready to use, built from what the files say about themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from .config import from_dict
from .errors import InputError
from .text.tokenizer import Tokenizer, TokenizerConfig, load_tokenizer
from .training.checkpoint import check_weights, load_file, load_weights


def read_checkpoint(path: str, kind: str, bpe_path: str = "") -> tuple[dict, Tokenizer | None]:
    """A checkpoint's content, and the tokenizer that it was trained with (None without text).

    bpe_path: where the tokenizer's vocabulary is now, if it was a file that has moved since training. Raises InputError
    for a file that holds no weights of this ``kind``, or whose tokenizer cannot be found.
    """
    content = load_file(path)
    if content["kind"] != kind:
        raise InputError(f"{path} holds a {content['kind']}, but a {kind} is needed here")
    if not content["tokenizer"]:
        return content, None
    saved = from_dict(TokenizerConfig, content["config"]["tokenizer"], "tokenizer")
    tokenizer = load_tokenizer(bpe_path or saved.bpe_path)
    if tokenizer.identity != content["tokenizer"]:
        raise InputError(f"{path} was trained with tokenizer {content['tokenizer']}, but "
                         f"{bpe_path or saved.bpe_path or 'the built-in one'} is {tokenizer.identity}; "
                         "give the right vocabulary with --bpe_path")  # fmt: skip
    return content, tokenizer


def restore(build: Callable[[], nn.Module], content: Mapping, path: str, device: torch.device) -> nn.Module:
    """The network that ``build`` makes, with a checkpoint's weights, for evaluation on ``device``."""
    model = describe(build, content, path).to_empty(device="cpu")
    load_weights(model, content, path)
    return model.to(device).eval().requires_grad_(False)


def describe(build: Callable[[], nn.Module], content: Mapping, path: str) -> nn.Module:
    """The same network without weights, on the meta device. InputError when the checkpoint's would not fit it."""
    with torch.device("meta"):
        model = build()
    check_weights(model, content, path)
    return model
