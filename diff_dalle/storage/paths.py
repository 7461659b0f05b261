"""Paths: local or remote, joining and splitting."""

from __future__ import annotations

import os
import re
import urllib.parse
import urllib.request


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


def join(folder: str, name: str) -> str:
    return f"{folder.rstrip('/')}/{name}" if is_remote(folder) else os.path.join(local_path(folder), name)


def split(path: str) -> tuple[str, str]:
    """Folder and name; the name excludes the query of a URL."""
    if not is_remote(path):
        return os.path.split(local_path(path))
    folder, _, name = path.partition("?")[0].rpartition("/")
    return folder, name
