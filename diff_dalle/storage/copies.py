"""A shared folder of limited size for local copies of remote files."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import tempfile
from collections.abc import Iterator

from ..errors import InputError
from .failures import TRIES, explained, pause

if sys.platform != "win32":  # without fcntl two processes may download the same file twice, which is only wasteful
    import fcntl

CHUNK = 1 << 20


def fetch(backend, url: str, cache_dir: str, limit_bytes: int, tag: str) -> str:
    """``storage.fetch_to_cache`` with the backend of the url."""
    name = hashlib.sha256(f"{url}\n{tag}".encode()).hexdigest()[:32]
    target = os.path.join(cache_dir, f"{name}.copy")
    with explained(cache_dir), _locked(os.path.join(cache_dir, f"{name[:2]}.lock")):
        for attempt in range(TRIES):
            try:
                os.utime(target)  # marks an existing copy as used now
                return target
            except FileNotFoundError:
                pass
            try:
                _download(backend, url, target)
                break
            except InputError as error:
                if attempt == TRIES - 1:
                    raise InputError(f"cannot download {url} after {TRIES} attempts: {error}") from error
                pause(attempt)
        with contextlib.suppress(FileNotFoundError), _locked(os.path.join(cache_dir, "eviction.lock")):
            _evict(cache_dir, target, limit_bytes)
    return target


def _download(backend, url: str, target: str):
    """Download the whole file, or raise InputError and leave nothing behind."""
    with explained(url):
        size, _ = backend.size_and_tag(url)
        stream = backend.open_read(url)
    folder = os.path.dirname(target)
    with stream, tempfile.NamedTemporaryFile(dir=folder, prefix=".", suffix=".part", delete=False) as file:
        try:
            while chunk := _read_chunk(stream, url):
                file.write(chunk)
            if size >= 0 and file.tell() != size:
                raise InputError(f"the download ended after {file.tell():,} of {size:,} bytes")
            file.close()
            os.replace(file.name, target)
        except BaseException:
            with contextlib.suppress(OSError):
                file.close()
            os.remove(file.name)
            raise


def _read_chunk(stream, url: str) -> bytes:
    with explained(url):
        return stream.read(CHUNK)


def _evict(folder: str, keep: str, limit_bytes: int):
    """Remove the least recently used copies, except ``keep``, until the folder is within its limit."""
    copies = [entry for entry in os.scandir(folder) if entry.name.endswith(".copy") and entry.path != keep]
    used = sorted((entry.stat().st_mtime_ns, entry.stat().st_size, entry.path) for entry in copies)
    total = os.path.getsize(keep) + sum(size for _, size, _ in used)
    for _, size, path in used:
        if total <= limit_bytes:
            break
        os.remove(path)
        total -= size


@contextlib.contextmanager
def _locked(path: str) -> Iterator[None]:
    with open(path, "ab") as file:
        if sys.platform != "win32":
            fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed or the process dies
        yield
