"""What a listing says about a file."""

from __future__ import annotations

from typing import NamedTuple


class FileInfo(NamedTuple):
    """A file of a folder. size (bytes) and tag are those of ``size_and_tag``, (-1, "") where a listing lacks them."""

    path: str
    size: int = -1
    tag: str = ""
