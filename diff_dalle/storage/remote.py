"""Reading a remote file in order, across lost connections: each new request starts at the byte that was reached."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO, cast

from ..config import InputError
from .failures import ChangedError, is_missing, status_of
from .paths import UNKNOWN, FileInfo, State
from .retries import retry

RECEIVE = 1 << 18  # bytes at a time: what a connection that breaks loses


def byte_range(start: int, end: int | None) -> dict[str, str]:
    """The header of a request for a part of a file; none for all of it."""
    return {"Range": f"bytes={start}-{'' if end is None else end - 1}"} if start or end is not None else {}


def beyond_end(start: int, state: State = UNKNOWN) -> Body:
    """The reply to a request that starts after the end of the file."""
    return Body(io.BytesIO().read, lambda: None, start, state, beyond=True)


@dataclass(frozen=True)
class Body:
    """An open reply with the bytes of a file from ``start`` on.

    state: of the whole file. beyond: the file ends before ``start``.
    """

    read: Callable[[int], bytes]
    close: Callable[[], None]
    start: int
    state: State
    beyond: bool = False


class RemoteStream(io.RawIOBase):
    """The bytes of a remote file from ``start`` on, ``size`` of them or up to its end.

    request: ``request(start, end, tag)`` opens a Body; end None = the last byte, tag "" = of any version. A server
             without byte ranges may return one that starts at 0.
    state:   what the file must be; by default what the first reply says.

    Reading raises ChangedError when the file is another one, UnavailableError after repeated failures.
    """

    def __init__(
        self,
        path: str,
        request: Callable[[int, int | None, str], Body],
        start: int = 0,
        size: int | None = None,
        state: State = UNKNOWN,
    ):
        self.path, self.request, self.start, self.state = path, request, start, state
        self.position, self.end = start, None if size is None else start + size
        self.body: Body | None = None

    def readable(self) -> bool:
        return True

    def connect(self) -> RemoteStream:
        """Send the first request now, so that a missing file is reported here."""
        retry(self.path, self._open)
        return self

    def readinto(self, buffer) -> int:
        data = retry(self.path, lambda: self._receive(min(len(buffer), RECEIVE)))
        buffer[: len(data)] = data
        return len(data)

    def readall(self) -> bytes:
        return b"".join(iter(lambda: self.read(RECEIVE) or b"", b""))

    def close(self):
        self._disconnect()
        super().close()

    def _disconnect(self):
        if self.body is not None:
            self.body.close()
            self.body = None

    def _last(self) -> int | None:
        """The end of the bytes to read, None if unknown."""
        ends = [end for end in (self.end, self.state[0]) if end is not None and end >= 0]
        return min(ends, default=None)

    def _open(self):
        if self.body is None:
            try:
                self.body = self.request(self.position, self.end, self.state[1])
            except Exception as error:
                if status_of(error) == 412:  # the condition that the file has the tag is not met
                    raise ChangedError(f"{self.path} has changed: its tag is not {self.state[1]} any more") from error
                raise
            self._check(self.body.state)
            if self.body.beyond:
                if self.state[0] > self.position:
                    raise ChangedError(f"{self.path} has changed: it ends before byte {self.position:,}")
                self.end = self.position
            if self.body.start != self.position:
                self._skip()

    def _check(self, state: State):
        for old, new, unknown in zip(self.state, state, UNKNOWN, strict=True):
            if unknown not in (old, new) and old != new:
                raise ChangedError(f"{self.path} has changed: its size and tag were {self.state}, but are {state}")
        self.state = state[0] if state[0] >= 0 else self.state[0], state[1] or self.state[1]

    def _skip(self):
        """After a reconnection, receive again what was read already."""
        assert self.body is not None
        if self.start or self.body.start:
            raise InputError(f"{self.path}: the server does not support byte ranges: download the file first")
        left = self.position
        while left:
            data = self.body.read(min(left, RECEIVE))
            if not data:
                raise ConnectionError(f"the connection ended {left:,} bytes before byte {self.position:,}")
            left -= len(data)

    def _receive(self, count: int) -> bytes:
        last = self._last()
        if count == 0 or (last is not None and self.position >= last):
            return b""
        try:
            self._open()
            assert self.body is not None
            last = self._last()  # may be known only now
            wanted = count if last is None else min(count, max(0, last - self.position))
            data = self.body.read(wanted) if wanted else b""
            if wanted and not data and last is not None:
                raise ConnectionError(f"the connection ended at byte {self.position:,} of {last:,}")
        except BaseException:
            self._disconnect()
            raise
        self.position += len(data)
        return data


class RemoteReader(ABC):
    """Base class of backends whose files are read by requests."""

    @abstractmethod
    def request(self, path: str, start: int, end: int | None, tag: str) -> Body:
        """See ``RemoteStream``."""

    @abstractmethod
    def size_and_tag(self, path: str) -> State: ...

    def exists(self, path: str) -> bool:
        try:
            self.size_and_tag(path)
        except Exception as error:
            if is_missing(error):
                return False
            raise
        return True

    def _stream(self, path: str, start: int, size: int | None, state: State) -> RemoteStream:
        return RemoteStream(path, lambda *where: self.request(path, *where), start, size, state)

    def open_read(self, path: str, state: State) -> BinaryIO:
        return cast(BinaryIO, self._stream(path, 0, None, state).connect())

    def read(self, path: str, offset: int, size: int | None, state: State) -> bytes:
        with self._stream(path, offset, size, state) as stream:
            return stream.readall()


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
