"""What is in the shards: built once from the tars' headers, remembered on disk, read shard by shard when needed.

Beside the tars, in ``.diff_dalle_index``, lies one table per tar and one summary of all of them, so that a start
reads one small file however many shards there are. Where that folder cannot be written (remote data, a read-only
disk) the index lies in a cache folder. Several processes that index the same data at once share the work.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

import numpy as np
from tqdm import tqdm

from .. import storage
from ..errors import InputError, quantity
from . import table
from .recent import Recent
from .shards import ShardFiles
from .table import About, Need, Places, Table
from .tar import read_members

FOLDER, SUMMARY = ".diff_dalle_index", "summary.json"
THREADS = 16
log = logging.getLogger(__name__)


def cache_home() -> str:
    return os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "diff_dalle")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Entry:
    """A shard and the place of its table: a folder for it and its neighbours, and a name in there."""

    path: str
    folder: str
    name: str

    @property
    def table(self) -> str:
        return os.path.join(self.folder, f"{self.name}.npz")


def _entry(path: str, index_cache: str) -> Entry:
    folder, name = ("", _digest(path)) if storage.scheme(path) == "pipe" else storage.split(path)
    beside = os.path.join(folder, FOLDER)
    if storage.is_remote(path) or index_cache or not (os.path.isdir(beside) or os.access(folder or ".", os.W_OK)):
        beside = os.path.join(index_cache or os.path.join(cache_home(), "index"), _digest(os.path.abspath(folder)))
    return Entry(path, beside, name)
