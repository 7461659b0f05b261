"""http and https, read with urllib: whole, or a range of bytes where the server allows it."""

from __future__ import annotations

import urllib.error
import urllib.request
from typing import BinaryIO

from ..errors import InputError
from .failures import retry
from .read_only import ReadOnly

TIMEOUT_SECONDS = 60.0  # without a single byte


class Http(ReadOnly):
    def _open(self, path: str, headers: dict[str, str]):
        request = urllib.request.Request(path, headers={"User-Agent": "diff_dalle", **headers})
        return retry(lambda: urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS))

    def exists(self, path: str) -> bool:
        try:
            self._open(path, {"Range": "bytes=0-0"}).close()
        except urllib.error.HTTPError as error:
            if error.code in (404, 410):
                return False
            raise
        return True

    def size_and_tag(self, path: str) -> tuple[int, str]:
        with self._open(path, {"Range": "bytes=0-0"}) as reply:  # some servers refuse HEAD
            total = reply.headers.get("Content-Range", "").rpartition("/")[2] or reply.headers.get("Content-Length", "")
            tag = reply.headers.get("ETag") or reply.headers.get("Last-Modified") or ""
        return (int(total) if total.isdigit() else -1), tag

    def by_offset(self, path: str) -> bool:
        with self._open(path, {"Range": "bytes=0-0"}) as reply:
            return reply.status == 206

    def open_read(self, path: str) -> BinaryIO:
        return self._open(path, {})

    def read(self, path: str, offset: int, size: int | None) -> bytes:
        if offset == 0 and size is None:
            with self.open_read(path) as reply:
                return reply.read()
        if size == 0:
            return b""
        end = "" if size is None else offset + size - 1

        def fetch() -> bytes:
            with self._open(path, {"Range": f"bytes={offset}-{end}"}) as reply:
                if reply.status != 206:
                    raise InputError(f"{path}: the server does not serve parts of files; download it first")
                return reply.read()

        try:
            return retry(fetch)
        except urllib.error.HTTPError as error:
            if error.code == 416:  # the range starts beyond the end, where a local file gives b"" too
                return b""
            raise
