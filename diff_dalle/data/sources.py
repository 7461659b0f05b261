"""The value of ``--data_dir`` → the list of shards it stands for. Nothing is kept: each start lists them anew."""

from __future__ import annotations

import fnmatch
import glob
import os
import re
from collections.abc import Sequence

from braceexpand import braceexpand

from .. import storage
from ..config import MAX_TEXT, load_texts
from ..errors import InputError, named, quantity

LISTS = (".yml", ".yaml")
DATA_DIR = named("data_dir")  # in messages, unless the sources are those of another setting
EXPANDED = "expand:"  # before pipe:COMMAND, asks for the expansion of its braces


def find_shards(sources: Sequence[str] | str, flag: str = DATA_DIR) -> list[str]:
    """The shards of all sources, in order.

    A source is a folder (all ``*.tar`` in it and its subfolders), a tar, a glob, a brace range
    ``{00000..00099}.tar``, a URL (on s3, gs and az also a folder) or ``pipe:COMMAND``, whose output is a tar. A command
    is taken as it is; ``expand:pipe:COMMAND`` stands for one command for each value of its brace ranges. A ``.yml`` or
    ``.yaml`` file holds a list of sources; one from elsewhere cannot name commands. Raises InputError naming ``flag``
    for a source that does not exist or holds no shard.
    """
    sources = [source for source in ([sources] if isinstance(sources, str) else sources) if source]
    if not sources:
        raise InputError(f"{flag} is not set: name a folder with .tar shards")
    return [shard for source in sources for shard in _expand(source, flag)]


def _expand(source: str, flag: str) -> list[str]:
    if storage.scheme(source) == "pipe":
        return [source]
    remote = storage.is_remote(source)
    if storage.split(source)[1].lower().endswith(LISTS) and not source.startswith(EXPANDED):
        return [shard for each in _listed(source, flag) for shard in _expand(each, flag)]
    if not remote and storage.exists(source):
        path = storage.local_path(source)
        return _in_folder(path, flag) if os.path.isdir(path) else [path]
    try:
        paths = list(braceexpand(source.removeprefix(EXPANDED)))
    except ValueError:
        raise InputError(f"{flag} {source} has unbalanced braces") from None
    if source.startswith(EXPANDED) or ("{" in source and paths != [source]):  # perhaps a range of one
        return [shard for path in paths for shard in _expand(path, flag)]
    if remote and (storage.scheme(source) in ("http", "https") or _is_tar(source)):
        return [source]
    if re.search(r"[*?\[]", source):
        return _matching(source, flag)
    if remote:
        return _in_folder(source, flag)
    raise InputError(f"{flag} {source} does not exist")


def _listed(path: str, flag: str) -> list[str]:
    """The sources in a list file."""
    found = load_texts(storage.read_text(path, MAX_TEXT), f"{flag} {path}")
    if not found:
        raise InputError(f"{flag} {path} is an empty list: name folders or .tar shards in it")
    for each in found:
        if each.lower().endswith(LISTS):
            raise InputError(f"{flag} {path} names {each}, but a list cannot name a list: copy its lines")
        if storage.is_remote(path) and each.removeprefix(EXPANDED).startswith("pipe:"):
            raise InputError(f"{flag} {path} names a command, but only a local list can: copy the file")
    return found


def _is_tar(path: str) -> bool:
    return storage.split(path)[1].lower().endswith(".tar") and not re.search(r"[*?\[]", path)


def _in_folder(folder: str, flag: str) -> list[str]:
    files = storage.list_files(folder, recursive=True)
    shards = [path for path in files if _is_tar(path)]
    if not shards:
        if not files:
            raise InputError(f"{flag} {folder} is empty: it must hold .tar shards of images and captions")
        found = quantity(len(files), "other file")
        hint = "pack images with `python scripts/prepare_data.py folder`"
        raise InputError(f"{flag} {folder} holds no .tar shards, but {found}; {hint}")
    return shards


def _matching(pattern: str, flag: str) -> list[str]:
    if storage.is_remote(pattern):
        folder = re.split(r"[*?\[]", pattern, maxsplit=1)[0].rpartition("/")[0]
        files = storage.list_files(folder, recursive=True)
        shards = fnmatch.filter(files, pattern)
    else:
        shards = sorted(filter(os.path.isfile, glob.glob(storage.local_path(pattern), recursive=True)))
    if not shards:
        raise InputError(f"{flag} {pattern} matches no file")
    return shards
