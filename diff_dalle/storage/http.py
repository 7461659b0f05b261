"""http and https through urllib: whole files, and byte ranges if the server supports them."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import BinaryIO

from ..errors import InputError
from .failures import retry
from .read_only import ReadOnly

TIMEOUT_SECONDS = 60.0  # without receiving a byte


def _open(path: str, headers: Mapping[str, str]):
    request = urllib.request.Request(path, headers={"User-Agent": "diff_dalle", **headers})
    return urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS)


def _part(path: str, span: str) -> tuple[int, Mapping[str, str], bytes]:
    """Status, headers and content of a byte range: 206; 416 if it starts after the end; 200 without content if the
    server does not support ranges. Uses GET even for headers only, since some servers reject HEAD."""

    def request():
        try:
            with _open(path, {"Range": f"bytes={span}"}) as reply:
                return reply.status, reply.headers, reply.read() if reply.status == 206 else b""
        except urllib.error.HTTPError as error:
            if error.code == 416:
                return error.code, error.headers, b""
            raise

    return retry(request)


class Http(ReadOnly):
    def exists(self, path: str) -> bool:
        try:
            _part(path, "0-0")
        except urllib.error.HTTPError as error:
            if error.code in (404, 410):
                return False
            raise
        return True

    def size_and_tag(self, path: str) -> tuple[int, str]:
        status, headers, _ = _part(path, "0-0")
        total = headers.get("Content-Length", "") if status == 200 else headers.get("Content-Range", "")
        total = total.rpartition("/")[2]  # of ``bytes 0-0/12345``
        return (int(total) if total.isdigit() else -1), headers.get("ETag") or headers.get("Last-Modified") or ""

    def by_offset(self, path: str) -> bool:
        return _part(path, "0-0")[0] == 206

    def open_read(self, path: str) -> BinaryIO:
        return retry(lambda: _open(path, {}))

    def read(self, path: str, offset: int, size: int | None) -> bytes:
        if offset == 0 and size is None:
            return retry(lambda: _read_all(path))
        if size == 0:
            return b""
        status, _, data = _part(path, f"{offset}-{'' if size is None else offset + size - 1}")
        if status == 200:
            raise InputError(f"{path}: the server does not support byte ranges: download the file first")
        return data


def _read_all(path: str) -> bytes:
    with _open(path, {}) as reply:
        return reply.read()
