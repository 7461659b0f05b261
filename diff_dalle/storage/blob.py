"""gs:// and az:// through blobfile, imported only when such a path is used."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO


class Blob:
    @property
    def _library(self):
        import blobfile

        return blobfile

    def exists(self, path: str) -> bool:
        return self._library.exists(path)

    def list_files(self, folder: str, recursive: bool) -> Iterator[str]:
        if recursive:
            for root, _, names in self._library.walk(folder):
                yield from (self._library.join(root, name) for name in names)
        else:
            yield from (entry.path for entry in self._library.scandir(folder) if entry.is_file)

    def size_and_tag(self, path: str) -> tuple[int, str]:
        status = self._library.stat(path)
        return status.size, status.version or str(status.mtime)

    def open_read(self, path: str) -> BinaryIO:
        return self._library.BlobFile(path, "rb")

    def read(self, path: str, offset: int, size: int | None) -> bytes:
        with self.open_read(path) as file:
            file.seek(offset)
            return file.read(-1 if size is None else size)

    def put(self, local: str, path: str):
        self._library.copy(local, path, overwrite=True)

    def make_dirs(self, folder: str):
        self._library.makedirs(folder)

    def remove(self, path: str):
        self._library.remove(path)
