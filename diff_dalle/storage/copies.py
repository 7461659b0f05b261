"""A shared folder of limited size for local copies of remote files.

The limit holds at every moment, for copies and downloads together: room is made before a download, and again while one
of unknown size grows. Only the files that are being downloaded may exceed it, when the limit is too small for them;
what would fill the disk is given up before it does.

A gzip file, known by its first bytes, is unpacked on its way: the copy is what it holds.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import os
import shutil
import sys
import time
import zlib
from collections.abc import Iterable, Iterator
from typing import BinaryIO

from ..config import InputError
from . import retries
from .failures import UnavailableError, explained
from .local import TEMPORARY, Local, sweep, temporary_path

if sys.platform != "win32":  # without fcntl two processes may download the same file twice, which is only wasteful
    import fcntl

COPY = ".copy"
CHUNK = 1 << 20
GROWTH = 64 << 20  # bytes at most for which a download of unknown size makes room at a time
COMMAND_TRIES = 4  # of a command that fails; its reason is unknown
GZIP = b"\x1f\x8b"  # the first bytes of a gzip file (RFC 1952, section 2.3.1)
GZIP_FORMAT = 16 + zlib.MAX_WBITS  # of zlib's decompressor: with gzip's header and checksum
log = logging.getLogger(__name__)


def fetch(backend, url: str, cache_dir: str, limit_bytes: int, tag: str) -> str:
    """``storage.fetch_to_cache`` with the backend of the url."""
    began = time.monotonic()  # waiting for another process's attempts counts: they do not add up
    name = hashlib.sha256(f"{url}\n{tag}".encode("utf-8", "surrogateescape")).hexdigest()[:32]
    target = os.path.join(cache_dir, f"{name}{COPY}")
    with explained(cache_dir), _locked(os.path.join(cache_dir, f"{name[:2]}.lock")):
        if not mark_used(target):
            sweep(cache_dir)
            for attempt in range(1, COMMAND_TRIES + 1):
                try:
                    _download(backend, url, target, limit_bytes, tag, began)
                    break
                except UnavailableError as error:
                    repeat = url.startswith("pipe:") and time.monotonic() - began < retries.RETRY_SECONDS
                    if not repeat or attempt == COMMAND_TRIES:
                        raise UnavailableError(f"cannot download {url} after {attempt} attempts: {error}") from error
                    retries.pause(attempt)
            _make_room(cache_dir, limit_bytes, keep=target)
    return target


def mark_used(copy: str) -> bool:
    """Note that a copy is in use now. False if there is none."""
    try:
        os.utime(copy)
    except FileNotFoundError:
        return False
    return True


def _download(backend, url: str, target: str, limit_bytes: int, tag: str, began: float):
    """Download the whole file, unpacked if it is gzipped, or raise InputError and leave nothing behind."""
    folder, name = os.path.split(target)
    with explained(url):
        size, current = retries.retry(url, lambda: backend.size_and_tag(url), began)
        stream = backend.open_read(url, (size, tag or current))
    temporary = temporary_path(folder, name)
    growth = min(GROWTH, limit_bytes // 8)
    try:
        with stream, open(temporary, "xb") as file:
            with explained(url):
                first = stream.read(CHUNK)
            content, reserved, known = _plain(first, stream, url, size), 0, size
            if first.startswith(GZIP):
                content, known = _unpacked(content, url), -1
            for chunk in content:
                if file.tell() + len(chunk) > reserved:
                    reserved = file.tell() + max(growth, len(chunk)) if known < 0 else known
                    file.truncate(reserved)  # so that other downloads count it
                    _make_room(folder, limit_bytes)
                    if reserved - file.tell() > (free := shutil.disk_usage(folder).free):
                        copy = f"the copy of {url}, of which {file.tell():,} bytes were written"
                        raise InputError(f"{folder} has only {free:,} free bytes left for {copy}: use another disk")
                file.write(chunk)
            file.truncate(file.tell())
            file.flush()
            os.fsync(file.fileno())
        Local().put(temporary, target)
    finally:
        with contextlib.suppress(FileNotFoundError):  # renamed
            os.remove(temporary)


def _plain(first: bytes, stream: BinaryIO, url: str, size: int) -> Iterator[bytes]:
    """The content of an open file, of which ``first`` is read. InputError when its end comes after another number of
    bytes than ``size``, -1 = unknown."""
    received = 0
    for chunk in itertools.chain([first], chunks(stream, url)):
        received += len(chunk)
        yield chunk
    if size >= 0 and received != size:
        raise InputError(f"the download of {url} ended after {received:,} of {size:,} bytes")


def _unpacked(packed: Iterable[bytes], url: str) -> Iterator[bytes]:
    """What a gzip file holds: up to a cut or damage, as of tars that are not gzipped. As gzip does, it takes several
    gzip files one after the other for one, and ignores anything else at the end."""
    unpacker, ended, given = zlib.decompressobj(GZIP_FORMAT), False, 0
    for data in packed:
        while data and not ended:
            try:
                chunk = unpacker.decompress(data, CHUNK)  # not more at a time, however well it is packed
            except zlib.error:
                log.warning("%s is damaged: its gzip data can be unpacked up to byte %s", url, f"{given:,}")
                return
            given += len(chunk)
            yield chunk
            data, ended = unpacker.unconsumed_tail, unpacker.eof
            if ended and unpacker.unused_data.startswith(GZIP):
                data, unpacker, ended = unpacker.unused_data, zlib.decompressobj(GZIP_FORMAT), False
    if not ended:
        log.warning("%s was cut: its gzip data end after unpacked byte %s", url, f"{given:,}")


def chunks(stream: BinaryIO, path: str) -> Iterator[bytes]:
    """The content of an open file in pieces; InputError, which names the path, when it cannot be read."""
    with explained(path):
        while chunk := stream.read(CHUNK):
            yield chunk


def _make_room(folder: str, limit_bytes: int, keep: str = ""):
    """Remove the least recently used copies, except ``keep``, until copies and downloads are within the limit."""
    with _locked(os.path.join(folder, "eviction.lock")):
        total, copies = 0, []
        for entry in os.scandir(folder):
            with contextlib.suppress(FileNotFoundError):  # a download that has just ended
                if entry.name.endswith((COPY, TEMPORARY)):
                    status = entry.stat()
                    total += status.st_size
                    if entry.name.endswith(COPY) and entry.path != keep:
                        copies.append((status.st_mtime_ns, status.st_size, entry.path))
        for _, size, path in sorted(copies):
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
