"""Local files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import BinaryIO

from .failures import reraise
from .paths import local_path


class Local:
    def exists(self, path: str) -> bool:
        return os.path.exists(local_path(path))

    def list_files(self, folder: str, recursive: bool) -> Iterator[str]:
        seen: set[str] = set()
        for root, folders, names in os.walk(local_path(folder), followlinks=True, onerror=reraise):
            real = os.path.realpath(root)
            if real in seen or (seen and not recursive):  # symbolic links may form cycles
                folders.clear()
                continue
            seen.add(real)
            folders[:] = [name for name in folders if not name.startswith(".")]
            yield from (os.path.join(root, name) for name in names)

    def size_and_tag(self, path: str) -> tuple[int, str]:
        status = os.stat(local_path(path))
        return status.st_size, str(status.st_mtime_ns)

    def open_read(self, path: str) -> BinaryIO:
        return open(local_path(path), "rb")

    def read(self, path: str, offset: int, size: int | None) -> bytes:
        with self.open_read(path) as file:
            file.seek(offset)
            return file.read(-1 if size is None else size)

    def make_dirs(self, folder: str):
        os.makedirs(local_path(folder), exist_ok=True)

    def remove(self, path: str):
        os.remove(local_path(path))

    def put(self, local: str, path: str):
        """Rename a file within its folder, durably: the new name survives a power failure."""
        os.replace(local, path)
        if os.name == "posix":
            folder = os.open(os.path.dirname(path), os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
