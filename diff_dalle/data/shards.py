"""Reading parts of shards: local ones through open files, remote ones by range requests or from a local copy, gzipped
ones from an unpacked copy."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from .. import storage
from ..config import InputError, named, redact
from .lru_cache import LRUCache

OPEN_FILES = 128
LOOK_SECONDS = 1.0  # between two looks at the name of a file that stays open: another file may have taken it
CACHE_BYTES = 20 * 10**9  # of all copies of remote shards together
BLOCK = 1 << 20  # bytes of remote read-ahead while indexing: many headers lie within one block
PACKED = "gzip"  # begins the tags of gzipped shards
Read = Callable[[int, int], bytes]  # offset and size → bytes
log = logging.getLogger(__name__)


def cache_home() -> str:
    return os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "diff_dalle")


def packed_tag(size: int, tag: str) -> str:
    """The tag of a gzipped shard, whose file has this size and tag."""
    return f"{PACKED} {size} {tag}"


@dataclass(frozen=True)
class Shard:
    """A file of the data set and its state when it was indexed: size in bytes, version tag, and whether parts of it can
    be read by offset. Those of a gzipped one, which cannot, are the size of what it holds and its ``packed_tag``."""

    path: str
    size: int
    tag: str
    by_offset: bool

    @functools.cached_property
    def is_remote(self) -> bool:
        return storage.is_remote(self.path)

    @property
    def is_packed(self) -> bool:
        """Whether it is gzipped. Of the output of a command it is not known."""
        return not self.by_offset and self.tag.startswith(f"{PACKED} ")

    @property
    def is_copied(self) -> bool:
        """Whether it is read from a copy, unless by range requests."""
        return self.is_remote or self.is_packed

    @property
    def file_tag(self) -> str:
        """The tag of its file."""
        return self.tag.split(" ", 2)[2] if self.is_packed else self.tag

    def check(self, size: int, tag: str) -> None:
        """Raise ``storage.ChangedError`` unless this is still its state."""
        if (size, tag) == (self.size, self.tag):
            return
        what = "another modification time or tag" if size == self.size else f"{size:,} bytes now"
        raise storage.ChangedError(
            f"{self.path} had {self.size:,} bytes when it was indexed and has changed since ({what}): put the old file "
            f"back, or start again with {named('accept_changed_data')} True; if it is the output of a command, set "
            f"another {named('index_cache')} too"
        )


class _Open:
    """A local file to read parts of, closed with its last reference."""

    def __init__(self, path: str):
        self.path, self.looked = path, time.monotonic()
        self.descriptor = storage.open_regular(path)
        self.seeking = threading.Lock()

    def __del__(self):
        if "descriptor" in vars(self):
            os.close(self.descriptor)

    def state(self) -> storage.State:
        """Of the open file; now and then, of the one that has taken its name."""
        now = time.monotonic()
        if now - self.looked > LOOK_SECONDS:
            self.looked = now
            try:
                status = os.stat(self.path)
            except FileNotFoundError:
                raise storage.ChangedError(
                    f"{self.path} was removed while in use: put it back and start again"
                ) from None
        else:
            status = os.fstat(self.descriptor)
        return status.st_size, str(status.st_mtime_ns)

    def read(self, offset: int, size: int) -> bytes:
        if not hasattr(os, "pread"):  # Windows
            with self.seeking:
                os.lseek(self.descriptor, offset, os.SEEK_SET)
                return os.read(self.descriptor, size)
        data = os.pread(self.descriptor, size, offset)
        while len(data) < size and (more := os.pread(self.descriptor, size - len(data), offset + len(data))):
            data += more
        return data


class ShardFiles:
    """Access to shards; one object per process: a copy sent to another process starts without open files.

    cache_dir, cache_bytes: the folder for copies of remote and gzipped shards and its maximum size.
    copy_remote:            copy every remote shard as a whole, not only those that cannot be read by offset.
    index_cache:            folder for the index of the shards, instead of the shards' own.

    Local files stay open. Copies do not: one that another process removes would take space until it is closed.
    """

    def __init__(
        self, cache_dir: str = "", cache_bytes: int = CACHE_BYTES, copy_remote: bool = False, index_cache: str = ""
    ):
        self.cache_dir = cache_dir or os.path.join(cache_home(), "shards")
        self.cache_bytes, self.copy_remote, self.index_cache = cache_bytes, copy_remote, index_cache
        self._files: LRUCache[_Open] = LRUCache(OPEN_FILES)
        self._copies: dict[tuple[str, str], str] = {}  # paths of copies, by path and tag of the shard
        self._said_small = False

    def in_place(self, shard: Shard) -> bool:
        """Whether the shard is read by range requests, where concurrent reads are faster than consecutive ones."""
        return shard.is_remote and shard.by_offset and not self.copy_remote

    def read(self, shard: Shard, offset: int, size: int) -> bytes:
        """``size`` bytes of a shard from ``offset`` on; fewer at its end.

        Raises ``storage.ChangedError`` when the shard is not the one that was indexed, and
        ``storage.UnavailableError`` when its server is away for too long.
        """
        if self.in_place(shard):
            return storage.read_bytes(shard.path, offset, size, (shard.size, shard.tag))
        with storage.explained(shard.path):
            if shard.is_copied:
                file = self._open_copy(shard.path, shard.file_tag)
                data = file.read(offset, size)
                shard.check(file.state()[0], shard.tag)  # the copy's own tag says when it was made
            else:
                file = self._files.get(shard.path, lambda: _Open(storage.local_path(shard.path)))
                data = file.read(offset, size)
                shard.check(*file.state())  # after the read, so that what it returns is of that state
            return data

    def consecutive(self, shard: Shard) -> Read:
        """``read(offset, size)`` for many small parts one after another; otherwise as ``read``. Of remote shards it
        reads large blocks: up to all of each, in few requests."""
        if self.in_place(shard):
            return _read_ahead(shard.path, (shard.size, shard.tag))
        return functools.partial(self.read, shard)

    def headers(self, shard: Shard) -> Read:
        """As ``consecutive``, for indexing: a local shard is not checked for changes at each read."""
        if shard.is_copied:
            return self.consecutive(shard)
        with storage.explained(shard.path):
            return _Open(storage.local_path(shard.path)).read

    def _open_copy(self, path: str, tag: str) -> _Open:
        """A copy, to be read once. It may be removed for another one until it is open."""
        path = path if storage.is_remote(path) else os.path.abspath(storage.local_path(path))  # names are absolute
        known = self._copies.get((path, tag))
        for _ in range(8):
            if known is not None:
                with contextlib.suppress(FileNotFoundError):
                    file = _Open(known)
                    storage.mark_used(known)
                    return file
                if not self._said_small:
                    self._said_small = True
                    log.warning(
                        "%s is copied again, since its copy was removed from %s while in use: shard_cache_gb is too "
                        "small for the shards that are read at the same time",
                        redact(path),
                        self.cache_dir,
                    )
            known = storage.fetch_to_cache(path, self.cache_dir, self.cache_bytes, tag)
            self._copies[path, tag] = known
        remedy = f"raise {named('shard_cache_gb')}"
        raise InputError(f"{self.cache_dir} is too small for all processes that share it: {remedy}")

    def examine(self, path: str) -> Shard:
        """The present state of a file, which is copied when parts of it cannot be read in place."""
        size, tag = storage.size_and_tag(path, listed=True)
        by_offset = storage.reads_by_offset(path)
        if storage.is_remote(path) and (self.copy_remote or not by_offset or size < 0):
            return self.copied(Shard(path, size, tag, by_offset))
        return Shard(path, size, tag, by_offset)

    def copied(self, shard: Shard) -> Shard:
        """The state of a shard that is copied: a known size that the copy does not have is that of a gzip file."""
        with storage.explained(shard.path):
            size = self._open_copy(shard.path, shard.tag).state()[0]
        if shard.size in (-1, size):
            return replace(shard, size=size)
        return Shard(shard.path, size, packed_tag(shard.size, shard.tag), by_offset=False)


def _read_ahead(path: str, state: storage.State) -> Read:
    """Read a remote file in blocks: one request for many headers that are close together."""
    start, block = 0, b""

    def read(offset: int, size: int) -> bytes:
        nonlocal start, block
        if not start <= offset <= offset + size <= start + len(block):
            start, block = offset, storage.read_bytes(path, offset, max(size, BLOCK), state)
        return block[offset - start : offset - start + size]

    return read
