"""Reading pieces of shards: local ones through descriptors kept open, remote ones by range or from a local copy."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .. import storage
from ..errors import InputError
from .recent import Recent

OPEN_FILES = 128
BLOCK = 1 << 20  # of remote read-ahead while indexing: most of a shard's headers lie closer together than this


_FLAGS = os.O_RDONLY | getattr(os, "O_BINARY", 0)  # Windows would translate line ends


def cache_home() -> str:
    return os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "diff_dalle")


@dataclass(frozen=True)
class Shard:
    """A tar and its state when it was indexed: bytes, version tag, whether parts of it can be read."""

    path: str
    size: int
    tag: str
    by_offset: bool


def _pread(descriptor: int, offset: int, size: int) -> bytes:
    if not hasattr(os, "pread"):  # Windows
        os.lseek(descriptor, offset, os.SEEK_SET)
        return os.read(descriptor, size)
    data = os.pread(descriptor, size, offset)
    while len(data) < size and (more := os.pread(descriptor, size - len(data), offset + len(data))):
        data += more
    return data


def _open(path: str) -> int:
    with storage.explained(path):
        return os.open(storage.local_path(path), _FLAGS)


class ShardFiles:
    """Access to shards; one object a process, its copies in other processes start with nothing open.

    cache_dir, cache_bytes: where copies of shards lie, and how much they may take.
    copy_remote:            copy every remote shard whole, instead of only those that cannot be read by offset.
    """

    def __init__(self, cache_dir: str = "", cache_bytes: int = 20 << 30, copy_remote: bool = False):
        self.cache_dir = cache_dir or os.path.join(cache_home(), "shards")
        self.cache_bytes, self.copy_remote = cache_bytes, copy_remote
        self._descriptors: Recent[int] = Recent(OPEN_FILES, os.close)

    def in_place(self, shard: Shard) -> bool:
        """Whether the shard is remote and read there, so that several reads at once are faster than one by one."""
        return storage.is_remote(shard.path) and shard.by_offset and not self.copy_remote

    def read(self, shard: Shard, offset: int, size: int) -> bytes:
        """``size`` bytes of a shard; fewer where it ends."""
        if self.in_place(shard):
            return storage.read_bytes(shard.path, offset, size)
        return _pread(self._descriptors.get(shard.path, lambda: self._descriptor(shard)), offset, size)

    def _descriptor(self, shard: Shard) -> int:
        if not storage.is_remote(shard.path):
            return _open(shard.path)
        descriptor = self._open_copy(shard.path, shard.tag)
        if os.fstat(descriptor).st_size != shard.size:
            os.close(descriptor)
            raise InputError(
                f"{shard.path} had {shard.size:,} bytes when it was indexed, now another number: give another "
                "--index_cache to index it anew"
            )
        return descriptor

    def _open_copy(self, path: str, tag: str) -> int:
        for _ in range(8):
            copy = storage.fetch_to_cache(path, self.cache_dir, self.cache_bytes, tag)
            with contextlib.suppress(FileNotFoundError):  # made room for another process's before it was opened
                return os.open(copy, _FLAGS)
        raise InputError(f"{self.cache_dir} is too small for all processes that share it: raise --shard_cache_gb")

    @contextlib.contextmanager
    def reader(self, path: str, size: int, tag: str) -> Iterator[tuple[Callable[[int, int], bytes], int, bool]]:
        """``read(offset, size)``, the shard's bytes and whether it can be read by offset, to index it with."""
        by_offset = storage.reads_by_offset(path)
        if storage.is_remote(path) and by_offset and size >= 0 and not self.copy_remote:
            yield _read_ahead(path), size, True
            return
        descriptor = self._open_copy(path, tag) if storage.is_remote(path) else _open(path)
        try:
            yield lambda offset, count: _pread(descriptor, offset, count), os.fstat(descriptor).st_size, by_offset
        finally:
            os.close(descriptor)


def _read_ahead(path: str) -> Callable[[int, int], bytes]:
    """Read a remote file in blocks: one request for many headers that lie close together."""
    start, block = 0, b""

    def read(offset: int, size: int) -> bytes:
        nonlocal start, block
        if not start <= offset <= offset + size <= start + len(block):
            start, block = offset, storage.read_bytes(path, offset, max(size, BLOCK))
        return block[offset - start : offset - start + size]

    return read
