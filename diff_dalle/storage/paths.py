"""Paths, local or remote, and what is known of the files at them."""

from __future__ import annotations

import os
import re
import urllib.parse
import urllib.request
from typing import NamedTuple

State = tuple[int, str]  # of a file: size in bytes, -1 = unknown, and a tag that changes with it, "" = unknown
UNKNOWN: State = (-1, "")


class FileInfo(NamedTuple):
    """A file of a folder; ``UNKNOWN`` where a listing does not say its state."""

    path: str
    size: int = -1
    tag: str = ""


def scheme(path: str) -> str:
    """``"s3"`` for ``s3://…``, ``"pipe"`` for ``pipe:…``, and ``""`` for a local path or ``file:``."""
    if path.startswith("pipe:"):
        return "pipe"
    match = "://" in path and re.match(r"([a-z][a-z0-9+.-]+)://", path)
    return match.group(1) if match and match.group(1) != "file" else ""


def is_remote(path: str) -> bool:
    return scheme(path) != ""


def local_path(path: str) -> str:
    """A local path without ``file:``, and with ``~`` expanded."""
    if path.startswith("file:"):
        return urllib.request.url2pathname(urllib.parse.urlsplit(path).path)
    return os.path.expanduser(path)


def stays_inside(name: str) -> bool:
    """Whether a name with slashes, which somebody else chose, is one inside the folder that it is relative to."""
    parts = name.split("/")
    return not ("\\" in name or ":" in parts[0]) and {"", ".", ".."}.isdisjoint(parts)


def join(folder: str, name: str) -> str:
    return f"{folder.rstrip('/')}/{name}" if is_remote(folder) else os.path.join(local_path(folder), name)


def split(path: str) -> tuple[str, str]:
    """Folder and name; the name excludes the query of a URL."""
    if not is_remote(path):
        return os.path.split(local_path(path))
    folder, _, name = path.partition("?")[0].rpartition("/")
    return folder, name
