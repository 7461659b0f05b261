"""Captions: where ``--caption_field`` says they are, and how they are read."""

from __future__ import annotations

import json

from ..errors import InputError
from ..images.decode import BrokenSample


def caption_kind(field: str) -> str:
    """The kind of member that holds captions: "txt" for ``txt``, "json" for ``json:caption``."""
    kind, colon, name = field.partition(":")
    if not kind or (colon and (kind != "json" or not name)) or (kind == "json" and not colon):
        raise InputError(f"--caption_field is {field!r}, but must be the ending of a text member (txt) or json:FIELD")
    return kind.lower()


def read_caption(data: bytes, field: str) -> str:
    """The caption in a member's bytes. BrokenSample where there is none."""
    text = data.decode("utf-8-sig", "replace")
    _, colon, name = field.partition(":")
    if colon:
        try:
            record = json.loads(text)
        except (ValueError, RecursionError):
            raise BrokenSample("its json is not valid") from None
        text = record.get(name) if isinstance(record, dict) else None
        if not isinstance(text, str):
            raise BrokenSample(f"its json has no text under {name!r}")
    text = text.strip()
    if not text:
        raise BrokenSample("its caption is empty")
    return text
