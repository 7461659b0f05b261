"""What a folder of embeddings says about itself: ``embeddings.json``, beside the files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from .. import storage
from ..errors import InputError

FILE = "embeddings.json"
FORMAT = 1
MAX_BYTES = 1 << 22
# What is embedded, and how the folder of its files and each of them is called: clip-retrieval's names where it has any.
NAMES = {"image": "img_emb", "text": "text_emb", "text_states": "text_states"}
HOW = "python scripts/prepare_data.py embeddings"


@dataclass(frozen=True)
class Record:
    """How a folder's embeddings were made.

    what:        image, text or text_states.
    clip:        the name of the CLIP, for people. identity: see ``Clip``.
    shape:       of one embedding.
    dtype:       of the files.
    pattern, index_width: as in ``Sidecar``; the pattern without the folder.
    made_from:   what of a sample was embedded, for people.
    counts:      shards, samples, embeddings and missing ones; empty until all are made.
    missing:     samples without an embedding, the first ones, as "shard : key", each with the reason.
    """

    what: str
    clip: str
    identity: str
    shape: tuple[int, ...]
    dtype: str
    pattern: str
    index_width: int
    made_from: str
    counts: Mapping[str, int]
    missing: Mapping[str, str]
    format: int = FORMAT

    def difference(self, other: Record) -> str:
        """The first setting in which another record differs, as "SETTING is X there and Y here", or ""."""
        for field in fields(self):
            there, here = getattr(self, field.name), getattr(other, field.name)
            if field.name not in ("clip", "counts", "missing") and there != here:
                if field.name == "identity":
                    there, here = f"{self.clip} ({there})", f"{other.clip} ({here})"
                return f"{field.name} is {there} there and {here} here"
        return ""

    def write(self, folder: str, counts: Mapping[str, int], missing: Mapping[str, str]) -> None:
        """Write it into a folder, with these counts."""
        record = asdict(replace(self, counts=dict(counts), missing=dict(missing)))
        text = json.dumps(record, indent=1, ensure_ascii=False)
        storage.write_bytes(storage.join(folder, FILE), text.encode("utf-8", "backslashreplace"))


def folder_record(folder: str) -> Record | None:
    """The record of a folder; None without one. InputError for a file that is none."""
    path = storage.join(folder, FILE)
    if not storage.exists(path):
        return None
    try:
        found = json.loads(storage.read_text(path, MAX_BYTES))
        if isinstance(found, dict) and found.get("format") == FORMAT:
            return _parsed(found)
    except (ValueError, RecursionError, TypeError) as error:
        if isinstance(error, InputError):
            raise
    raise InputError(f"{path} does not describe embeddings of format {FORMAT}: remove it, and the folder's files")


def _parsed(found: Mapping[str, Any]) -> Record:
    """Raises ValueError or TypeError unless every field has its type."""
    shape, counts = found.get("shape"), found.get("counts")
    if not isinstance(shape, list) or not isinstance(counts, dict) or not isinstance(found.get("missing"), dict):
        raise ValueError
    record = Record(**found)
    texts = (record.what, record.clip, record.identity, record.dtype, record.pattern, record.made_from)
    if (
        not all(isinstance(text, str) and text.isprintable() for text in texts)
        or record.what not in NAMES
        or not 1 <= len(shape) <= 2
        or {"/", "\\"} & set(record.pattern)
        or not all(type(number) is int and number >= 0 for number in (*shape, record.index_width, *counts.values()))
    ):
        raise ValueError
    return replace(record, shape=tuple(shape))
