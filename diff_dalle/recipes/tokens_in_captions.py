"""Tokens to be trained that no caption has: told before training."""

from __future__ import annotations

import logging
from typing import Any

import torch

from ..config import Fault, InputError, quantity
from ..data.loader import Loader
from ..text.trained_tokens import Extensible, ids_of
from .recipe import Session

log = logging.getLogger(__name__)


def checked_loaders(loaders, tokenizer: Extensible, session: Session) -> tuple[Loader, Loader | None]:
    """The training data of ``loaders``, and the held-out data, after a look at their captions.

    tokenizer: has the new tokens. Raises InputError on every rank where nothing would be trained.
    """
    own, held_out = loaders(session)
    session.world.on_main(lambda: _check_tokens(own, tokenizer, session.settings))
    return own, held_out


def _check_tokens(data: Loader, tokenizer: Extensible, lora: Any) -> None:
    """Say which of the tokens to be trained no caption has. InputError where there is nothing else to train."""
    findings = data.findings
    if findings is None or not findings.captions:
        return
    (caption, *_) = data.spec.captions
    tokens, mask = caption.tokenize(findings.captions, caption.length)
    present = set(torch.unique(tokens[mask] % tokenizer.vocab_size).tolist())
    absent = [spec.text for spec in lora.specs if present.isdisjoint(ids_of(spec, tokenizer))]
    if not absent:
        return
    where = f"{quantity(len(findings.captions), 'caption')}, of {caption.length} tokens at most"
    if findings.is_complete and len(absent) == len(lora.specs) and not lora.module_filters:
        rule = f"has {', '.join(absent)}, but none of {where}, does: nothing would be trained; write them there"
        raise InputError(Fault("train_tokens", rule))
    log.warning("train_tokens has %s, but none of %s, does: these train nothing of them", ", ".join(absent), where)
