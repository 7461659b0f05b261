"""Where the embeddings of a data set are: what a user gives → an ``EmbeddingSpec`` that the loader reads; and what a
folder of embeddings says about itself: ``embeddings.json``, beside the files."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import numpy as np

from .. import storage
from ..config import Fault, InputError, named
from ..data.arrays import KINDS, Shape
from ..data.fingerprint import shard_name
from ..data.sidecars import Sidecar
from ..data.spec import EmbeddingSpec

FILE = "embeddings.json"
FORMAT = 1
MAX_BYTES = 1 << 26  # of a record, which names every shard
# What is embedded, and how the folder of its files and each of them is called: clip-retrieval's names where it has any.
OF_CLIPS = {"image": "img_emb", "text": "text_emb", "text_states": "text_states"}
NAMES = {**OF_CLIPS, "stage_a": "stage_a", "semantic": "semantic"}  # maps: the latents of autoencoders
HOW = "diff-dalle prepare_data embeddings"
_NUMBERED = re.compile(r"(.*?)(\d+)\.npy")


@dataclass(frozen=True)
class Record:
    """How a folder's embeddings were made.

    what:        a key of ``NAMES``.
    clip:        the name of the CLIP or autoencoder, for people. identity: of its weights and arithmetic.
    shape:       of one embedding; of maps, the width of their rows (``Grid``).
    dtype:       of the files.
    pattern, index_width: as in ``Sidecar``; the pattern without the folder.
    made_from:   what of a sample was embedded, for people.
    counts:      shards, samples, embeddings and missing ones; empty until all are made.
    missing:     samples without an embedding, the first ones, as "shard : key", each with the reason.
    shards:      sizes in bytes of the shards, by their names; empty = not recorded.
    """

    what: str
    clip: str
    identity: str
    shape: Shape
    dtype: str
    pattern: str
    index_width: int
    made_from: str
    counts: Mapping[str, int]
    missing: Mapping[str, str]
    format: int = FORMAT
    shards: Mapping[str, int] = field(default_factory=dict)

    def difference(self, other: Record) -> str:
        """The first setting in which another record differs, as "SETTING is X there and Y here", or ""."""
        for each in fields(self):
            there, here = getattr(self, each.name), getattr(other, each.name)
            if each.name not in ("clip", "counts", "missing", "shards") and there != here:
                if each.name == "identity":
                    there, here = f"{self.clip} ({there})", f"{other.clip} ({here})"
                return f"{each.name} is {there} there and {here} here"
        return ""

    @property
    def row_bytes(self) -> int:
        """Bytes of one embedding in a file."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def others_of(self, shards: Iterable[tuple[str, int]]) -> list[str]:
        """Those of some shards, paths with sizes in bytes, that it does not know."""
        return [path for path, size in shards if self.shards.get(shard_name(path)) != size]

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
    shape, counts, shards = found.get("shape"), found.get("counts"), found.get("shards", {})
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
        or not (isinstance(shards, dict) and all(type(size) is int for size in shards.values()))
    ):
        raise ValueError
    return replace(record, shape=tuple(shape))


@dataclass(frozen=True)
class EmbeddingSource:
    """Embeddings that are there.

    spec:     how the loader reads them.
    clip:     the name of the CLIP that made them, its make and its model; "" = not recorded. identity: its identity.
    origin:   where they are from, for people.
    """

    spec: EmbeddingSpec
    clip: str
    identity: str
    origin: str


def find_embeddings(
    given: str,
    width: int,
    setting: str,
    what: str = "image",
    index_width: int | None = None,
    length: int = 0,
    name: str = "",
    identity: str = "",
) -> EmbeddingSource:
    """The embeddings at ``given``: a folder or URL of .npy files, one for each shard; a pattern of their paths, as in
    ``Sidecar``; or the extension of a member of the shards, such as ``img_emb.npy`` or ``safetensors``.

    width, length, name: as in ``EmbeddingSpec``; ``length`` above 0 for text_states. what: a key of ``NAMES``.
    index_width: as in ``Sidecar``; None = as recorded, 0 without a record.
    identity:    of the CLIP that must have made them; "" = any.
    setting:     the name of the setting that gives them, for messages.

    A folder may be one that ``prepare_data.py embeddings`` was given. Raises InputError naming ``setting`` for a folder
    without embeddings, with those of another kind, width or CLIP, with other rows, or not finished.
    """
    if "{" not in given and "/" not in given and given.lower().lstrip(".").endswith(KINDS):
        kind = given.lower().lstrip(".")
        return EmbeddingSource(EmbeddingSpec(width, kind, name, length), "", "", f"the .{kind} members of the shards")
    folder, pattern = storage.split(given) if "{" in given else (given.rstrip("/"), "")
    record = folder_record(folder) if folder else None
    inner = storage.join(folder, NAMES[what])
    if record is None and not pattern and storage.exists(storage.join(inner, FILE)):
        folder, record = inner, folder_record(inner)
    if record is not None and pattern in ("", record.pattern):
        _check(record, folder, what, width, setting, identity, index_width)
        pattern, index_width = record.pattern, record.index_width
    elif not pattern:
        record, pattern = None, _pattern(folder, setting)
    sidecar = Sidecar(storage.join(folder, pattern) if folder else pattern, index_width or 0)
    made = f", by {record.clip}" if record else ""
    spec = EmbeddingSpec(width, sidecar, name, length)
    clip, identity = (record.clip, record.identity) if record else ("", "")
    return EmbeddingSource(spec, clip, identity, f"{sidecar.pattern}{made}")


def _check(
    record: Record, folder: str, what: str, width: int, setting: str, identity: str, index_width: int | None
) -> None:
    """InputError unless the record of a folder says what is required."""
    again = f"; compute others by {HOW}"
    problem = ""
    if record.what != what:
        problem = f"{record.what} embeddings, but {what} ones are required here{again} --what {what}"
    elif record.shape[-1] != width:
        problem = f"embeddings of width {record.shape[-1]} ({record.clip}), but {width} is required"
    elif identity and record.identity != identity:
        problem = f"embeddings by {record.clip} ({record.identity}), but the CLIP here is another ({identity}){again}"
    elif index_width not in (None, record.index_width):
        own = named("index_width")
        problem = f"rows with {own} {record.index_width}, but {index_width} is set: leave {own} out"
    elif not record.counts:
        problem = f"embeddings that are not finished: run {HOW} again, which goes on"
    if problem:
        raise InputError(Fault(setting, f": {folder} holds {problem}"))


def _pattern(folder: str, setting: str) -> str:
    """The pattern of the names of the .npy files in a folder from elsewhere. InputError without one."""
    names = []
    if storage.is_remote(folder) or os.path.isdir(storage.local_path(folder)):
        names = [storage.split(path)[1] for path in storage.list_files(folder)]
    found = [match for match in map(_NUMBERED.fullmatch, names) if match]
    if not found:
        rule = "no folder of .npy files with the numbers of shards in their names, such as img_emb_00000.npy"
        raise InputError(Fault(setting, f": {folder} is {rule}; compute them by {HOW} --out_dir {folder}"))
    starts = sorted({match[1] for match in found})
    if len(starts) > 1:
        pattern = f"{storage.join(folder, starts[0])}{{}}.npy"
        rule = f": {folder} holds files {starts[0]}….npy and {starts[1]}….npy: say which by a pattern, {pattern}"
        raise InputError(Fault(setting, rule))
    widths = {len(match[2]) for match in found}
    digits = widths.pop() if len(widths) == 1 else 1  # numbers of different widths are not padded
    return f"{starts[0]}{{:0{digits}d}}.npy"
