"""Captions: which member holds them, according to ``--caption_field``, and how they are read."""

from __future__ import annotations

import json
from typing import Any

from ..config import option
from ..errors import InputError
from ..images.decode import BrokenSample


def caption_option() -> Any:
    """The setting ``caption_field`` of every command that reads captions from shards."""
    return option(
        "txt", "location of captions in shards: extension of a text member, or json:FIELD", needs=("data_dir",)
    )


def caption_kind(field: str) -> str:
    """The kind of member that holds captions: "txt" for ``txt``, "json" for ``json:caption``."""
    kind, colon, name = field.partition(":")
    if not kind or (colon and (kind != "json" or not name)) or (kind == "json" and not colon):
        raise InputError(
            f"--caption_field is {field!r}, but must be the extension of a text member (txt) or json:FIELD"
        )
    return kind.lower()


def read_caption(data: bytes, field: str, record: dict | None = None) -> str:
    """The caption in a member's bytes. Raises BrokenSample when there is none.

    record: the sample's json object, if ``read_record`` has read it already.
    """
    _, colon, name = field.partition(":")
    text = (record or read_record(data)).get(name) if colon else data.decode("utf-8-sig", "replace")
    if not isinstance(text, str):
        raise BrokenSample(f"its json has no text under {name!r}")
    text = text.strip()
    if not text:
        raise BrokenSample("its caption is empty")
    return text


def read_record(data: bytes) -> dict:
    """The object in a json member's bytes. Raises BrokenSample for anything else."""
    try:
        record = json.loads(data.decode("utf-8-sig", "replace"))
    except (ValueError, RecursionError):
        raise BrokenSample("its json is not valid") from None
    if not isinstance(record, dict):
        raise BrokenSample("its json is not an object")
    return record
