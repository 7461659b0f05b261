"""Backends without listing and writing."""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import InputError
from .files import FileInfo


class ReadOnly:
    """Base class of backends that only read."""

    def list_files(self, folder: str, recursive: bool) -> Iterator[FileInfo]:
        raise InputError(f"{folder} cannot be listed: name its files one by one or as a brace range {{000..123}}")

    def put(self, local: str, path: str):
        raise InputError(f"{path} is read-only: write to a local folder, s3://, gs:// or az://")

    def remove(self, path: str):
        self.put("", path)

    def make_dirs(self, folder: str):
        self.put("", folder)
